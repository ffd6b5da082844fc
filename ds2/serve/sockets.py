"""What the WebSocket protocols share: limits, refusals, a source that begins with its first audio."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect

from ds2.audio.stream import Pcm16
from ds2.decoding.lexicon import HotWords
from ds2.recognition.session import Endpoints, Segment
from ds2.serve.batcher import Batcher, Source
from ds2.serve.dispatch import Heard
from ds2.serve.limits import BAD_DATA, BROKEN, RESTART, TRY_LATER, BrokenError, FullError, LimitError, Limits, OverError
from ds2.system.errors import UserError

_REASON_BYTES = 100  # of a close; the protocol allows 123
_REFUSAL_S = 2.0
_PIECE_S = 2  # of audio heard at once


class Client:
    """One connection; a protocol says what its messages mean."""

    def __init__(self, batcher: Batcher, limits: Limits) -> None:
        self.batcher, self.limits = batcher, limits
        self.source: Source | None = None
        self._samples = Pcm16()

    async def last(self, socket: WebSocket) -> None:
        """Tell what was heard but not told yet, as the server ends."""
        raise NotImplementedError

    async def send(self, socket: WebSocket, message: dict[str, Any]) -> None:
        """Answer.

        Raises:
            TimeoutError: the client has taken nothing for as long as the limits allow.
        """
        async with asyncio.timeout(self.limits.idle_s):  # wait_for would make a task
            await _send(socket, message)

    def refusal(self, message: str) -> dict[str, Any]:
        """What a client is told before its connection ends."""
        raise NotImplementedError

    async def serve(self, socket: WebSocket) -> None:
        """Answer messages until the end."""
        raise NotImplementedError

    async def next(self, socket: WebSocket) -> Message | None:
        """The next message; None at the end of the connection.

        Raises:
            OverError: nothing came for as long as the limits allow.
        """
        try:
            async with asyncio.timeout(self.limits.idle_s):
                message = await socket.receive()
        except TimeoutError as error:
            raise OverError(f"nothing came for {self.limits.idle_s:g} s", 408, TRY_LATER) from error
        return None if message["type"] == "websocket.disconnect" else message

    async def hear(self, data: bytes, rate_hz: int, endpoints: Endpoints, hot_words: HotWords | None = None) -> Heard:
        """Have 16-bit samples heard.

        Raises:
            OverError: they go past the longest session; none of them are heard.
            UserError: as `Batcher.open` and `Source.accept`.
        """
        taken_s = self.source.accepted_s if self.source is not None else 0.0
        self.limits.check_duration(taken_s + len(data) // 2 / rate_hz)
        if self.source is None:
            self.source = await self.batcher.open(rate_hz, endpoints, hot_words)
        samples, final = self._samples.accept(data), list[Segment]()
        while len(samples) > rate_hz * _PIECE_S:  # nobody waits while a long message is resampled
            final += (await self.source.accept(samples[: rate_hz * _PIECE_S])).final
            samples = samples[rate_hz * _PIECE_S :]
        heard = await self.source.accept(samples)
        return Heard([*final, *heard.final], heard.partial) if final else heard

    def leave(self) -> None:
        """Forget what was heard; the next audio begins anew."""
        if self.source is not None:
            self.source.close()
        self.source, self._samples = None, Pcm16()


class Socket:
    """The endpoint of a protocol."""

    def __init__(self, protocol: type[Client], batcher: Batcher, limits: Limits) -> None:
        self.protocol, self.batcher, self.limits = protocol, batcher, limits
        self._open: set[asyncio.Task[Any]] = set()

    async def end(self) -> None:
        """Finish all connections: each is told its last words."""
        for task in self._open:
            task.cancel()
        while self._open:
            await asyncio.wait(self._open)

    async def __call__(self, socket: WebSocket) -> None:
        """Serve a connection to its end."""
        client, task = self.protocol(self.batcher, self.limits), asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            await socket.accept("realtime" if "realtime" in socket.scope["subprotocols"] else None)
            self.limits.check_key(socket)
            try:
                await _serve(client, socket)
            except asyncio.CancelledError:
                if not self.batcher.ending:
                    raise
                task.uncancel()
                await client.last(socket)
                await socket.close(RESTART, "the server ends")
        except (WebSocketDisconnect, RuntimeError):  # RuntimeError: the connection has gone, and is written to
            return
        except TimeoutError:
            await self._refuse(socket, client, f"nothing was taken for {self.limits.idle_s:g} s", TRY_LATER)
        except LimitError as error:
            await self._refuse(socket, client, str(error), error.code)
        except FullError as error:
            await self._refuse(socket, client, str(error), TRY_LATER)
        except BrokenError as error:
            await self._refuse(socket, client, str(error), BROKEN)
        except UserError as error:
            await self._refuse(socket, client, str(error), BAD_DATA)
        finally:
            self._open.discard(task)
            client.leave()

    async def _refuse(self, socket: WebSocket, client: Client, message: str, code: int) -> None:
        self.batcher.refused(str(code))
        try:
            async with asyncio.timeout(_REFUSAL_S):
                await _send(socket, client.refusal(message))
                await socket.close(code, message.encode(errors="replace")[:_REASON_BYTES].decode(errors="ignore"))
        except (WebSocketDisconnect, RuntimeError, TimeoutError):
            return  # it has gone meanwhile


async def _serve(client: Client, socket: WebSocket) -> None:
    """As `Client.serve`; a session that has lasted too long is told its last words."""
    try:
        await client.serve(socket)
    except OverError:
        if client.source is not None:
            await client.last(socket)
        raise


async def _send(socket: WebSocket, answer: dict[str, Any]) -> None:
    """Send JSON that any client can read: whatever of a client's own message is in it, of characters none breaks it."""
    await socket.send_text(json.dumps(answer, allow_nan=False))


def json_object(text: str) -> dict[str, Any]:
    """Read a text message; LimitError where it is no JSON object."""
    try:
        found = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise LimitError(f"text messages are JSON: {error}", 400, BAD_DATA) from error
    if not isinstance(found, dict):
        raise LimitError("text messages are JSON objects", 400, BAD_DATA)
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is none of its numbers")
