"""Signals that end a process: raised where the work is, so that what is open is closed and nothing is left behind."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

_PR_SET_PDEATHSIG = 1
ENDING = (signal.SIGINT, signal.SIGTERM)
Found = TypeVar("Found")


class Stopped(BaseException):
    """A signal asked this process to end; no handler of errors takes it for one.

    Attributes:
        number: of the signal.
        status: the exit status that says so.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number, self.status = number, 128 + number


class Ends:
    """A handler for a live source, which the first signal ends: at once where it is waited for, else before the next
    wait, so that nothing is left half done. A second one is `Stopped` anywhere.

    Attributes:
        number: of the signal; 0: none has come.
    """

    def __init__(self) -> None:
        self.number, self._waits = 0, False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        again, self.number = self.number, number
        if again or self._waits:
            raise Stopped(number)

    def each(self, get: Callable[[], Found]) -> Iterator[Found]:
        """Yield what `get` gives, until a signal comes."""
        while True:
            try:
                try:
                    self._waits = True
                    if self.number:
                        return
                    found = get()
                finally:
                    self._waits = False
            except Stopped:
                return
            yield found


@contextmanager
def handling(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], object] | signal.Handlers
) -> Iterator[None]:
    """Have these signals handled so in the block. In any thread but the main one, where Python sets handlers, nothing
    changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in former.items():
            signal.signal(number, before)


@contextmanager
def stoppable() -> Iterator[None]:
    """Turn the first SIGTERM in the block into `Stopped`; more of them, as launchers send, change nothing more."""

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise Stopped(number)

    with handling([signal.SIGTERM], stop):
        yield


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Leave SIGINT and SIGTERM to the system in the block, which loads libraries: nothing is open that must be closed.

    Python would answer only when a library of some 100 MB is mapped, seconds later, and with a traceback. What a
    launcher told this process to ignore stays ignored.
    """
    numbers = [n for n in ENDING if signal.getsignal(n) not in (signal.SIG_IGN, None)]
    with handling(numbers, signal.SIG_DFL):
        yield


def end_children() -> None:
    """Kill the workers of this process: they ignore the signals that launchers send to all, and may be in a read."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler takes their end for an accident
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


@contextmanager
def worker_processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """Fresh processes rather than forks of one that has threads; what ends the block early ends them in mid-work."""
    from concurrent.futures import ProcessPoolExecutor  # here: most commands start no workers

    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"), initializer=become_worker)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in set(multiprocessing.active_children()) - others:
            worker.kill()
        raise
    pool.shutdown()


def become_worker() -> None:
    """Leave the signals that terminals and launchers send to whole groups to the parent, which cleans up, and end with
    it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()


def end_with_parent() -> None:
    """Let the system kill this process when its parent dies, of whatever (Linux; elsewhere workers notice)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        parent = multiprocessing.parent_process()
        if parent is not None and os.getppid() != parent.pid:  # it was gone before
            os.kill(os.getpid(), signal.SIGKILL)
