"""Safe terminal output: control characters in texts of files are escaped, not executed."""

from __future__ import annotations

import io
import logging
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO, cast

_JOINERS = "\u200c\u200d"  # join letters in Persian, Hindi and others: part of the text


def visible(text: str) -> str:
    """Return the text with control and reordering characters escaped, such as \\x1b; line ends and tabs stay."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c in "\n\t" + _JOINERS or not _is_control(c) else _escape(c) for c in text)


def _is_control(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


class VisibleFormatter(logging.Formatter):
    """A log formatter that escapes control characters."""

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
    """Make `print` safe in the block: a terminal gets `visible` text, and characters without encoding are escaped.

    Pipes and files get the text unchanged, except for characters that their encoding lacks.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    stdout = sys.stdout
    if stdout.isatty():
        sys.stdout = cast(TextIO, _VisibleStream(stdout))
    try:
        yield
    finally:
        sys.stdout = stdout
