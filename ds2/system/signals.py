"""Stop signals: SIGINT and SIGTERM become exceptions or flags, and worker processes end with their parent."""

import _thread
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

_PR_SET_PDEATHSIG = 1
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_IGNORED_BY_WORKERS = (*STOP_SIGNALS, signal.SIGUSR1, signal.SIGHUP)
_SEND_AGAIN_S = 0.05
Item = TypeVar("Item")


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that end a server or a training: SIGHUP, of a closed terminal, unless it is ignored, as by nohup."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return STOP_SIGNALS if ignored else (*STOP_SIGNALS, signal.SIGHUP)


class Stopped(BaseException):
    """A signal, its `number`, asked this process to stop, whose exit `status` is then 128 + number.

    Not an `Exception`, so that no error handler catches it by accident.
    """

    dropped = False  # by Python, see `raise_on_stop_signals`: the next signal has to raise another one

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number, self.status = number, 128 + number


class StopHandler:
    """A signal handler for loops over a live source.

    The first signal ends `until_stopped`: at once while it waits for the source, otherwise before the next wait, so
    that an item is processed completely. A second signal raises `Stopped` anywhere. `number` is that of the signal
    received; 0 if there was none.
    """

    def __init__(self) -> None:
        self.number, self._waiting = 0, False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        repeated, self.number = self.number, number
        if repeated or self._waiting:
            raise Stopped(number)

    def until_stopped(self, get: Callable[[], Item]) -> Iterator[Item]:
        """Yield the results of `get` until a signal arrives."""
        while True:
            try:
                try:
                    self._waiting = True
                    if self.number:
                        return
                    item = get()
                finally:
                    self._waiting = False
            except Stopped:
                return
            yield item


@contextmanager
def handle_signals(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], object] | signal.Handlers
) -> Iterator[None]:
    """Install a handler for these signals during the block. Outside the main thread it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old_handler in previous.items():
            signal.signal(number, old_handler)


@contextmanager
def raise_on_stop_signals() -> Iterator[None]:
    """Raise `Stopped` at the first SIGTERM in the block, and KeyboardInterrupt at each SIGINT unless it is ignored.

    Later SIGTERMs, which launchers send too, are ignored. Python drops an exception that a handler raises within a
    finalizer, a hook of `os.fork` or a function that a library in C calls: such a signal is sent again, and an error
    of the block until then is taken for its consequence.
    """
    stopped: Stopped | None = None
    lost: BaseException | None = None
    report_dropped = sys.unraisablehook

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        if stopped is None or stopped.dropped:
            stopped = Stopped(number)
            raise stopped

    def send_again(number: int) -> None:  # in a thread: the finalizer must have ended
        nonlocal lost
        time.sleep(_SEND_AGAIN_S)
        lost = None
        os.kill(os.getpid(), number)

    def check_dropped(dropped: "sys.UnraisableHookArgs") -> None:
        nonlocal lost
        error = dropped.exc_value
        if isinstance(error, Stopped):
            error.dropped = True
        if isinstance(error, Stopped | KeyboardInterrupt):
            lost, number = error, error.number if isinstance(error, Stopped) else signal.SIGINT
            _thread.start_new_thread(send_again, (number,))  # a `threading.Thread` takes locks that may be held
        else:
            report_dropped(dropped)

    interrupts = [signal.SIGINT] if signal.getsignal(signal.SIGINT) is signal.SIG_DFL else []
    with handle_signals(interrupts, signal.default_int_handler), handle_signals([signal.SIGTERM], stop):
        sys.unraisablehook = check_dropped
        try:
            yield
        except Exception:
            if lost:
                raise lost from None
            raise
        finally:
            sys.unraisablehook = report_dropped


@contextmanager
def default_signals() -> Iterator[None]:
    """Let SIGINT and SIGTERM end the process at once during the block, which loads libraries and has nothing to close.

    Python handles signals between bytecodes only: while it loads a library of 100 MB, Ctrl-C would wait for seconds
    and then print a traceback. Signals that the launcher set to be ignored stay ignored.
    """
    numbers = [n for n in STOP_SIGNALS if signal.getsignal(n) not in (signal.SIG_IGN, None)]
    with handle_signals(numbers, signal.SIG_DFL):
        yield


@contextmanager
def time_limit(seconds: float, error: Exception) -> Iterator[None]:
    """Raise `error` in a block that takes longer, also within a call that handles signals, as `re.search` does.

    Outside the main thread there is no limit.
    """

    def expire(number: int, frame: FrameType | None) -> None:
        raise error

    is_main = threading.current_thread() is threading.main_thread()
    with handle_signals([signal.SIGALRM], expire):
        try:
            if is_main:
                signal.setitimer(signal.ITIMER_REAL, seconds)
            yield
        finally:
            if is_main:
                signal.setitimer(signal.ITIMER_REAL, 0)


def kill_workers() -> None:
    """Kill the daemon processes of this process: they ignore stop signals and may be blocked in a read."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would report their end as an error
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


@contextmanager
def worker_processes(count: int, method: str = "spawn") -> Iterator["ProcessPoolExecutor"]:
    """Start a pool of `count` processes, which an exception in the block kills at once; "fork" shares memory."""
    from concurrent.futures import ProcessPoolExecutor  # most commands start no workers

    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(count, mp_context=multiprocessing.get_context(method), initializer=init_worker)
    try:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED_BY_WORKERS)  # a worker inherits it until `init_worker`
        try:
            for _ in range(count):
                pool.submit(int)  # starts a worker
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in set(multiprocessing.active_children()) - others:
            worker.kill()
        raise
    pool.shutdown()


def init_worker() -> None:
    """Ignore stop signals in a worker process, whose parent handles them, and end the worker when the parent ends."""
    for number in _IGNORED_BY_WORKERS:
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        parent = multiprocessing.parent_process()
        if parent is not None and os.getppid() != parent.pid:  # the parent died before prctl
            os.kill(os.getpid(), signal.SIGKILL)
