"""Vosk's WebSocket protocol: one JSON reply to each audio message, so clients send and receive in turns.

A client may first send {"config": {"sample_rate": 16000, "words": false}}, then 16-bit little-endian mono samples (at
8 kHz unless the config says otherwise), and {"eof" : 1} at the end, whose reply is the last result; after {"reset" : 1}
the reply is the same and the session goes on. Results list words with times unless `words`, which may change at any
time, is false. `phrase_list` makes phrases likelier; in Vosk's own server nothing else is recognised, so its "[unk]",
which stands for everything else, is dropped. `grammar` is a list of the only phrases that are recognised; with "[unk]"
in it other speech becomes that word, without it all speech becomes phrases. Our extensions: `hot_words`, phrases with
weights, the syntax of `ds2.decoding.phrases` in `grammar`, and `endpoints`, when a segment ends: {"silence_s": 2.4,
"after_speech_s": 0.8, "longest_s": 20}. `only_keywords` in place of `grammar` finds these phrases among all words, with
`false_alarms` an hour of each; in results each is one word, and other speech "[unk]".
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

from ds2.config.allowed import Range
from ds2.recognition.open_segments import Endpoints, Segment
from ds2.serve.client import SessionSettings
from ds2.serve.limits import BadRequestError, check_number, check_rate
from ds2.serve.phrases import KEYWORDS
from ds2.serve.protocols.websocket import Connection, json_object
from ds2.system.plain import short_repr

_DEFAULT_RATE_HZ = 8000
_SECONDS = Range(0, 1e9, above=True)
_SETTINGS = ("sample_rate", "words", "phrase_list", "hot_words", "grammar", *KEYWORDS, "endpoints")
_EVERYTHING_ELSE = "[unk]"  # in a phrase_list


class Vosk(Connection):
    """One connection and its settings."""

    summary = "Vosk's WebSocket"
    settings = SessionSettings(_DEFAULT_RATE_HZ, Endpoints())
    words = True  # whether results list them

    async def handle_messages(self) -> None:
        """`eof` ends the connection too."""
        while (message := await self.receive()) is not None:
            if message.get("bytes") is not None:
                result = await self.accept_audio(message["bytes"])
                await self.send(self._reply(result.final) if result.final else {"partial": result.partial})
                continue
            command = json_object(message.get("text") or "")
            if not command.keys() & {"config", "reset", "eof"}:
                raise BadRequestError(f"a text message has config, reset or eof, this one has {_shown(command)}")
            if "config" in command:
                await self._configure(command["config"])
            if command.get("reset") or command.get("eof"):
                await self.send_last_result()
            if command.get("eof"):
                await self.socket.close()
                return

    async def send_last_result(self) -> None:
        await self.send(self._reply(await self.flush()))

    async def _configure(self, config: Any) -> None:
        if not isinstance(config, dict):
            raise BadRequestError("config is an object")
        if unknown := [name for name in config if name not in (*_SETTINGS, "max_alternatives")]:
            raise BadRequestError(f"config has no setting {_shown(unknown)}: {', '.join(_SETTINGS)} are allowed")
        if config.get("max_alternatives"):
            raise BadRequestError("config.max_alternatives is not offered by this server: leave it out")
        settings = self.settings
        if keys := [key for key in ("phrase_list", "hot_words") if key in config]:
            tables = [await self.engine.phrases.table(_without_unknown(config[key]), f"config.{key}") for key in keys]
            hot_words = {phrase: weight for table in tables for phrase, weight in table.items()} or None
            settings = replace(settings, hot_words=hot_words)
        if config.keys() & {"grammar", *KEYWORDS}:
            phrases, false_alarms = await self.engine.phrases.only(config, "grammar", "config.")
            settings = replace(settings, phrases=phrases, false_alarms=false_alarms)
        if "endpoints" in config:
            settings = replace(settings, endpoints=_endpoints(config["endpoints"]))
        rate_hz = check_rate(config.get("sample_rate", settings.sample_rate_hz), "config.sample_rate")
        settings = replace(settings, sample_rate_hz=rate_hz)
        words = config.get("words", self.words)
        if words not in (None, False, True):  # 0 and 1 are
            raise BadRequestError(f"config.words={short_repr(words)} is not allowed: give true or false")
        self.words = bool(words)
        if self.session is not None and settings != self.settings:
            raise BadRequestError("config may change nothing but words after the first audio")
        self.settings = settings

    def _reply(self, final: Sequence[Segment]) -> dict[str, Any]:
        reply: dict[str, Any] = {"text": " ".join(segment.hypothesis.text for segment in final)}
        words = [
            {
                "conf": round(word.confidence, 4),
                "end": round(word.end_s, 3),
                "start": round(word.start_s, 3),
                "word": word.text,
            }
            for segment in final
            for word in segment.hypothesis.words
        ]
        return reply | ({"result": words} if self.words and words else {})


def _shown(names: Iterable[str]) -> str:
    """Names that a client sent, as far as they fit into a message."""
    return ", ".join(map(short_repr, itertools.islice(names, 20)))[:200] or "nothing"


def _without_unknown(phrases: Any) -> Any:
    return [phrase for phrase in phrases if phrase != _EVERYTHING_ELSE] if isinstance(phrases, list) else phrases


def _endpoints(value: Any) -> Endpoints:
    """Read a client's rules; those that it leaves out keep their defaults."""
    allowed = [field.name for field in fields(Endpoints)]
    if not isinstance(value, dict) or not set(value) <= set(allowed):
        raise BadRequestError(f"config.endpoints is an object of seconds above 0, of {allowed}")
    return Endpoints(**{key: check_number(rule, f"config.endpoints.{key}", _SECONDS) for key, rule in value.items()})
