"""Vosk's WebSocket: one JSON reply to each audio message, so clients send and receive in lockstep.

A client may first send {"config": {"sample_rate": 16000, "words": false}}, then 16-bit little-endian mono bytes (8 kHz
unless it said otherwise), and {"eof" : 1} at the end, which is answered by the last result; {"reset" : 1} too, and the
session goes on. Results tell words with times unless `words`, which may change at any time, is false. phrase_list makes
phrases likelier, other than Vosk, where nothing else is heard, so its "[unk]", whatever else, is let go; hot_words is
ours: phrases and what each is worth; endpoints too: {"silence_s": 2.4, "after_speech_s": 1.2, "longest_s": 20}, when a
segment ends.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from starlette.websockets import WebSocket

from ds2.audio.read import RATES_HZ
from ds2.config.allowed import Range
from ds2.decoding.lexicon import HotWords
from ds2.recognition.session import Endpoints
from ds2.serve.dispatch import Heard
from ds2.serve.limits import BAD_DATA, LimitError, check_number
from ds2.serve.sockets import Client, json_object

_DEFAULT_RATE_HZ = 8000
_RATE_HZ = Range(*RATES_HZ)
_SECONDS = Range(0, 1e9, above=True)
_ANYTHING_ELSE = "[unk]"  # in a phrase_list


class Vosk(Client):
    """One connection's settings and source, which begins with its first audio."""

    rate_hz, words = _DEFAULT_RATE_HZ, True
    hot_words: HotWords | None = None
    endpoints = Endpoints()

    def refusal(self, message: str) -> dict[str, Any]:
        """What a client is told before its connection ends."""
        return {"error": message}

    async def serve(self, socket: WebSocket) -> None:
        """Answer until eof or the end of the connection."""
        while (message := await self.next(socket)) is not None:
            if message.get("bytes") is not None:
                heard = await self.hear(message["bytes"], self.rate_hz, self.endpoints, self.hot_words)
                await self.send(socket, self._result(heard) if heard.final else {"partial": heard.partial})
                continue
            command = json_object(message.get("text") or "")
            if "config" in command:
                await self._configure(command["config"])
            if command.get("reset") or command.get("eof"):
                await self.last(socket)
            if command.get("eof"):
                await socket.close()
                return

    async def last(self, socket: WebSocket) -> None:
        """The last result."""
        last = await self.source.flush() if self.source is not None else Heard([], "")
        await self.send(socket, self._result(last))

    async def _configure(self, config: Any) -> None:
        if not isinstance(config, dict):
            raise LimitError("config is an object", 400, BAD_DATA)
        if config.get("max_alternatives"):
            raise LimitError("config.max_alternatives is not offered by this server: leave it out", 400, BAD_DATA)
        before = self.rate_hz, self.hot_words, self.endpoints
        for key in ("phrase_list", "hot_words"):
            if config.get(key):
                self.hot_words = await self.batcher.phrases.table(_without_unknown(config[key]), f"config.{key}")
        if "endpoints" in config:
            self.endpoints = _endpoints(config["endpoints"])
        self.rate_hz = int(check_number(config.get("sample_rate", self.rate_hz), "config.sample_rate", _RATE_HZ))
        self.words = bool(config.get("words", self.words))
        if self.source is not None and (self.rate_hz, self.hot_words, self.endpoints) != before:
            raise LimitError("config may change nothing but words after the first audio", 400, BAD_DATA)

    def _result(self, heard: Heard) -> dict[str, Any]:
        found: dict[str, Any] = {"text": " ".join(segment.hypothesis.text for segment in heard.final)}
        result = [
            {
                "conf": round(word.confidence, 4),
                "end": round(word.end_s, 3),
                "start": round(word.start_s, 3),
                "word": word.text,
            }
            for segment in heard.final
            for word in segment.hypothesis.words
        ]
        return found | ({"result": result} if self.words and result else {})


def _without_unknown(phrases: Any) -> Any:
    return [phrase for phrase in phrases if phrase != _ANYTHING_ELSE] if isinstance(phrases, list) else phrases


def _endpoints(given: Any) -> Endpoints:
    """Rules as a client gives them; what it leaves out stays as it is."""
    allowed = [field.name for field in fields(Endpoints)]
    if not isinstance(given, dict) or not set(given) <= set(allowed):
        raise LimitError(f"config.endpoints is an object of seconds above 0, of {allowed}", 400, BAD_DATA)
    return Endpoints(**{key: check_number(value, f"config.endpoints.{key}", _SECONDS) for key, value in given.items()})
