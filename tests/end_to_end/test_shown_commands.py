"""Every command that a page shows is one that today's parsers and settings take, and every file it names is there."""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from support.paths import ROOT
from support.tiny import compose_once

from ds2.cli import COMMANDS, main
from ds2.commands.compose import first_of_sweep, with_search_path
from ds2.commands.train import options_and_overrides

LOG = ROOT / "docs" / "log"  # history: its commands and paths are those of their commits
PAGES = [page for folder in (".", "ds2", "ops", "docs") for page in sorted((ROOT / folder).glob("*.md"))]
PAGES += [page for folder in ("guide", "design", "results") for page in sorted((ROOT / "docs" / folder).glob("*.md"))]
PAGES += sorted((ROOT / "recipes").rglob("*.md"))
HISTORY = ROOT / "CHANGELOG.md"
MAX_BYTES = 200_000  # of all pages together, the log left out
COMMAND = re.compile(rf"(?<![\w./-])ds2 (?:{'|'.join(COMMANDS)})\b|ds2\.cli (?:{'|'.join(COMMANDS)})\b|tools/\w+\.py")
BLOCK = re.compile(r"^```\w*\n[\s\S]*?^```$|(?:^ {4}.*\n)+", re.MULTILINE)
SPAN = re.compile(r"`([^`]+)`")
REMARK = re.compile(r"\s+#\s.*|(?<=\S)\s{3,}.*|\s>\s.*")
SETTING = re.compile(r"[a-z_]+(?:\.\w+)*=")
RESULTS = ROOT / "docs" / "results"
REMOVED = set(
    re.findall(r"tools/\w+\.py", (RESULTS / "index.md").read_text("utf-8").partition("## Tools that are gone")[2])
)
FILES_OF_OTHERS = (
    "checkpoint.init_from=",
    "alphabet.pieces_file=",
    "train.intermediate_lexicon=",
)  # read while composing, and not here


class Parsed(Exception):
    """A command line went through its parser, which found `given` in it."""

    def __init__(self, given: argparse.Namespace) -> None:
        super().__init__()
        self.given = given


def shown(page: Path) -> Iterator[str]:
    """The commands of a page: all of its blocks, those with arguments of its running text."""
    text = page.read_text(encoding="utf-8")
    for block in BLOCK.findall(text):
        joined = re.sub(r"\\\n\s*", "", block)
        variables = re.compile(r'^\s*(\w+)="([^"]*)"', re.MULTILINE)
        lines = variables.sub("", joined)
        for name, value in reversed(variables.findall(joined)):  # one may hold those before it
            lines = lines.replace(f"${name}", value)
        for line in lines.partition("git checkout ")[0].splitlines():  # after it, commands of that commit
            for part in re.split(r";|&&|\||\s&\s", REMARK.sub("", line)):
                yield from command_of(part)
    for span in SPAN.findall(BLOCK.sub("", text)):
        if re.search(r" --\w| \w[\w.]*=", span):
            yield from command_of(" ".join(span.split()))


def command_of(line: str) -> Iterator[str]:
    """The command in a part of a line, without launchers before it and remarks behind it."""
    if found := COMMAND.search(line):
        command = line[found.start() :].rstrip(") ").replace("ds2.cli", "ds2")
        if found.group() in REMOVED:  # test_files_that_a_page_names_are_there says which pages may name it
            return
        yield command.replace("model=NAME", "model=rnn_8").replace("recipe=NAME", "recipe=an4")


def settings_of(words: list[str]) -> list[str]:
    """Run a command as far as its parser, and return what it would compose."""
    if words[:2] == ["ds2", "train"] and "--help" not in words:
        return options_and_overrides(with_search_path(words[2:]))[1]
    try:
        if words[0] == "ds2":
            assert main(words[1:]) == 0
        else:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sys, "argv", words)
                runpy.run_path(str(ROOT / words[0]), run_name="__main__")
    except Parsed as parsed:
        shares = getattr(parsed.given, "shares", None) or []
        return [word for word in with_search_path(words) if SETTING.match(word) and word not in shares]
    except SystemExit as ended:
        assert not ended.code
    return []


@pytest.fixture(autouse=True)
def parsers_that_only_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each parser stop where it has parsed, in a folder with the reader's own recipe and alphabet."""
    monkeypatch.chdir(tmp_path)
    for group in ("recipe", "alphabet"):
        (tmp_path / "my_conf" / group).mkdir(parents=True)
        (tmp_path / "my_conf" / group / "mine.yaml").write_text("# @package _global_\n", encoding="utf-8")

    def stop_there(parse: object) -> object:
        def parsed(*arguments: object, **named: object) -> NoReturn:
            raise Parsed(parse(*arguments, **named))  # type: ignore[operator]

        return parsed

    for name in ("parse_args", "parse_intermixed_args"):
        monkeypatch.setattr(argparse.ArgumentParser, name, stop_there(getattr(argparse.ArgumentParser, name)))


def test_every_page_is_known() -> None:
    skipped = {".venv", "build", "dist", "node_modules"}
    found = {page for page in ROOT.rglob("*.md") if not skipped & set(page.relative_to(ROOT).parts)}
    found = {page for page in found if not any(part.startswith(".") for part in page.relative_to(ROOT).parts)}
    assert {page for page in found if LOG not in page.parents} == set(PAGES)


def test_pages_are_short_enough_to_be_read() -> None:
    assert sum(page.stat().st_size for page in PAGES) <= MAX_BYTES
    assert (ROOT / "README.md").stat().st_size <= 8_000


def missing_links(page: Path, text: str) -> list[str]:
    linked = [name for name in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in name]
    return [name for name in linked if not (page.parent / name).exists()]


@pytest.mark.parametrize("page", [page for page in PAGES if page != HISTORY], ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = missing_links(page, text)
    kinds = "py|md|yaml|png|json|tsv|sh|sbatch|cuh|h"
    named = re.findall(rf"(?<![\w/.-])(?:tests|tools|ds2|ops|csrc|recipes|conf|docs)/[\w/.-]*\w\.(?:{kinds})\b", text)
    named += re.findall(r"`([\w-]+/[\w/.-]*\w\.(?:py|cuh))`", text)  # of the maps, relative to their package
    bases = (ROOT, ROOT / "ds2", ROOT / "ops", ROOT / "ops" / "ds2_ops", page.parent)
    missing += [name for name in named if not any((base / name).exists() for base in bases)]
    removed = REMOVED if page.parent == RESULTS else set()
    assert not [name for name in missing if name not in removed and "NAME" not in name and "TITLE" not in name]


def test_tools_that_are_gone_are_gone() -> None:
    assert REMOVED
    assert not {name for name in REMOVED if (ROOT / name).exists()}


def test_links_of_the_log_lead_somewhere() -> None:
    pages = sorted(LOG.rglob("*.md"))
    assert len(pages) > 20
    assert not {page.name: missing for page in pages if (missing := missing_links(page, page.read_text("utf-8")))}


@pytest.mark.parametrize("page", [page for page in PAGES if page != HISTORY and any(shown(page))], ids=lambda p: p.name)
def test_all_commands_of_a_page(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {}
    for command in dict.fromkeys(shown(page)):
        try:
            settings = settings_of([word for word in shlex.split(command) if word not in ("...", "…")])
            if here := [setting for setting in settings if not setting.startswith(FILES_OF_OTHERS)]:
                compose_once(*first_of_sweep(here), "run_dir=unused")
        except (Exception, SystemExit) as error:
            wrong[command] = " ".join([repr(error), *capsys.readouterr().err.strip().splitlines()[-1:]])
    assert not wrong, "\n".join(f"{command}\n    {reason}" for command, reason in wrong.items())
