"""The recogniser's side of a server in several processes: what workers ask, over a socket each, in its one thread.

A thread for each worker would wait for Python's lock while the recogniser runs, and the recogniser for theirs.
"""

from __future__ import annotations

import logging
import select
import selectors
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ds2.recognition.session import Live
from ds2.serve.dispatch import Answers, Dispatch, Job
from ds2.serve.frames import Frames, frame
from ds2.serve.limits import BrokenError
from ds2.system.errors import UserError

log = logging.getLogger(__name__)
_LATER = object()  # an answer that another thread gives
_PIECE = 1 << 20  # bytes read at a time
_STUCK_S = 10.0  # a worker that takes nothing for so long is given up


class Link:
    """A worker, at the recogniser's side."""

    def __init__(self, dispatch: Dispatch, end: socket.socket) -> None:
        self.dispatch, self.end = dispatch, end
        end.setblocking(False)
        self.begun = False  # whether the worker has
        self._frames = Frames()
        self._lives: dict[int, Live | UserError] = {}  # by the worker's number of it; or why it could not join
        self._lock = threading.Lock()  # for sources that join in the thread of hot words
        self._sending = threading.Lock()
        self._joining: set[int] = set()
        self._planting = ThreadPoolExecutor(1, "hot words")

    def read(self) -> list[Job] | None:
        """What is asked since the last time, that the device must answer; None at the end of the worker."""
        jobs: list[Job] = []
        answers: list[tuple[int, Any]] = []
        while True:
            try:
                data = self.end.recv(_PIECE)
            except BlockingIOError:
                break
            except OSError:
                return None
            if not data:
                return None
            for call, kind, given in self._frames.accept(data):
                try:
                    found = getattr(self, f"_{kind}")(call, *given)
                except Exception as error:  # of this source alone: its client is told
                    if not isinstance(error, UserError):
                        log.exception("a worker's %s failed", kind)
                    answers += [(call, error)] * bool(call)
                    continue
                if isinstance(found, Job):
                    jobs.append(found)
                elif call and found is not _LATER:
                    answers.append((call, found))
        self._send(answers)
        return jobs

    def settle(self, answers: Answers) -> None:
        """See `Asker`."""
        self._send([(job.called, answer) for job, answer in answers])

    def close(self) -> None:
        """Let all of the worker's sources go."""
        self.end.close()
        for number in [*self._lives, *self._joining]:
            self._leave(0, number)

    def _begun(self, call: int) -> None:
        self.begun = True

    def _open(self, call: int, number: int, *given: Any) -> None:
        try:
            self._lives[number] = self.dispatch.open(*given)
        except UserError as error:
            self._lives[number] = error

    def _open_hot(self, call: int, number: int, *given: Any) -> object:
        self._joining.add(number)
        self._planting.submit(self._plant, call, number, *given)
        return _LATER

    def _plant(self, call: int, number: int, *given: Any) -> None:
        """Let a source with hot words join, which takes as long as they are."""
        answer: Any = None
        try:
            live = self.dispatch.open(*given)
            with self._lock:
                if number in self._joining:
                    self._joining.remove(number)
                    self._lives[number] = live
                else:  # its client has gone meanwhile
                    self.dispatch.leave(live)
        except Exception as error:
            if not isinstance(error, UserError):
                log.exception("a source with hot words could not join")
            answer = error
        self._send([(call, answer)])

    def _hear(self, call: int, number: int, arrived_s: float, samples: Any) -> Job:
        live = self._lives[number]
        if isinstance(live, UserError):
            raise live
        return Job(live, samples, self, call, arrived_s)

    def _leave(self, call: int, number: int) -> None:
        with self._lock:
            self._joining.discard(number)
            live = self._lives.pop(number, None)
        if isinstance(live, Live):
            self.dispatch.leave(live)

    def _refused(self, call: int, reason: str) -> None:
        self.dispatch.refused(reason)

    def _counted(self, call: int) -> bytes:
        return self.dispatch.counted()

    def _send(self, answers: list[tuple[int, Any]]) -> None:
        with self._sending:
            if answers and self.end.fileno() >= 0:
                self._write(answers)

    def _write(self, answers: list[tuple[int, Any]]) -> None:
        left = memoryview(frame([(call, _plain(answer)) for call, answer in answers]))
        while left:
            try:
                left = left[self.end.send(left) :]
            except BlockingIOError:
                if not select.select([], [self.end], [], _STUCK_S)[1]:
                    log.error("a worker takes no answers and is given up")
                    self.end.shutdown(socket.SHUT_RDWR)
                    return
            except OSError:  # it has gone: `read` says so
                return


def _plain(answer: Any) -> Any:
    """An answer as another process can have it: errors that a user can mend by class and message."""
    if not isinstance(answer, Exception):
        return answer
    return Failed(type(answer) if isinstance(answer, UserError) else None, str(answer))


class Failed:
    """An error on its way."""

    def __init__(self, kind: type[UserError] | None, message: str) -> None:
        self.kind, self.message = kind, message

    def error(self) -> Exception:
        """The error."""
        return BrokenError() if self.kind is None else self.kind(self.message)


class Links:
    """All workers; `gone` is told of one that ended."""

    def __init__(self, dispatch: Dispatch, gone: Callable[[Link], Link | None]) -> None:
        self.dispatch, self._gone = dispatch, gone
        self._ready = selectors.DefaultSelector()

    def add(self, link: Link) -> None:
        """Listen to a worker."""
        self._ready.register(link.end, selectors.EVENT_READ, link)

    def arrived(self, block: bool) -> list[Job | None]:
        """As `Dispatch.run` asks, or nothing yet; None once no worker is left."""
        jobs: list[Job | None] = []
        for key, _ in self._ready.select(None if block else 0):
            link: Link = key.data
            found = link.read()
            if found is not None:
                jobs += found
                continue
            self._ready.unregister(link.end)
            link.close()
            if (other := self._gone(link)) is not None:
                self.add(other)
        return jobs if self._ready.get_map() else [*jobs, None]
