"""A process that speaks with clients, of a server whose recogniser is in another: see `ds2.serve.workers`."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ds2.decoding.lexicon import HotWords
from ds2.recognition.session import Endpoints
from ds2.serve.address import joined
from ds2.serve.batcher import Batcher, settle
from ds2.serve.dispatch import Heard
from ds2.serve.frames import Frames, frame
from ds2.serve.limits import BrokenError, Limits
from ds2.serve.links import Failed
from ds2.serve.phrases import PhraseReader
from ds2.serve.server import make_server
from ds2.text.alphabet import Alphabet

log = logging.getLogger(__name__)


class There(Batcher, asyncio.Protocol):
    """A recogniser in another process; what is asked in one turn of the loop goes there together.

    Args:
        end: of the pair of sockets.
        phrases, sample_rate_hz: as of `Batcher`.
        lost: is called when the other process has gone.
    """

    def __init__(
        self, end: socket.socket, phrases: PhraseReader, sample_rate_hz: int, lost: Callable[[], None]
    ) -> None:
        super().__init__(phrases, sample_rate_hz)
        self._end, self._lost = end, lost
        self._numbers, self._frames = itertools.count(1), Frames()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._asked: list[tuple[int, str, tuple[Any, ...]]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._transport: asyncio.Transport | None = None

    async def begin(self) -> None:
        """See `Batcher`."""
        self._loop = asyncio.get_running_loop()
        await self._loop.create_unix_connection(lambda: self, sock=self._end)
        self._tell(0, "begun")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As asyncio has it."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by name

    def data_received(self, data: bytes) -> None:
        """As asyncio has it."""
        settle(
            [
                (self._waiting.pop(call), answer.error() if isinstance(answer, Failed) else answer)
                for call, answer in self._frames.accept(data)
            ]
        )

    def connection_lost(self, error: Exception | None) -> None:
        """As asyncio has it."""
        self._transport = None
        settle([(done, BrokenError()) for done in self._waiting.values()])
        self._waiting.clear()
        self._lost()

    async def _join(self, sample_rate_hz: int, endpoints: Endpoints, hot_words: HotWords | None) -> int:
        number = next(self._numbers)
        if hot_words:
            await self._ask("open_hot", number, sample_rate_hz, endpoints, hot_words)
        else:
            self._tell(0, "open", number, sample_rate_hz, endpoints)
        return number

    def hear(self, called: int, samples: NDArray[np.float32] | None) -> asyncio.Future[Heard]:
        """See `Batcher`."""
        return self._ask("hear", called, time.monotonic(), samples)

    def leave(self, called: int) -> None:
        """See `Batcher`."""
        self._tell(0, "leave", called)

    def refused(self, reason: str) -> None:
        """See `Batcher`."""
        self._tell(0, "refused", reason)

    async def counted(self) -> bytes:
        """See `Batcher`."""
        found: bytes = await self._ask("counted")
        return found

    def close(self) -> None:
        """See `Batcher`."""
        if self._transport is not None:
            self._transport.close()

    def _ask(self, kind: str, *given: Any) -> asyncio.Future[Any]:
        if self._transport is None or self._loop is None:
            raise BrokenError()
        call = next(self._numbers)
        self._waiting[call] = done = self._loop.create_future()
        self._tell(call, kind, *given)
        return done

    def _tell(self, call: int, kind: str, *given: Any) -> None:
        if self._loop is None:
            return
        if not self._asked:
            self._loop.call_soon(self._send)
        self._asked.append((call, kind, given))

    def _send(self) -> None:
        asked, self._asked = self._asked, []
        if self._transport is not None:
            self._transport.write(frame(asked))


def work(
    end: socket.socket,
    address: tuple[str, int],
    alphabet: Alphabet,
    hot_characters: frozenset[str],
    sample_rate_hz: int,
    limits: Limits,
) -> None:
    """Serve on an address that others share, until SIGTERM or until the recogniser has gone."""
    os.setpgrp()  # Ctrl-C is for the first process, which ends the others in order
    phrases = PhraseReader(alphabet, hot_characters)
    batcher = There(end, phrases, sample_rate_hz, lambda: setattr(server, "should_exit", True))
    server = make_server(batcher, limits, address[1])
    server.run(sockets=[joined(*address)])
