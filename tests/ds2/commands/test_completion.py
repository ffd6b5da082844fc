"""`ds2 completion`: the words of all parsers, and what the shells make of the scripts."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from ds2.cli import COMMANDS, main
from ds2.commands.completion import command_tree

CASES = [
    ("tra", ["train", "transcribe"]),
    ("data im", ["import"]),
    ("data split --by s", ["speaker"]),
    ("train recipe=an4_b", ["recipe=an4_bidirectional"]),
    ("train --config-dir x model=gru_4_512_", ["model=gru_4_512_no_skip"]),
    ("train model.cel", ["model.cell="]),
    ("evaluate m decode.alp", ["decode.alpha="]),
    ("lm tune m b decode=na", ["decode=native"]),
    ("transcribe m --form", ["--format"]),
    ("transcribe m --format js", ["json"]),
    ("serve m model.", []),
    ("data lexicon out alphabet.num", ["alphabet.numbers="]),
    ("data normalise --config-d", ["--config-dir"]),
]
BASH = (
    """source ./bash; compopt() { :; }; COMP_WORDS=(ds2 "$@"); COMP_CWORD=$#; _ds2; printf "%s\n" "${COMPREPLY[@]}" """
)
ZSH = """compdef() { : }; _files() { : }; compset() { : }
compadd() { while [[ $1 != -- ]]; do shift; done; print -l -- $@ }
source ./zsh; words=(ds2 $@); CURRENT=$#words; _ds2"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script of each shell, under its name."""
    folder = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh", "fish"):
        with pytest.MonkeyPatch.context() as patch, (folder / shell).open("w") as file:
            patch.setattr("sys.stdout", file)
            assert main(["completion", shell]) == 0
    return folder


def complete(shell: str, scripts: Path, line: str, program: str) -> list[str]:
    """What a shell prints, sorted: `program` is run after the script, with the words of the line."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    none = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    command = [shell, *none, "-c", program, *(["ds2"] if shell != "fish" else []), *shlex.split(line)]
    done = subprocess.run(command, cwd=scripts, capture_output=True, text=True, timeout=600, check=True)
    assert done.stderr == ""
    return sorted(done.stdout.split())


def test_every_command_is_in_the_tree() -> None:
    tree = {command.name: command for command in command_tree()}
    assert sorted(tree[""].words) == sorted(COMMANDS) == sorted({name.split()[0] for name in tree if name})
    assert {"data check", "data normalise", "lm tune"} <= set(tree)
    assert tree["transcribe"].options["--format"] == ("text", "json", "srt", "vtt")
    assert tree["transcribe"].options["--out"] == () and tree["transcribe"].options["--stream"] is None
    assert "recipe=an4" in tree["data check"].overrides() and tree["data split"].overrides() == []
    assert all(word.startswith("decode") for word in tree["evaluate"].overrides())


@pytest.mark.parametrize(("line", "words"), CASES)
def test_bash(line: str, words: list[str], scripts: Path) -> None:
    assert complete("bash", scripts, line, BASH) == words
    if "=" in line:  # readline splits words at it, and replaces the part behind it
        line, prefix = line.replace("=", " = "), line.rsplit(maxsplit=1)[-1].partition("=")[0] + "="
        assert complete("bash", scripts, line, BASH) == [word.removeprefix(prefix) for word in words]


def test_bash_offers_what_can_come_next(scripts: Path) -> None:
    assert complete("bash", scripts, "''", BASH) == sorted(COMMANDS)
    assert complete("bash", scripts, "completion ''", BASH) == ["bash", "fish", "zsh"]
    for command in ("evaluate", "data lexicon"):
        assert complete("bash", scripts, f"{command} ''", BASH) == []  # files, by `-o default`
    assert complete("bash", scripts, "transcribe m --format = ''", BASH) == ["json", "srt", "text", "vtt"]


@pytest.mark.parametrize(("line", "words"), CASES)
def test_fish(line: str, words: list[str], scripts: Path) -> None:
    assert complete("fish", scripts, "", f"source ./fish; complete -C 'ds2 {line}'") == words


@pytest.mark.parametrize(("line", "words"), CASES)
def test_zsh(line: str, words: list[str], scripts: Path) -> None:
    """The candidates; zsh itself takes those that begin as the word does."""
    offered = complete("zsh", scripts, line, ZSH)
    assert [word for word in offered if word.startswith(line.rsplit(maxsplit=1)[-1])] == words
