"""The Dockerfiles: what they copy is there and enough to run ds2, and they install as the README says."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

from ds2.cli import COMMANDS

FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


def instructions(file: Path, name: str) -> list[str]:
    """The arguments of all instructions of a name, in order."""
    text = re.sub(r"\\\n", " ", file.read_text(encoding="utf-8"))
    return re.findall(rf"^{name} (.*)$", text, re.MULTILINE)


def copied(file: Path) -> list[tuple[str, str]]:
    """Sources in the checkout and destinations."""
    return [(source, words[-1]) for words in map(str.split, instructions(file, "COPY")) for source in words[:-1]]


def test_there_is_one_for_cpus_and_one_for_gpus() -> None:
    assert [file.name for file in FILES] == ["cpu.Dockerfile", "cuda.Dockerfile"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_everything_that_is_copied_reaches_the_build(file: Path) -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")}
    sources = [source for source, _ in copied(file)]
    assert set(sources) == allowed
    tracked = subprocess.run(["git", "ls-files", *sources], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {line.partition("/")[0] for line in tracked.split()} == set(sources)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_what_is_installed_is_what_the_readme_installs(file: Path) -> None:
    lines = re.findall(r"^    (pip install .*)$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    [line] = [line for line in lines if ("gpu" in line) == ("cuda" in file.name)]
    installed = [command for command in instructions(file, "RUN") if command.startswith("pip ")]
    assert installed == line.split(" && ")


def test_what_is_copied_is_enough(tmp_path: Path) -> None:
    for number, copies in enumerate({tuple(copied(file)) for file in FILES}):  # mostly the same ones
        folder = tmp_path / str(number)
        folder.mkdir()
        for source, destination in copies:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, folder / destination)  # with what is compiled of it
            else:
                shutil.copy(ROOT / source, folder / destination)
        named = re.findall(r"[\w./-]+\.(?:md|txt|toml)\b|LICENSE", (folder / "pyproject.toml").read_text())
        assert {"README.md", "LICENSE"} <= {name for name in named if (folder / name).is_file()}
        environment = {**os.environ, "PYTHONPATH": f"{folder}:{folder / 'ops'}"}
        command = [sys.executable, "-m", "ds2.cli", "info", "recipe=synthetic"]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
        assert "parameters" in done.stdout


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_commands_in_the_comments_are_commands_of_ds2(file: Path) -> None:
    lines = re.findall(r"^#     docker run (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(lines) == 2
    for line in lines:
        words = shlex.split(line)
        words = words[words.index(f"ds2:{file.name.partition('.')[0]}") + 1 :]
        if "ds2.cli" in words:
            words = words[words.index("ds2.cli") + 1 :]
        assert words[0] in COMMANDS
