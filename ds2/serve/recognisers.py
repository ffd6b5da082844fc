"""Several processes that hear on one address, each with the model and workers of its own; this one begins them.

One thread of Python owns a recogniser, and hears some ten thousand chunks a second; a GPU has time for more.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from prometheus_client import multiprocess

from ds2.config.schema import ConfigError
from ds2.recognition.recogniser import Recogniser
from ds2.serve.limits import Limits
from ds2.serve.workers import END_S, Workers
from ds2.system.errors import UserError
from ds2.system.files import temporary_folder
from ds2.system.signals import STOP_SIGNALS, handle_signals

log = logging.getLogger(__name__)
SESSIONS = 1000  # in real time that one keeps up with


class Recognisers:
    """The processes that hear. New connections are spread over all their workers, whatever these have to do.

    Args:
        make: the recogniser, in a process that was begun anew; it travels there.
        limits: of all together; each process takes its share of the sessions.
        address: that is shared (`ds2.serve.address.share`).
        count: processes.
        workers: of each.

    Raises:
        ConfigError: what `make` raises of a user's, or recognisers that cannot begin.
    """

    def __init__(
        self, make: Callable[[], Recogniser], limits: Limits, address: tuple[str, int], count: int, workers: int
    ) -> None:
        share = replace(limits, sessions=-(-limits.sessions // count), uploads_bytes=limits.uploads_bytes // count)
        self._given, self.ending = (make, share, address, workers), False
        self._open = ExitStack()
        counted = self._open.enter_context(temporary_folder(Path(tempfile.gettempdir()), "ds2-serve"))
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(counted)  # where all count, so that each can tell the sum
        self._processes: list[BaseProcess] = []
        try:
            for process, ready in [self._start() for _ in range(count)]:
                self._begun(process, ready)
        except BaseException:
            self.end()
            self._join()
            raise

    def run(self) -> None:
        """Wait until SIGINT or SIGTERM, and then until all sessions were told their last words."""
        with handle_signals(STOP_SIGNALS, self._signalled):
            try:
                while self._processes:
                    gone = wait([process.sentinel for process in self._processes])
                    for process in [process for process in self._processes if process.sentinel in gone]:
                        self._gone(process)
            finally:
                self.end()
                self._join()

    def processes(self) -> list[BaseProcess]:
        """Those that hear now."""
        return list(self._processes)

    def end(self) -> None:
        """Let all finish what is open, and end."""
        self.ending = True
        for process in self.processes():
            process.terminate()

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self.end()

    def _start(self) -> tuple[BaseProcess, Connection]:
        ready, theirs = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("spawn").Process(
            target=_hear, args=(*self._given, theirs), name="ds2 serve: a recogniser"
        )
        process.start()
        theirs.close()
        self._processes.append(process)
        if self.ending:
            process.terminate()
        return process, ready

    def _begun(self, process: BaseProcess, ready: Connection) -> None:
        try:
            wrong: str = ready.recv()
        except EOFError:
            process.join(END_S)
            wrong = f"a recogniser could not begin (status {process.exitcode}): its own message says why"
        ready.close()
        if wrong:
            raise ConfigError(wrong)

    def _gone(self, process: BaseProcess) -> None:
        """Begin another for one that ended by itself."""
        self._processes.remove(process)
        process.join(END_S)
        if process.pid is not None:
            multiprocess.mark_process_dead(process.pid)  # type: ignore[no-untyped-call]
        if self.ending:
            return
        log.error("a recogniser ended (status %s): its clients are gone, another begins", process.exitcode)
        other, ready = self._start()
        try:
            self._begun(other, ready)
        except ConfigError:
            if not self.ending:
                raise

    def _join(self) -> None:
        for process in self.processes():
            process.join(END_S)
            process.kill()
        os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
        self._open.close()


def _hear(
    make: Callable[[], Recogniser], limits: Limits, address: tuple[str, int], workers: int, ready: Connection
) -> None:
    """Hear until SIGTERM, or until the process that began this one has gone."""
    threading.Thread(target=_follow, daemon=True).start()
    try:
        several = Workers(make(), limits, address, workers)
    except UserError as error:
        ready.send(str(error))
        return
    ready.send("")
    ready.close()
    several.run()


def _follow() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
