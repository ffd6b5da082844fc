"""A server in several processes: recognisers, each with an engine, and workers that handle clients' connections.

One process of Python answers some thousand messages a second, and a GPU decodes more streams than that. So workers
accept the clients' connections and send their audio to the recogniser's process over a socket pair. One thread owns an
engine and all its workers' sockets (a thread for each worker would wait for Python's lock while the recogniser runs)
and decodes some ten thousand chunks a second. A GPU can do more, so there may be several recogniser processes.
"""

import functools
import logging
import math
import multiprocessing
import os
import pickle
import selectors
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import multiprocess

from ds2.audio.stream import is_in_range
from ds2.config.schema import ConfigError
from ds2.recognition.recogniser import Recogniser
from ds2.recognition.session import LiveSession
from ds2.serve.client import (
    TO_ENGINE,
    AcceptWaveforms,
    Answer,
    CloseSession,
    CountRefusal,
    Failure,
    OpenSession,
    PartialResults,
    ReadMetrics,
    Unpacker,
    WorkerStarted,
    pack,
)
from ds2.serve.engine import Answers, Chunk, Engine
from ds2.serve.http import run_worker
from ds2.serve.limits import BrokenError, Limits
from ds2.system import UserError
from ds2.system.files import temporary_folder
from ds2.system.machine import call_pickled, keep_freed_memory, short_collections
from ds2.system.signals import handle_signals, stop_signals

log = logging.getLogger(__name__)
WORKER_SESSIONS = 250  # real-time sessions that a worker can handle, with a wide margin
RECOGNISER_SESSIONS = 1000  # real-time sessions that a recogniser process can handle
END_S = 60  # time in which processes finish their open sessions
_READ_BYTES = 1 << 20
_TICK_S = 1.0  # longest wait for messages of other processes, or for their end
_STUCK_S = 10.0  # a worker that reads nothing for so long is terminated, a process that is stopped is killed


class WorkerLink:
    """The connection to a worker, in the engine's process."""

    def __init__(self, engine: Engine, end: socket.socket) -> None:
        self.engine, self.end = engine, end
        end.setblocking(False)
        self.started = False
        self._unpacker = Unpacker(TO_ENGINE)
        self._sessions: dict[int, LiveSession | UserError] = {}  # by the worker's number; an error: it was not opened
        self._opening: set[int] = set()  # sessions with hot words, which another thread opens
        self._lock = threading.Lock()  # of these two
        self._sending = threading.Lock()  # of the next two
        self.unsent = bytearray()  # answers that the worker has not taken; a session waits for one at most
        self._taken_s = 0.0  # when it took some
        self._opener = ThreadPoolExecutor(1, "hot words")

    def receive(self) -> list[Chunk] | None:
        """Handle what has arrived; return the chunks to decode, or None if the worker has ended."""
        chunks: list[Chunk] = []
        answers: list[Answer | Failure] = []
        while True:
            try:
                data = self.end.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                return None
            if not data:
                return None
            try:
                for message in self._unpacker.accept(data):
                    for result in self._handle(message):
                        if isinstance(result, Chunk):
                            chunks.append(result)
                        else:
                            answers.append(result)
            except Exception:  # a fault of this worker or its messages must not end the others' sessions
                log.exception("a worker's message cannot be handled: the worker is terminated")
                return None
        self.send(answers)
        return chunks

    def _handle(self, message: Any) -> Iterator[Chunk | Answer | Failure]:
        """Handle a message; yield the chunks to decode, and answers."""
        match message:
            case AcceptWaveforms(calls, sessions, arrived_s, lengths, data):
                samples, end = np.frombuffer(data, np.float32), 0
                has_16_bits = is_in_range(samples)  # protocols read 16 bits; others are of a damaged message
                for call, session, time_s, length in zip(calls, sessions, arrived_s, lengths, strict=True):
                    start, end = end, end + (length or 0)
                    own = None if length is None else samples[start:end]
                    live = self._sessions.get(session) or BrokenError()
                    if isinstance(live, LiveSession):
                        yield Chunk(live, own, self.deliver, call, float(time_s), has_16_bits)
                    else:
                        yield Failure.of(call, live)
            case OpenSession(0, int()):
                self._open(message)
            case OpenSession(_, int()):
                self._opening.add(message.session)
                self._opener.submit(self._open_slowly, message)
            case CloseSession(session):
                self._close_session(session)
            case CountRefusal(reason):
                self.engine.metrics.refused.labels(reason).inc()
            case ReadMetrics(call):
                yield Answer(call, self.engine.metrics.text())
            case WorkerStarted():
                self.started = True
            case _:
                raise TypeError(f"no message to an engine: {message!r}")

    def _open(self, message: OpenSession) -> None:
        try:
            self._sessions[message.session] = self.engine.open(message.settings)
        except UserError as error:
            self._sessions[message.session] = error

    def _open_slowly(self, message: OpenSession) -> None:
        answer: Answer | Failure = Answer(message.call, None)
        try:
            live = self.engine.open(message.settings)
            with self._lock:
                wanted = message.session in self._opening
                if wanted:
                    self._sessions[message.session] = live
                self._opening.discard(message.session)
            if not wanted:  # its client has left
                self.engine.close(live)
        except Exception as error:  # of this session alone
            if not isinstance(error, UserError):
                log.exception("a session with hot words or phrases could not be opened")
            answer = Failure.of(message.call, error)
        self.send([answer])

    def _close_session(self, session: int) -> None:
        with self._lock:
            self._opening.discard(session)
            live = self._sessions.pop(session, None)
        if isinstance(live, LiveSession):
            self.engine.close(live)

    def deliver(self, answers: Answers) -> None:
        """Send the answers to chunks of this worker; raises TypeError, and sends none, if no message can hold one."""
        partial = PartialResults([], [], [], [])
        messages: list[PartialResults | Answer | Failure] = []
        for chunk, answer in answers:
            if isinstance(answer, Exception):
                messages.append(Failure.of(chunk.call, answer))
            elif answer.final or answer.words:
                messages.append(Answer(chunk.call, answer))
            else:
                partial.calls.append(chunk.call)
                partial.texts.append(answer.partial)
                partial.fixed_words.append(answer.fixed_words)
                partial.starts_s.append(answer.start_s)
        self.send([partial, *messages] if partial.calls else messages)

    def close(self) -> None:
        """Close all of the worker's sessions."""
        self.end.close()
        for session in {*self._sessions, *self._opening}:
            self._close_session(session)
        self._opener.shutdown(wait=False)

    def send(self, answers: Sequence[PartialResults | Answer | Failure] = ()) -> None:
        """Send answers after those in `unsent`. A worker that reads nothing must not keep other workers waiting."""
        with self._sending:
            if self.end.fileno() < 0:
                return
            if not self.unsent:
                self._taken_s = time.monotonic()
            if answers:
                self.unsent += pack(answers)
            try:
                while self.unsent:
                    del self.unsent[: self.end.send(self.unsent)]
                    self._taken_s = time.monotonic()
            except BlockingIOError:
                if time.monotonic() - self._taken_s > _STUCK_S:
                    log.error("a worker reads no answers and is terminated")
                    self.end.shutdown(socket.SHUT_RDWR)
            except OSError:  # the worker has ended; `receive` will notice it
                self.unsent.clear()


class _Parent:
    """This process and others that serve clients until a signal comes.

    Args:
        work: what each of them does with its end of the link to this one.
        name: of the processes; workers, which are `daemon`, start none of their own.
    """

    def __init__(self, work: Callable[..., None], name: str, *, daemon: bool) -> None:
        self._work, self._name, self._daemon = pickle.dumps(work), name, daemon
        self._processes: dict[Any, BaseProcess] = {}  # by this process's end of the link
        self.ending = False
        self._end_by_s = math.inf
        self._next_check_s = 0.0
        self._stopped_s: dict[int, float] = {}  # when it was noticed, by process id

    def processes(self) -> list[BaseProcess]:
        """The other processes that run now."""
        return list(self._processes.values())

    def _start_process(self, ours: Any, theirs: socket.socket | Connection) -> None:
        process = multiprocessing.get_context("spawn").Process(
            target=call_pickled, args=(self._work, theirs), name=self._name, daemon=self._daemon
        )
        process.start()
        theirs.close()
        self._processes[ours] = process
        if self.ending:
            process.terminate()

    def run(self, message: str = "") -> None:
        """Print a message and serve until SIGINT, SIGTERM or SIGHUP, and then until all sessions got their results."""
        with handle_signals(stop_signals(), lambda number, frame: self.end()):
            try:
                if message:
                    print(message, flush=True)
                self._serve()
            finally:
                self.end()
                self._join()

    def _serve(self) -> None:
        """Do the work of this process until the others have ended."""
        raise NotImplementedError

    def end(self) -> None:
        """Let the processes finish what is open, and end."""
        if not self.ending:
            self.ending, self._end_by_s = True, time.monotonic() + END_S
        for process in self.processes():
            process.terminate()

    def _kill_unresponsive(self) -> None:
        """Kill processes that have not ended in time, and those that have been stopped (SIGSTOP) for long.

        The system gives a stopped process its share of new connections, and it takes no signal but SIGKILL.
        """
        now_s = time.monotonic()
        if now_s < self._next_check_s:
            return
        self._next_check_s = now_s + _TICK_S
        before, self._stopped_s = self._stopped_s, {}
        for process in self.processes():
            if process.pid is not None and _is_stopped(process.pid):
                self._stopped_s[process.pid] = before.get(process.pid, now_s)
                if now_s - self._stopped_s[process.pid] > _STUCK_S:
                    log.error("a process has been stopped for %g s and is killed", _STUCK_S)
                    process.kill()
            if now_s > self._end_by_s:
                process.kill()

    def _join(self) -> None:
        for process in self.processes():
            process.join(END_S)
            process.kill()


def _is_stopped(pid: int) -> bool:
    """Whether a child process is stopped; its status stays as it is."""
    try:
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # it has ended
        return False


class Workers(_Parent):
    """An engine in this process and the worker processes that speak with its clients.

    Args:
        limits: of all workers together.
        address: where they listen, which is shared (`ds2.serve.http.share`).

    Raises:
        ConfigError: a bidirectional model, or workers that cannot start.
    """

    def __init__(self, recogniser: Recogniser, limits: Limits, address: tuple[str, int], count: int) -> None:
        self.address = address
        self.engine = Engine(recogniser, limits)
        hot_characters = recogniser.decoder.hot_characters
        share = replace(limits, uploads_bytes=limits.uploads_bytes // count)
        settings = (address, recogniser.alphabet, hot_characters, recogniser.features.sample_rate_hz, share)
        super().__init__(functools.partial(run_worker, *settings), "ds2 serve", daemon=True)
        self._selector = selectors.DefaultSelector()
        for _ in range(count):
            self._start()
        self._early: list[Chunk | None] = []  # signals that came before all workers had started
        while not all(link.started for link in self._processes):
            self._early += self._receive_from_workers(True)

    def _serve(self) -> None:
        keep_freed_memory()
        with short_collections():
            self.engine.run(self._receive, lambda chunks: os._exit(1))  # workers tell their clients, and end

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        link = WorkerLink(self.engine, ours)
        self._start_process(link, theirs)
        self._selector.register(link.end, selectors.EVENT_READ, link)

    def _receive(self, block: bool) -> list[Chunk | None]:
        early, self._early = self._early, []
        return early or self._receive_from_workers(block)

    def _receive_from_workers(self, block: bool) -> list[Chunk | None]:
        """Return the chunks that arrived, for `Engine.run`; None is among them once no worker is left."""
        chunks: list[Chunk | None] = []
        self._kill_unresponsive()
        link: WorkerLink
        for link in self._processes:
            if link.unsent:
                link.send()
            events = selectors.EVENT_READ | selectors.EVENT_WRITE * bool(link.unsent)
            if self._selector.get_key(link.end).events != events:
                self._selector.modify(link.end, events, link)
        for key, events in self._selector.select(_TICK_S if block else 0):
            link = key.data
            if not events & selectors.EVENT_READ:
                continue  # it takes answers again: the next turn sends them
            arrived = link.receive()
            if arrived is not None:
                chunks += arrived
                continue
            self._selector.unregister(link.end)
            link.close()
            self._replace(link)
        return chunks if self._selector.get_map() else [*chunks, None]

    def _replace(self, link: WorkerLink) -> None:
        """Start another worker for one that ended by itself."""
        process = self._processes.pop(link)
        process.join(_TICK_S)
        process.kill()  # one that goes on, or is stopped, would keep all other sessions waiting here
        process.join(END_S)
        if self.ending:
            return
        if not link.started:
            raise ConfigError(f"a worker could not start (status {process.exitcode}): its own message says why")
        log.error(
            "a worker ended (status %s): its clients lost their connections; another one starts", process.exitcode
        )
        self._start()


class Recognisers(_Parent):
    """Recogniser processes with an engine and workers each, on one address; connections are spread over all workers.

    Args:
        make: makes the recogniser; it is pickled and called in a spawned process.
        limits: of all processes together; each gets its share.
        address: which is shared (`ds2.serve.http.share`).
        count: processes.
        workers: of each.

    Raises:
        ConfigError: an error of `make` that a user can mend, or processes that cannot start.
    """

    def __init__(
        self, make: Callable[[], Recogniser], limits: Limits, address: tuple[str, int], count: int, workers: int
    ) -> None:
        share = replace(limits, sessions=-(-limits.sessions // count), uploads_bytes=limits.uploads_bytes // count)
        work = functools.partial(_run_recogniser, make, share, address, workers)
        super().__init__(work, "ds2 serve: a recogniser", daemon=False)
        self._open = ExitStack()
        folder = self._open.enter_context(temporary_folder(Path(tempfile.gettempdir()), "ds2-serve"))
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)  # all count there, so that each can report the sum
        try:
            for ready in [self._start() for _ in range(count)]:
                self._wait_until_ready(ready)
        except BaseException:
            self.end()
            self._join()
            raise

    def _serve(self) -> None:
        while self._processes:
            self._kill_unresponsive()
            ended = wait([process.sentinel for process in self.processes()], _TICK_S)
            for ready in [ready for ready, process in self._processes.items() if process.sentinel in ended]:
                self._replace(ready)

    def _start(self) -> Connection:
        ready, theirs = multiprocessing.Pipe(duplex=False)
        self._start_process(ready, theirs)
        return ready

    def _wait_until_ready(self, ready: Connection) -> None:
        process = self._processes[ready]
        try:
            wrong = ready.recv_bytes().decode()
        except EOFError:
            process.join(END_S)
            wrong = f"a recogniser could not start (status {process.exitcode}): its own message says why"
        ready.close()
        if wrong:
            raise ConfigError(wrong)

    def _replace(self, ready: Connection) -> None:
        """Start another process for one that ended by itself."""
        process = self._processes.pop(ready)
        process.join(END_S)
        if process.pid is not None:
            multiprocess.mark_process_dead(process.pid)  # type: ignore[no-untyped-call]
        if self.ending:
            return
        log.error(
            "a recogniser ended (status %s): its clients lost their connections; another one starts", process.exitcode
        )
        try:
            self._wait_until_ready(self._start())
        except ConfigError:
            if not self.ending:
                raise

    def _join(self) -> None:
        super()._join()
        os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
        self._open.close()


def _run_recogniser(
    make: Callable[[], Recogniser], limits: Limits, address: tuple[str, int], workers: int, ready: Connection
) -> None:
    """Decode until SIGTERM, or until the process that started this one has ended."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        several = Workers(make(), limits, address, workers)
    except UserError as error:
        ready.send_bytes(str(error).encode(errors="replace"))
        return
    ready.send_bytes(b"")
    ready.close()
    several.run()


def _end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
