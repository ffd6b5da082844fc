"""Wyoming, the protocol of Home Assistant's voice services, over plain TCP on the server's own port.

An event is a line of JSON with `type` and `data`, then `data_length` bytes of JSON, which are more data, and
`payload_length` bytes, of audio. The first byte of a connection is the line's brace, which no request of HTTP begins
with. Its messages are those of a WebSocket to all that protocols share.

A client sends describe, or transcribe, audio-start, audio-chunk (16-bit mono samples) and audio-stop. Words that no
later audio changes come as transcript-chunk while it sends; the whole text comes as transcript after audio-stop. The
protocol has no word times. `transcript_names` and `transcript_terms` are hints, as a prompt. Unknown events are
dropped, as the protocol wants. It has no keys either: a server with a key refuses its clients.
"""

import asyncio
from typing import Any

from starlette.types import Message
from starlette.websockets import WebSocket

from ds2.config.allowed import Range
from ds2.decoding.phrases import HotWords
from ds2.recognition.open_segments import NEVER
from ds2.serve.client import SessionSettings
from ds2.serve.limits import BadRequestError, check_number, check_rate, refuse_misspelt
from ds2.serve.protocols.websocket import Connection, json_object
from ds2.system.plain import short_repr

FIRST_BYTE = b"{"
_TRANSCRIBE = ("transcript_names", "transcript_terms", "name", "language", "context")
_CLOSE_S = 2.0
_SOURCE = {"attribution": {"name": "ds2", "url": ""}, "installed": True, "version": None}


class Wyoming(Connection):
    """One connection."""

    summary = "Wyoming (Home Assistant) over TCP"
    hot_words: HotWords | None = None
    rate_hz: int | None = None  # of the utterance
    is_open = False  # whether its transcript has started

    def refusal(self, message: str) -> dict[str, Any]:
        return _event("error", text=message)

    async def handle_messages(self) -> None:
        while (message := await self.receive()) is not None:
            kind, data = message["event"]
            if kind == "describe":
                await self.send(self._info())
            elif kind == "ping":
                await self.send(_event("pong", text=data.get("text")))
            elif kind == "transcribe":
                refuse_misspelt(data, _TRANSCRIBE)
                terms = [data.get(name) or [] for name in ("transcript_names", "transcript_terms")]
                if not all(isinstance(term, list) for term in terms):
                    raise BadRequestError("transcript_names and transcript_terms are lists of texts")
                self._begin(kind)
                self.hot_words = await self.engine.phrases.prompt(None, [*terms[0], *terms[1]])
            elif kind == "audio-start":
                self._begin(kind)
                self._check_format(data)
            elif kind == "audio-chunk":
                self._check_format(data)
                result = await self.accept_audio(message["bytes"])
                await self._send_words(result.partial.split()[: result.fixed_words])
            elif kind == "audio-stop":
                await self.send_last_result()

    async def send_last_result(self) -> None:
        """The transcript of the utterance; the next one may follow."""
        text = " ".join(segment.hypothesis.text for segment in await self.flush())
        await self._send_words(text.split())
        await self._start()
        await self.send(_event("transcript", text=text, language=self.limits.language))
        await self.send(_event("transcript-stop"))
        self._close()

    async def _send_words(self, words: list[str]) -> None:
        """Send those of the first words of the utterance that were not sent."""
        if text := self.unsent(words):
            await self._start()
            await self.send(_event("transcript-chunk", text=text))

    async def _start(self) -> None:
        if not self.is_open:
            self.is_open = True
            await self.send(_event("transcript-start", language=self.limits.language))

    def _begin(self, kind: str) -> None:
        """Begin an utterance; words of an open one would be lost."""
        if self.session is not None:
            raise BadRequestError(f"{kind} within an utterance: audio-stop ends it, and brings its transcript")
        self._close()

    def _close(self) -> None:
        """End the utterance."""
        self.close_session()
        self.is_open, self.sent_words, self.rate_hz = False, 0, None

    def _check_format(self, data: dict[str, Any]) -> None:
        if data.get("width") != 2 or data.get("channels") != 1:
            shown = {name: str(data.get(name))[:20] for name in ("width", "channels")}
            raise BadRequestError(f"{shown}: audio has width 2 (16 bits) and 1 channel")
        rate_hz = check_rate(data.get("rate"), "rate")
        if self.rate_hz not in (None, rate_hz):
            raise BadRequestError(f"rate={rate_hz} after {self.rate_hz}: an utterance has one rate")
        self.rate_hz, self.settings = rate_hz, SessionSettings(rate_hz, NEVER, self.hot_words)

    def _info(self) -> dict[str, Any]:
        model = {"name": "ds2", "description": "the model that this server was started with", **_SOURCE}
        program = {
            "name": "ds2",
            "description": "ds2 serve",
            **_SOURCE,
            "models": [{**model, "languages": [self.limits.language]}],
            "supports_transcript_streaming": True,
        }
        return _event("info", asr=[program])


class EventSocket:
    """A connection over TCP as a WebSocket of ASGI: a message has an `event`, of a type and data, and its `bytes`.

    The data of an event, and its payload, have at most `max_bytes`.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, max_bytes: int) -> None:
        self.reader, self.writer, self.max_bytes = reader, writer, max_bytes
        self._accepted = False
        scope = {"type": "websocket", "path": "/", "query_string": b"", "headers": [], "subprotocols": []}
        self.websocket = WebSocket(scope, self._receive, self._send)

    async def close(self) -> None:
        """Close the connection; what its client does not take within two seconds is lost."""
        try:
            async with asyncio.timeout(_CLOSE_S):
                if self.writer.can_write_eof():
                    self.writer.write_eof()
                    while await self.reader.read(1 << 16):  # unread data would reset the connection before the answer
                        pass
                self.writer.close()
                await self.writer.wait_closed()
        except (TimeoutError, OSError):
            self.writer.transport.abort()

    async def _receive(self) -> Message:
        """Return the next event; raises BadRequestError where it is none, or too long."""
        if not self._accepted:
            self._accepted = True
            return {"type": "websocket.connect"}
        try:
            return await self._read_event()
        except (asyncio.IncompleteReadError, OSError):
            return {"type": "websocket.disconnect", "code": 1006}

    async def _read_event(self) -> Message:
        try:
            line = await self.reader.readuntil(b"\n")
        except asyncio.LimitOverrunError as error:
            raise BadRequestError("the line of an event is too long: put data behind it, with data_length") from error
        header = json_object(_decode(line))
        data = header.get("data") or {}
        if not isinstance(header.get("type"), str) or not isinstance(data, dict):
            shown = ", ".join(f"{name}={short_repr(header.get(name))}" for name in ("type", "data"))
            raise BadRequestError(f"{shown}: an event has a type, a text, and data, an object")
        if length := self._length(header, "data_length"):
            data = data | json_object(_decode(await self.reader.readexactly(length)))
        payload = await self.reader.readexactly(self._length(header, "payload_length"))
        return {"type": "websocket.receive", "event": (header["type"], data), "bytes": payload}

    def _length(self, header: dict[str, Any], name: str) -> int:
        length = header.get(name) or 0
        if not isinstance(length, int):
            raise BadRequestError(f"{name} is a whole number")
        return int(check_number(length, name, Range(0, self.max_bytes)))

    async def _send(self, message: Message) -> None:
        if message["type"] == "websocket.send":
            self.writer.write(message["text"].encode() + b"\n")
            await self.writer.drain()


def _decode(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise BadRequestError(f"events are UTF-8: {error}") from error


def _event(kind: str, **data: Any) -> dict[str, Any]:
    return {"type": kind, "data": {name: value for name, value in data.items() if value is not None}}
