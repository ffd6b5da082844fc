"""The common part of the protocols of live audio: limits, refusals, and a session that is opened by the first audio."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect

from ds2.audio.stream import Pcm
from ds2.recognition.open_segments import Segment
from ds2.serve.client import EngineClient, EngineSession, SessionSettings, StreamResult
from ds2.serve.limits import BAD_DATA, RESTART, TRY_LATER, BadRequestError, Limits, SessionOverError, StatusError
from ds2.system import UserError
from ds2.system.plain import short_repr

_REASON_BYTES = 100  # of a close message; the protocol allows 123
_REFUSAL_S = 2.0
_PIECE_S = 2  # audio that is decoded at once
_encode = json.JSONEncoder(allow_nan=False).encode  # `json.dumps` would make an encoder for every message
_SUBPROTOCOLS = ("realtime", "token", "bearer")  # before a key that a browser offers as another one


class Connection:
    """One client's connection; each protocol is a subclass with `handle_messages`, `send_last_result` and `refusal`.

    `receive`, `accept_audio`, `flush` and `send` are what these need. Errors that they raise end the connection with
    `refusal`; the session, which the first audio opens, is closed with the connection.
    """

    summary: ClassVar[str]  # of the protocol, for `ds2 serve --help`
    settings: SessionSettings  # of the next session; the subclass sets them before the first audio
    sample_reader: Callable[[], Pcm] = Pcm
    interruptible = False  # whether the end of the server may cancel its task: no words would be lost

    def __init__(self, socket: WebSocket, engine: EngineClient, limits: Limits) -> None:
        self.socket, self.engine, self.limits = socket, engine, limits
        self.session: EngineSession | None = None
        self.sent_words = 0  # of the open utterance, by a protocol that sends words once and for all
        self._samples: Pcm | None = None  # made by `sample_reader` with the first audio of a session

    async def handle_messages(self) -> None:
        """Answer messages until `receive` returns None, or close the socket where the protocol ends the stream."""
        raise NotImplementedError

    async def send_last_result(self) -> None:
        """Send the words of `flush`; also called when the server ends or a session has lasted too long."""
        raise NotImplementedError

    def refusal(self, message: str) -> dict[str, Any]:
        """Return the message with the reason why the connection ends."""
        return {"error": message}

    async def send(self, message: dict[str, Any] | str) -> None:
        """Send an object as JSON, or a text; raises TimeoutError if the client has read nothing for `limits.idle_s`.

        JSON is in ASCII: texts of clients may hold characters that break a WebSocket's text message.
        """
        async with asyncio.timeout(self.limits.idle_s):  # wait_for would make a task
            await self.socket.send_text(message if isinstance(message, str) else _encode(message))

    async def receive(self) -> Message | None:
        """Return the next message, or None at the end of the connection.

        Raises:
            SessionOverError: no message came for `limits.idle_s`.
            CancelledError: the server ends.
        """
        if self.engine.ending:
            raise asyncio.CancelledError
        self.interruptible = True
        try:
            async with asyncio.timeout(self.limits.idle_s):
                await asyncio.sleep(0)  # lets other tasks run: with messages queued, `receive` does not wait
                message = await self.socket.receive()
        except TimeoutError as error:
            raise SessionOverError(f"nothing came for {self.limits.idle_s:g} s", 408, TRY_LATER) from error
        return None if message["type"] == "websocket.disconnect" else message

    async def accept_audio(self, data: bytes) -> StreamResult:
        """Decode audio, of the format that `sample_reader` reads; the first samples open a session with `settings`.

        Raises:
            SessionOverError: they exceed the longest session; none of them are decoded.
            UserError: as `EngineClient.open` and `EngineSession.accept_waveform`.
        """
        rate_hz = self.settings.sample_rate_hz
        accepted_s = self.session.accepted_s if self.session is not None else 0.0
        if self._samples is None:
            self._samples = self.sample_reader()
        samples, final = self._samples.accept(data), list[Segment]()
        self.limits.check_duration(accepted_s + len(samples) / rate_hz)
        if self.session is None:
            self.session = await self.engine.open(self.settings)
        self.interruptible = False
        while len(samples) > rate_hz * _PIECE_S:  # resampling of a long message does not block other clients
            final += (await self.session.accept_waveform(samples[: rate_hz * _PIECE_S])).final
            samples = samples[rate_hz * _PIECE_S :]
        result = await self.session.accept_waveform(samples)
        return replace(result, final=[*final, *result.final]) if final else result

    async def flush(self, *, continues: bool = False) -> list[Segment]:
        """Make all accepted audio final; return the segments that became so.

        Half a sample at its end is dropped, unless the audio `continues`: it would shift the bytes of the next one.
        """
        self.interruptible = False
        if not continues:
            self._samples = None
        return (await self.session.flush()).final if self.session is not None else []

    def unsent(self, words: Sequence[str]) -> str:
        """Return the words of the open utterance that were not sent yet, as the text that continues the others."""
        new, continues = words[self.sent_words :], self.sent_words > 0
        self.sent_words += len(new)
        return " " * continues + " ".join(new) if new else ""

    def close_session(self) -> None:
        """Close the session; the next audio opens another."""
        if self.session is not None:
            self.session.close()
        self.session = self._samples = None


class ProtocolRoute:
    """The route of a WebSocket protocol: its connections, from accept to close."""

    def __init__(self, protocol: type[Connection], engine: EngineClient, limits: Limits) -> None:
        self.protocol, self.engine, self.limits = protocol, engine, limits
        self._connections: dict[asyncio.Task[Any], Connection] = {}

    async def end(self) -> None:
        """End all connections after the messages that they handle, and after their last results."""
        for task, connection in self._connections.items():
            if connection.interruptible:
                task.cancel()
        while self._connections:
            await asyncio.wait(self._connections)

    async def __call__(self, socket: WebSocket) -> None:
        """Serve a connection to its end."""
        connection, task = self.protocol(socket, self.engine, self.limits), asyncio.current_task()
        assert task is not None
        self._connections[task] = connection
        try:
            offered = socket.scope["subprotocols"]
            await socket.accept(next((name for name in _SUBPROTOCOLS if name in offered), None))
            self.limits.check_key(socket)
            try:
                await connection.handle_messages()
            except SessionOverError:  # it gets its last result
                if connection.session is not None:
                    await connection.send_last_result()
                raise
            except asyncio.CancelledError:
                if not self.engine.ending:
                    raise
                task.uncancel()
                await connection.send_last_result()
                await socket.close(RESTART, "the server ends")
        except (WebSocketDisconnect, RuntimeError):  # RuntimeError: a message was sent after the end of the connection
            return
        except TimeoutError:
            await self._refuse(connection, f"nothing was taken for {self.limits.idle_s:g} s", TRY_LATER)
        except UserError as error:
            await self._refuse(connection, str(error), error.code if isinstance(error, StatusError) else BAD_DATA)
        finally:
            del self._connections[task]
            connection.close_session()

    async def _refuse(self, connection: Connection, message: str, code: int) -> None:
        self.engine.count_refusal(str(code))
        reason = message.encode(errors="replace")[:_REASON_BYTES].decode(errors="ignore")
        try:
            async with asyncio.timeout(_REFUSAL_S):
                await connection.socket.send_text(json.dumps(connection.refusal(message)))
                await connection.socket.close(code, reason)
        except (WebSocketDisconnect, RuntimeError, TimeoutError):
            return  # the client has left
        except asyncio.CancelledError:
            if not self.engine.ending:  # else it is over, as the server wants
                raise


def json_object(text: str) -> dict[str, Any]:
    """Read a text message; raises BadRequestError where it is no JSON object."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"text messages are JSON objects, this is {short_repr(text)}: {error}") from error
    if not isinstance(value, dict):
        raise BadRequestError(f"text messages are JSON objects, this is {short_repr(value)}")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number in JSON")
