"""`make docs`: the site builds without a warning, has every module, and a link that leads nowhere is an error."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT

mkdocs_config = pytest.importorskip("mkdocs.config", reason="mkdocs-material belongs to the extra dev")


def build(site: Path, **settings: Any) -> None:
    from mkdocs.commands.build import build as build_site

    config = mkdocs_config.load_config(str(ROOT / "mkdocs.yml"), site_dir=str(site), strict=True, **settings)
    config.plugins.on_startup(command="build", dirty=False)
    try:
        build_site(config)
    finally:
        config.plugins.on_shutdown()


@pytest.mark.slow
def test_every_module_is_in_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mkdocstrings", reason="mkdocstrings belongs to the extra dev")
    monkeypatch.chdir(ROOT)
    build(tmp_path / "site")
    reference = "".join(page.read_text(encoding="utf-8") for page in (tmp_path / "site" / "api").glob("*.html"))
    modules = 0
    for base, package in ((ROOT, "ds2"), (ROOT / "ops", "ds2_ops")):
        for file in (base / package).rglob("*.py"):
            name = ".".join(file.relative_to(base).with_suffix("").parts).removesuffix(".__init__")
            assert f'id="{name}"' in reference, name
            modules += 1
    assert modules > 150
    assert "Recogniser.transcribe" in reference


def test_a_link_that_leads_nowhere_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mkdocs.exceptions import Abort

    monkeypatch.chdir(ROOT)
    build(tmp_path / "site", hooks=[], plugins=[])
    pages = tmp_path / "docs"
    (pages / "guide").mkdir(parents=True)
    (pages / "guide" / "train.md").write_text("# Train\n\n## Recipes\n", encoding="utf-8")
    nav = ["index.md", "guide/train.md"]
    for target in ("guide/train.md#recipes", "nowhere.md", "guide/train.md#nowhere", "../README.md"):
        (pages / "index.md").write_text(f"# Home\n\n[there]({target})\n", encoding="utf-8")
        with nullcontext() if target.endswith("#recipes") else pytest.raises(Abort):
            build(tmp_path / "small", docs_dir=str(pages), nav=nav, hooks=[], plugins=[])
