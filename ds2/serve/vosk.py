"""Vosk's WebSocket: one JSON reply to each audio message, so clients send and receive in lockstep.

A client may first send {"config": {"sample_rate": 16000, "words": true}}, then 16-bit little-endian mono bytes (8 kHz
unless it said otherwise), and {"eof" : 1} at the end, which is answered by the last result; {"reset" : 1} too, and the
session goes on.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from ds2.audio.stream import Pcm16
from ds2.recognition.live import Endpoints
from ds2.serve.batcher import Batcher, FullError, Heard, Source
from ds2.serve.limits import LimitError, Limits
from ds2.system.errors import UserError

_DEFAULT_RATE_HZ = 8000
_TRY_LATER, _BAD_DATA = 1013, 1007


class Vosk:
    """The endpoint."""

    def __init__(self, batcher: Batcher, limits: Limits) -> None:
        self.batcher, self.limits = batcher, limits

    async def __call__(self, socket: WebSocket) -> None:
        """Serve a connection to its end."""
        client = _Client(self.batcher, self.limits)
        try:
            await socket.accept()
            self.limits.check_key(socket)
            await client.serve(socket)
        except WebSocketDisconnect:
            return
        except TimeoutError:
            await self._refuse(socket, f"nothing came for {self.limits.idle_s:g} s", _TRY_LATER)
        except LimitError as error:
            await self._refuse(socket, str(error), error.code)
        except FullError as error:
            await self._refuse(socket, str(error), _TRY_LATER)
        except UserError as error:
            await self._refuse(socket, str(error), _BAD_DATA)
        finally:
            client.close()

    async def _refuse(self, socket: WebSocket, message: str, code: int) -> None:
        self.batcher.metrics.refused.labels(str(code)).inc()
        try:
            await socket.send_json({"error": message})
            await socket.close(code, message[:100])
        except (WebSocketDisconnect, RuntimeError):
            return  # it has gone meanwhile


class _Client:
    """One connection's settings and source, which begins with its first audio."""

    def __init__(self, batcher: Batcher, limits: Limits) -> None:
        self.batcher, self.limits = batcher, limits
        self.rate_hz, self.words = _DEFAULT_RATE_HZ, False
        self.source: Source | None = None
        self.samples = Pcm16()

    def close(self) -> None:
        if self.source is not None:
            self.source.close()

    async def serve(self, socket: WebSocket) -> None:
        while True:
            message = await asyncio.wait_for(socket.receive(), self.limits.idle_s)
            if message["type"] == "websocket.disconnect":
                return
            if message.get("bytes") is not None:
                await socket.send_json(self._reply(await self._hear(message["bytes"])))
                continue
            command = _command(message.get("text") or "")
            if "config" in command:
                self._configure(command["config"])
            if command.get("reset") or command.get("eof"):
                last = await self.source.flush() if self.source is not None else Heard([], "")
                await socket.send_json(self._result(last))
            if command.get("eof"):
                await socket.close()
                return

    async def _hear(self, data: bytes) -> Heard:
        if self.source is None:
            self.source = self.batcher.open(self.rate_hz, Endpoints())
        heard = await self.source.accept(self.samples.accept(data))
        self.limits.check_duration(self.source.accepted_s)
        return heard

    def _configure(self, config: Any) -> None:
        if not isinstance(config, dict) or self.source is not None:
            raise LimitError("config is an object and comes before the first audio", 400, _BAD_DATA)
        for key in ("phrase_list", "max_alternatives"):
            if config.get(key):
                raise LimitError(f"config.{key} is not offered by this server: leave it out", 400, _BAD_DATA)
        rate_hz = config.get("sample_rate", self.rate_hz)
        if not isinstance(rate_hz, int | float) or isinstance(rate_hz, bool):
            raise LimitError(f"config.sample_rate={rate_hz!r} is no number", 400, _BAD_DATA)
        self.rate_hz, self.words = int(rate_hz), bool(config.get("words", self.words))

    def _reply(self, heard: Heard) -> dict[str, Any]:
        return self._result(heard) if heard.final else {"partial": heard.partial}

    def _result(self, heard: Heard) -> dict[str, Any]:
        found: dict[str, Any] = {"text": " ".join(segment.hypothesis.text for segment in heard.final)}
        if self.words and heard.final:
            found["result"] = [
                {
                    "conf": round(word.confidence, 4),
                    "end": round(word.end_s, 3),
                    "start": round(word.start_s, 3),
                    "word": word.text,
                }
                for segment in heard.final
                for word in segment.hypothesis.words
            ]
        return found


def _command(text: str) -> dict[str, Any]:
    try:
        command = json.loads(text)
    except ValueError as error:
        raise LimitError(f"text messages are JSON: {error}", 400, _BAD_DATA) from error
    if not isinstance(command, dict):
        raise LimitError("text messages are JSON objects", 400, _BAD_DATA)
    return command
