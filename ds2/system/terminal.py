"""What files say, on a terminal: characters that would command it are shown instead, whatever a path or text holds."""

from __future__ import annotations

import io
import logging
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO, cast

_JOINERS = "\u200c\u200d"  # of letters, in Persian, Hindi and others: part of the text


def visible(text: str) -> str:
    """Return the text with every character that moves, colours or reorders what is shown as its escape: \\x1b.

    Line ends, tabs and joiners of letters stay.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c in "\n\t" + _JOINERS or not _commands(c) else _escape(c) for c in text)


def _commands(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


class VisibleFormatter(logging.Formatter):
    """Log lines of which no part commands the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        return visible(super().format(record))


class _VisibleStream(io.TextIOBase):
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(visible(text))
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


@contextmanager
def safe_output() -> Iterator[None]:
    """Print in the block without harm: a terminal gets `visible` text, and no encoding fails on a character.

    Pipes and files get texts as they are, but for what their encoding lacks, which is escaped.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    former = sys.stdout
    if former.isatty():
        sys.stdout = cast(TextIO, _VisibleStream(former))
    try:
        yield
    finally:
        sys.stdout = former
