"""Signals that end a process: raised where the work is, so that what is open is closed and nothing is left behind."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_PR_SET_PDEATHSIG = 1


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


def end_children() -> None:
    """Kill the workers of this process: they ignore the signals that launchers send to all, and may be in a read."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler takes their end for an accident
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def end_with_parent() -> None:
    """Let the system kill this worker when its parent dies, of whatever (Linux; elsewhere it notices by itself)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        parent = multiprocessing.parent_process()
        if parent is not None and os.getppid() != parent.pid:  # it was gone before
            os.kill(os.getpid(), signal.SIGKILL)
