"""Safe terminal output: control characters in texts of files are escaped, not executed."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import tempfile
import threading
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO, cast

_stderr_lock = threading.Lock()
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


@contextmanager
def stderr_without(noise: re.Pattern[str]) -> Iterator[None]:
    """Drop lines that match `noise` as a whole from what the process prints to standard error in the block.

    It is for libraries in C that print what Python cannot turn off. Other lines are printed at the end of the block,
    those of other threads too.
    """
    with _stderr_lock, tempfile.TemporaryFile() as file:
        sys.stderr.flush()
        try:
            before = os.dup(2)
        except OSError:  # the process was started without standard error
            before = -1
        if before < 0:
            yield
            return
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            lines = file.read().decode(errors="backslashreplace").splitlines(keepends=True)
            sys.stderr.write("".join(line for line in lines if not noise.fullmatch(line.rstrip("\n"))))
            sys.stderr.flush()


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
