"""Output for people: control characters are escaped, not executed; warnings that are logged once; progress."""

import io
import logging
import os
import re
import sys
import tempfile
import threading
import time
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Self, TextIO, TypeVar, cast

log = logging.getLogger(__name__)
_stderr_lock = threading.Lock()
_CONTROL = ("Cc", "Cf", "Cs", "Zl", "Zp")  # Unicode categories
_ALLOWED = "\n\t\u200c\u200d"  # of these; the last two join letters in Persian, Hindi and others
_EVERY_S = 60.0
Item = TypeVar("Item")


def visible(text: str) -> str:
    """Return the text with control and reordering characters escaped, such as \\x1b; line ends and tabs stay."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        c.encode("unicode_escape").decode("ascii") if unicodedata.category(c) in _CONTROL and c not in _ALLOWED else c
        for c in text
    )


class VisibleFormatter(logging.Formatter):
    """A log formatter that escapes control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


@lru_cache(maxsize=4096)
def warn_once(logger: logging.Logger, message: str) -> None:
    """Log a warning, once a process for each message."""
    logger.warning("%s", message)


@contextmanager
def stderr_without(noise: re.Pattern[str]) -> Iterator[None]:
    """Drop lines that match `noise` as a whole from what the process prints to standard error in the block.

    It is for libraries in C that print what Python cannot turn off. Other lines are printed at the end of the block,
    those of other threads too.
    """
    with _stderr_lock, tempfile.TemporaryFile() as file:
        try:
            sys.stderr.flush()
            before = os.dup(2)
        except (AttributeError, OSError):  # the process was started without standard error
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


def open_missing_streams() -> None:
    """Open /dev/null where the process was started without standard input, output or error.

    Else a file that is opened takes the number, and what a library prints lands in it.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for number, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        if getattr(sys, name) is None:
            if null == number:
                os.set_inheritable(null, True)
            else:
                os.dup2(null, number)
            setattr(sys, name, open(number, mode, encoding="utf-8"))  # noqa: SIM115
    if null > 2:
        os.close(null)


def stderr_is_terminal() -> bool:
    """Whether standard error is a terminal; a Python program may have been started without it, as by `2>&-`."""
    return sys.stderr is not None and sys.stderr.isatty()


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


class ProgressBar:
    """Shows how much of some work is done: a bar on a terminal, elsewhere a line of the log a minute.

    Args:
        what: the work, in a few words; may be changed later.
        total: amount of work; None if it is not known.
        shown: False shows nothing, as on all ranks but 0.
    """

    def __init__(self, what: str, total: float | None, unit: str, *, shown: bool = True) -> None:
        self.what, self.total, self.unit, self.shown = what, total, unit, shown
        self.done, self._began = 0.0, time.monotonic()
        self._reported_at = self._began
        self._bar = None
        if shown and stderr_is_terminal():
            from tqdm import tqdm  # imported late: commands that end at once do without

            self._bar = tqdm(total=total, desc=visible(what), unit=f" {unit}", dynamic_ncols=True, leave=False)

    def update(self, done: float) -> None:
        """Set the amount that is done."""
        step, self.done = done - self.done, done
        if self._bar is not None:
            self._bar.set_description(visible(self.what), refresh=False)
            self._bar.update(round(step, 1))
        elif self.shown and (now := time.monotonic()) - self._reported_at >= _EVERY_S:
            self._reported_at = now
            log.info("%s: %s", self.what, self._line(now))

    def over(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the items; each is one unit of the work, done when the next is asked for."""
        for item in items:
            yield item
            self.update(self.done + 1)

    def _line(self, now: float) -> str:
        if self.total is None or not self.done:
            return f"{self.done:.0f} {self.unit}"
        left_min = (now - self._began) / 60 * max(0.0, self.total / self.done - 1)
        return f"{self.done:.0f} of {self.total:.0f} {self.unit}, {left_min:.0f} min left"

    def clear(self) -> None:
        """Remove the bar from the terminal, until the next update, before something is printed there."""
        if self._bar is not None:
            self._bar.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
