"""Text for language models: plain, .gz or .xz files, line by line, normalised and cut into tokens, with a report."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ds2.lm.ngram import END, SPACE, START, UNITS, UNKNOWN, LanguageModelError
from ds2.text.alphabet import Alphabet, describe
from ds2.text.lines import read_lines


def cut(line: str, unit: str, alphabet: Alphabet | None) -> list[str]:
    """Return the tokens of a normalised line."""
    if unit == "character":
        return [SPACE if character == " " else character for character in line.strip()]
    if unit == "piece" and alphabet is not None:
        return [alphabet.symbols[label] for label in alphabet.spell(line)]
    return line.split()


def _transcript(line: str, where: str) -> str:
    """The text of a manifest's line."""
    try:
        record = json.loads(line) if line.strip() else {"text": ""}
    except (ValueError, RecursionError) as error:
        raise LanguageModelError(f"{where} is not JSON ({error}): a text that is no manifest ends in .txt") from error
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise LanguageModelError(f'{where} has no "text": expected the lines of a manifest')
    return text


@dataclass
class SentenceReader:
    """The sentences of texts as tokens, one a line, normalised by the alphabet; what was left out is counted.

    A file whose name has .jsonl is a manifest, of which the transcripts count.

    `unit` "word" splits on white space; "character" writes a space as <space>; "piece" cuts words as an alphabet of
    pieces does, without one it splits on white space and takes the tokens as they are. Where the alphabet cannot write
    a character, `unknown` decides: "skip" the line, "drop" the character or "stop".
    """

    paths: Sequence[Path]
    unit: str = "word"
    alphabet: Alphabet | None = field(default_factory=lambda: Alphabet(("", *" 'abcdefghijklmnopqrstuvwxyz")))
    unknown: str = "skip"
    lines: int = 0
    empty_lines: int = 0
    skipped_lines: int = 0
    tokens: int = 0
    characters: Counter[str] = field(default_factory=Counter)  # outside the alphabet

    def __post_init__(self) -> None:
        if self.unit == "piece" and self.alphabet is not None and not self.alphabet.has_pieces:
            self.alphabet = None
        if self.unit not in UNITS or self.unknown not in ("skip", "drop", "stop"):
            raise LanguageModelError(
                f"unit={self.unit!r} must be {', '.join(UNITS)}; unknown={self.unknown!r} must be skip, drop or stop"
            )

    def __iter__(self) -> Iterator[list[str]]:
        """Raises LanguageModelError: an unreadable text, a reserved token, or, on "stop", an unknown character."""
        for path in self.paths:
            for number, line in read_lines(path):
                self.lines += 1
                where = f"{path}:{number}"
                tokens = self._tokens(_transcript(line, where) if ".jsonl" in path.suffixes else line, where)
                if tokens:
                    self.tokens += len(tokens)
                    yield tokens

    def _tokens(self, line: str, where: str) -> list[str]:
        if self.alphabet is not None:
            line, unknown = self.alphabet.normalise(line)
            if unknown:
                self.characters.update(unknown)
                if self.unknown == "stop":
                    raise LanguageModelError(
                        f"{where} holds characters outside the alphabet: {describe(unknown)}; "
                        "map them with --replace, or choose --unknown skip or drop"
                    )
                if self.unknown == "skip":
                    self.skipped_lines += 1
                    return []
                line = " ".join("".join(c for c in line if c not in unknown).split())
        tokens = cut(line, self.unit, self.alphabet)
        if not tokens:
            self.empty_lines += 1
        elif reserved := {UNKNOWN, START, END}.intersection(tokens):
            raise LanguageModelError(
                f"{where} holds {', '.join(sorted(reserved))}, which the model itself adds: remove it"
            )
        return tokens

    def report(self) -> str:
        """Describe what was read and what was left out."""
        text = f"{self.lines} lines, {self.tokens} {self.unit}s, {self.empty_lines} empty lines"
        if self.characters:
            fate = f"{self.skipped_lines} lines skipped for" if self.unknown == "skip" else "dropped"
            common = dict(self.characters.most_common(20))
            more = f" and {len(self.characters) - len(common)} others" if len(self.characters) > len(common) else ""
            text += f", {fate} characters outside the alphabet: {describe(common)}{more}"
        return text
