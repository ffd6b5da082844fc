"""Words of the former dialect do not come back as identifiers; what is left of them is listed, and only shrinks."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.paths import ROOT

REPLACED = {
    "hear": "forward, step, accept_waveform, receive, handle",
    "heard": "processed, received, consumed",
    "hearing": "a class named by what it does",
    "told": "reported, reduced",
    "news": "report, extra_counts",
    "settle": "resolve, choose, deliver, finalise",
    "settled": "resolved, chosen, final",
    "amid": "interior",
    "beside": "side_stream, deferred",
    "aside": "side_stream, projection_stream",
    "calm": "tune_gc",
    "patience": "idle timeout",
    "given": "inputs, arguments, or what the value is",
    "found": "matches, result, or what the value is",
    "kept": "cached, saved, remaining",
    "former": "previous",
    "said": "text, reference, output",
    "begun": "started",
    "carried": "state",
    "passage": "run",
    "room": "slot, buffer",
    "rooms": "slots, buffers",
    "lane": "stream",
    "here": "local",
    "there": "remote",
    "asker": "caller, client",
    "whereabouts": "position, progress",
}
"""Each word and what a reader of PyTorch and speech recognition code expects instead."""
LEFT = Path(__file__).with_name("words.tsv")
_TESTS = [f"tests/{name}" for name in ("support", "ds2/serve", "ds2/recognition", "ds2/commands")]
SOURCES = [ROOT / folder for folder in ("ds2", "ops/ds2_ops", "tools", *_TESTS)]
PARTS = re.compile(r"_+|(?<=[a-z0-9])(?=[A-Z])")


def identifiers(tree: ast.AST) -> Iterator[str]:
    """All names that a module defines or uses: variables, attributes, arguments, keywords, functions, classes."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.keyword(arg=str(name)):
                yield name
            case ast.alias(name=name, asname=renamed):
                yield from (renamed or name).split(".")


def words_of(source: str) -> Counter[str]:
    """Count the replaced words among the parts of a module's identifiers."""
    counts = Counter[str]()
    for name, count in Counter(identifiers(ast.parse(source))).items():
        if not name.endswith("NotFoundError"):  # Python's own
            for part in PARTS.split(name):
                counts[part.lower()] += count * (part.lower() in REPLACED)
    return +counts


def words_in_the_tree() -> dict[tuple[str, str], int]:
    """(word, file) -> how often."""
    counted = {}
    for folder in SOURCES:
        for file in sorted(folder.rglob("*.py")):
            for word, count in words_of(file.read_text(encoding="utf-8")).items():
                counted[word, file.relative_to(ROOT).as_posix()] = count
    return counted


def allowed() -> dict[tuple[str, str], int]:
    """The list; of a word that a merge of two branches left twice, the larger count."""
    counts: dict[tuple[str, str], int] = {}
    for line in LEFT.read_text(encoding="utf-8").splitlines():
        word, file, count = line.split("\t")
        counts[word, file] = max(int(count), counts.get((word, file), 0))
    return counts


def test_no_replaced_word_comes_back() -> None:
    listed = allowed()
    new = {key: count for key, count in words_in_the_tree().items() if count > listed.get(key, 0)}
    shown = [f"{file}: `{word}` {count} times; write {REPLACED[word]}" for (word, file), count in sorted(new.items())]
    assert not shown, "\n".join(shown)


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("def hear(x): pass", "hear"),
        ("class HeardThings: pass", "heard"),
        ("a.was_told = 1", "told"),
        ("def f(*, _given): pass", "given"),
        ("f(beside=1)", "beside"),
        ("from a import b as Here", "here"),
    ],
)
def test_every_kind_of_identifier_is_looked_at(source: str, word: str) -> None:
    assert words_of(source) == {word: 1}


def test_other_words_that_contain_them_are_fine() -> None:
    assert not words_of("shear = overheard = adhere = therefore = planes = newsletter = forgiven = 1  # hear, told")


if __name__ == "__main__":  # python tests/end_to_end/test_words.py: write the list anew, after words have gone
    lines = [f"{word}\t{file}\t{count}\n" for (word, file), count in sorted(words_in_the_tree().items())]
    LEFT.write_text("".join(lines), encoding="utf-8")
