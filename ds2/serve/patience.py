"""Connections that ask nothing, or take nothing of what they are told, end after the idle time.

Uvicorn waits for ever for the first request of a connection, for the rest of its headers, and for a client that does
not read; and it answers pings of a WebSocket whose client reads no answers, in memory without end.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn._types import ASGIReceiveEvent
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol


class Http(H11Protocol):
    """A connection that is looked at once in each idle time of `app.state.idle_s` seconds."""

    _look: asyncio.TimerHandle | None = None
    _last: Any = None  # the request that was answered, and whether the client took nothing, when it was looked at

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """As asyncio has it."""
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio has it."""
        super().connection_lost(exc)
        if self._look is not None:
            self._look.cancel()

    def _wait(self) -> None:
        if self in self.connections:  # else it has become a WebSocket
            self._look = self.loop.call_later(self.config.app.state.idle_s, self._judge)  # type: ignore[union-attr]

    def _judge(self) -> None:
        asks = self.cycle is not None and not self.cycle.response_complete
        now = self.cycle, self.flow.write_paused
        stuck = self.flow.write_paused if asks else True
        if self in self.connections and stuck and (self.cycle is None or now == self._last):
            self.transport.abort()
            return
        self._last = now
        self._wait()


class WebSocket(WebSocketsSansIOProtocol):
    """A connection that is not read while its client takes no answers, and that is cut off where it will not close."""

    _cut: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """As asyncio has it."""
        super().pause_writing()
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        """As asyncio has it."""
        super().resume_writing()
        if not self.read_paused:
            self.transport.resume_reading()

    async def receive(self) -> ASGIReceiveEvent:
        """As uvicorn's."""
        message = await super().receive()
        if not self.writable.is_set():
            self.transport.pause_reading()
        return message

    async def run_asgi(self) -> None:
        """As uvicorn's."""
        try:
            await super().run_asgi()
        finally:
            if not self.disconnected:
                self._cut = self.loop.call_later(self.close_timeout, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio has it."""
        super().connection_lost(exc)
        if self._cut is not None:
            self._cut.cancel()
