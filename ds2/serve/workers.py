"""A server in several processes: this one owns the recogniser, the others speak with clients.

One process of Python answers some thousand messages a second, and the recogniser has to share it: a GPU hears more
streams than that.
"""

from __future__ import annotations

import logging
import multiprocessing
import socket
from dataclasses import replace
from multiprocessing.process import BaseProcess
from types import FrameType

from ds2.config.schema import ConfigError
from ds2.recognition.recogniser import Recogniser
from ds2.serve.dispatch import Dispatch, Job
from ds2.serve.limits import Limits
from ds2.serve.links import Link, Links
from ds2.serve.server import calm
from ds2.serve.worker import work
from ds2.system.signals import STOP_SIGNALS, handle_signals

log = logging.getLogger(__name__)
SESSIONS = 250  # in real time that a worker keeps up with, by a wide margin
END_S = 60  # that workers have to finish what is open


class Workers:
    """The processes that speak with clients.

    Args:
        recogniser: with a unidirectional model.
        limits: of all together; those of sessions and batches are kept here.
        address: where they listen, that is shared (`ds2.serve.address.share`).
        count: how many.

    Raises:
        ConfigError: a bidirectional model, or workers that cannot begin.
    """

    def __init__(self, recogniser: Recogniser, limits: Limits, address: tuple[str, int], count: int) -> None:
        self.limits, self.ending = limits, False
        self.address = address
        self.dispatch = Dispatch(recogniser, limits)
        hot_characters = recogniser.decoder.hot_characters
        self._facts = (recogniser.alphabet, hot_characters, recogniser.features.sample_rate_hz)
        self._share = replace(limits, uploads_bytes=limits.uploads_bytes // count)
        self._processes: dict[Link, BaseProcess] = {}
        self._links = Links(self.dispatch, self._gone)
        for _ in range(count):
            self._links.add(self._start())
        self._early: list[Job | None] = []
        while not all(link.begun for link in self._processes):
            self._early += self._links.arrived(True)

    def run(self) -> None:
        """Hear until SIGINT or SIGTERM, and then until all sessions were told their last words."""
        with handle_signals(STOP_SIGNALS, self._signalled):
            try:
                with calm():
                    self.dispatch.run(self._arrived)
            finally:
                self.end()
                for process in self.processes():
                    process.join(END_S)
                    process.kill()

    def processes(self) -> list[BaseProcess]:
        """Those that speak with clients now."""
        return list(self._processes.values())

    def end(self) -> None:
        """Let the workers finish what is open, and end."""
        self.ending = True
        for process in self.processes():
            process.terminate()

    def _arrived(self, block: bool) -> list[Job | None]:
        early, self._early = self._early, []
        return early or self._links.arrived(block)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self.end()

    def _start(self) -> Link:
        ours, theirs = socket.socketpair()
        given = (theirs, self.address, *self._facts, self._share)
        process = multiprocessing.get_context("spawn").Process(target=work, args=given, name="ds2 serve", daemon=True)
        process.start()
        theirs.close()
        link = Link(self.dispatch, ours)
        self._processes[link] = process
        return link

    def _gone(self, link: Link) -> Link | None:
        """Begin another worker for one that ended by itself."""
        process = self._processes.pop(link)
        process.join(END_S)
        if self.ending:
            return None
        if not link.begun:
            raise ConfigError(f"a worker could not begin (status {process.exitcode}): its own message says why")
        log.error("a worker ended (status %s): its clients are gone, another begins", process.exitcode)
        return self._start()
