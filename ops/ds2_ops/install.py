"""The command that installs an extra of this project from where this copy came."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shlex
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

PROJECT = "ds2-speech"


def install_command(extra: str) -> str:
    """Return a `pip install` command for an extra, from the checkout, wheel, address or index of this copy.

    A folder or wheel that is gone cannot be installed from: the command then lists the packages of the extra.

    Args:
        extra: a name under `project.optional-dependencies` of pyproject.toml.
    """
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file():
        return _pip("-e", f"{checkout}[{extra}]")
    try:
        distribution = importlib.metadata.distribution(PROJECT)
    except importlib.metadata.PackageNotFoundError:
        return _pip(f"{PROJECT}[{extra}]")
    return _from_origin(extra, distribution.read_text("direct_url.json"), distribution.requires or [])


def _from_origin(extra: str, direct_url: str | None, requirements: list[str]) -> str:
    """Return the command for an installed copy.

    Args:
        extra: as `install_command`.
        direct_url: content of direct_url.json (PEP 610); None: the copy came from an index.
        requirements: Requires-Dist of its metadata.
    """
    if direct_url is None:
        return _pip(f"{PROJECT}[{extra}]")
    origin = json.loads(direct_url)
    url = urlsplit(origin["url"])
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        return _pip(f"{PROJECT}[{extra}] @ {vcs['vcs']}+{origin['url']}@{vcs['commit_id']}")
    if url.scheme != "file":
        return _pip(f"{PROJECT}[{extra}] @ {origin['url']}")
    path = Path(url2pathname(url.path))
    if path.exists():
        return _pip(f"{path}[{extra}]")
    marker = re.compile(rf"""extra\s*==\s*['"]{re.escape(extra)}['"]""")
    return _pip(*(r.partition(";")[0].strip() for r in requirements if marker.search(r.partition(";")[2])))


def _pip(*arguments: str) -> str:
    return f"pip install {shlex.join(arguments)}"
