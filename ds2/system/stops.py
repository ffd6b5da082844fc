"""Signals that end a process: raised where the work is, so that what is open is closed and nothing is left behind."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stopped(BaseException):
    """A signal asked this process to end; no handler of errors takes it for one.

    Attributes:
        number: of the signal.
        status: the exit status that says so.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number, self.status = number, 128 + number


@contextmanager
def stoppable() -> Iterator[None]:
    """Turn the first SIGTERM in the block into `Stopped`; more of them, as launchers send, do not break the clean-up.

    Python runs handlers in the main thread; in another one this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise Stopped(number)

    former = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
