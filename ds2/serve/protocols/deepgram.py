"""Deepgram's live interface: /v1/listen?encoding=linear16&sample_rate=16000.

Audio is mono: 16-bit little-endian samples, or 8-bit ones of telephones (`encoding=mulaw` and `alaw`). The rest of the
settings stand in the address: `interim_results`, `endpointing` (milliseconds of silence that end an utterance; ours by
default, false: only messages do), `utterance_end_ms`, `vad_events`, and `keyterm` or `keywords`, which are hot words.
Settings of spelling, as `punctuate`, change nothing: texts are as the model writes them. What would change the meaning
is refused. Results list words with times, interim ones too. Finalize makes all audio final, CloseStream ends the
connection after the last result and Metadata, KeepAlive only keeps it open.
"""

import hashlib
import uuid
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from starlette.datastructures import QueryParams

from ds2.audio.stream import Pcm
from ds2.config.allowed import Range
from ds2.decoding.hypothesis import Word, times_record
from ds2.decoding.phrases import HotWords
from ds2.recognition.open_segments import NEVER, Endpoints, Segment
from ds2.serve.client import SessionSettings
from ds2.serve.limits import BadRequestError, check_number, check_rate, refuse_misspelt
from ds2.serve.protocols.websocket import Connection, json_object
from ds2.system.plain import short_repr

_MS = Range(0, 3_600_000, above=True)
_ENCODINGS: dict[str, Callable[[], Pcm]] = {
    "linear16": Pcm,
    "mulaw": partial(Pcm, "ULAW"),
    "alaw": partial(Pcm, "ALAW"),
}
_ONLY = {  # settings with the one value that they may have
    "channels": "1",
    "multichannel": "false",
    "alternatives": "1",
    "diarize": "false",
    "diarize_model": None,
    "detect_language": "false",
    "redact": None,
    "replace": None,
    "search": None,
    "only_keywords": None,
    "callback": None,
}
_TAKEN = (
    "encoding", "sample_rate", "interim_results", "endpointing", "utterance_end_ms", "vad_events", "keyterm",
    "keywords",
)  # fmt: skip
_SPELLING = (  # settings that change nothing here
    "model", "version", "language", "punctuate", "smart_format", "numerals", "filler_words", "profanity_filter",
    "dictation", "measurements", "detect_entities", "no_delay", "tag", "extra", "mip_opt_out", "callback_method",
    "diarize_version", "utterances", "utt_split", "vad_turnoff",
)  # fmt: skip


class Deepgram(Connection):
    """One connection."""

    summary = "Deepgram's live interface"
    vad_events = False
    utterance_end_s: float | None = None
    final_s = 0.0  # audio whose words are final
    is_speech = False  # whether words of the open segment were recognised
    last_word_s: float | None = None  # the end of the last word whose UtteranceEnd was not sent
    partial = ""

    def refusal(self, message: str) -> dict[str, Any]:
        return {"type": "Error", "variant": "SchemaError", "description": message, "message": message}

    async def handle_messages(self) -> None:
        """`CloseStream` ends the connection too."""
        self.request = str(uuid.uuid4())
        await self._configure(self.socket.query_params)
        while (message := await self.receive()) is not None:
            if message.get("bytes"):
                await self._accept(message["bytes"])
                continue
            kind = "CloseStream" if message.get("bytes") is not None else json_object(message["text"]).get("type")
            if kind == "Finalize":
                await self._flush(from_finalize=True)
            elif kind == "CloseStream":
                await self.send_last_result()
                await self.socket.close()
                return
            elif kind != "KeepAlive":
                messages = "KeepAlive, Finalize, CloseStream"
                raise BadRequestError(f"type={short_repr(kind)} is no message of this interface: {messages}")

    async def _accept(self, data: bytes) -> None:
        result = await self.accept_audio(data)
        assert self.session is not None
        for segment in result.final:
            await self._send_segment(segment, from_finalize=False)
        await self._start_speech(result.partial, result.start_s)
        if self.settings.interim_words and result.partial != self.partial:
            interim = result.partial, self.final_s, self.session.accepted_s - self.final_s, result.words
            await self.send(self._result(*interim, final=False, from_finalize=False))
        self.partial = result.partial
        end_s, last_s = self.utterance_end_s, self.last_word_s
        if end_s is not None and last_s is not None and not self.partial and self.session.accepted_s - last_s >= end_s:
            await self._end_utterance(last_s)

    async def send_last_result(self) -> None:
        await self._flush(from_finalize=False)
        duration_s = round(self.session.accepted_s, 3) if self.session is not None else 0.0
        metadata = {
            "type": "Metadata",
            "transaction_key": "deprecated",
            "request_id": self.request,
            "sha256": hashlib.sha256(self.request.encode()).hexdigest(),  # of nothing that was said
            "created": datetime.now(UTC).isoformat(),
            "duration": duration_s,
            "channels": 1,
        }
        await self.send(metadata)

    async def _flush(self, *, from_finalize: bool) -> None:
        """Send what is not final yet as final; at least one result."""
        final = await self.flush(continues=from_finalize)
        for segment in final:
            await self._send_segment(segment, from_finalize=from_finalize)
        if not final:
            await self.send(self._result("", self.final_s, 0.0, [], final=True, from_finalize=from_finalize))
        if self.utterance_end_s is not None and self.last_word_s is not None:
            await self._end_utterance(self.last_word_s)

    async def _start_speech(self, text: str, start_s: float | None) -> None:
        """Send, once a segment, that its speech started."""
        if not self.is_speech and text:
            self.is_speech = True
            if self.vad_events:
                timestamp_s = round(start_s if start_s is not None else self.final_s, 3)
                await self.send({"type": "SpeechStarted", "channel": [0, 1], "timestamp": timestamp_s})

    async def _end_utterance(self, last_word_s: float) -> None:
        self.last_word_s = None
        await self.send({"type": "UtteranceEnd", "channel": [0, 1], "last_word_end": round(last_word_s, 3)})

    async def _send_segment(self, segment: Segment, *, from_finalize: bool) -> None:
        await self._start_speech(segment.hypothesis.text, segment.start_s)
        text, words, duration_s = segment.hypothesis.text, segment.hypothesis.words, segment.end_s - segment.start_s
        result = self._result(text, segment.start_s, duration_s, words, final=True, from_finalize=from_finalize)
        if text:
            self.last_word_s = words[-1].end_s if words else segment.end_s
        self.final_s, self.is_speech, self.partial = segment.end_s, False, ""
        await self.send(result)

    def _result(
        self, text: str, start_s: float, duration_s: float, words: Sequence[Word], *, final: bool, from_finalize: bool
    ) -> dict[str, Any]:
        listed = [{"word": word.text, **times_record(word), "punctuated_word": word.text} for word in words]
        confidence = round(sum(round(word.confidence, 4) for word in words) / len(words), 4) if words else 0.0
        model = {"name": "ds2", "version": "ds2", "arch": "ds2"}
        return {
            "type": "Results",
            "channel_index": [0, 1],
            "start": round(start_s, 3),
            "duration": round(duration_s, 3),
            "is_final": final,
            "speech_final": final,
            "from_finalize": from_finalize,
            "channel": {"alternatives": [{"transcript": text, "confidence": confidence, "words": listed}]},
            "metadata": {"request_id": self.request, "model_info": model, "model_uuid": "ds2"},
        }

    async def _configure(self, query: QueryParams) -> None:
        refuse_misspelt(query, (*_TAKEN, *_ONLY, *_SPELLING))
        for name, only in _ONLY.items():
            if any(value != only for value in query.getlist(name)):
                allowed = f"{name}={only}" if only is not None else "nothing"
                raise BadRequestError(f"{name}={short_repr(query[name])} is not offered by this server: {allowed} is")
        if any(value not in _ENCODINGS for value in query.getlist("encoding") or [""]):
            raise BadRequestError(
                f"encoding={short_repr(query.get('encoding', ''))}: this server reads no containers and no codecs but "
                f"encoding={', encoding='.join(_ENCODINGS)}; give one of them, and sample_rate=HZ"
            )
        self.sample_reader = _ENCODINGS[query["encoding"]]
        rate_hz = check_rate(_number(query.get("sample_rate", "")), "sample_rate")
        interim, self.vad_events = (_is_true(query, name) for name in ("interim_results", "vad_events"))
        endpoints = Endpoints()
        pause = query.get("endpointing", "true")
        if pause == "false":
            endpoints = NEVER
        elif pause != "true":
            endpoints = Endpoints(after_speech_s=check_number(_number(pause), "endpointing", _MS) / 1000)
        if (silence := query.get("utterance_end_ms", "false")) != "false":
            self.utterance_end_s = check_number(_number(silence), "utterance_end_ms", _MS) / 1000
        self.settings = SessionSettings(rate_hz, endpoints, await self._hot_words(query), interim_words=interim)

    async def _hot_words(self, query: QueryParams) -> HotWords:
        """Read keyterm=PHRASE, keywords=WORD and keywords=WORD:BONUS."""
        plain, weighted = [term for term in query.getlist("keyterm") if term], dict[str, Any]()
        for keyword in query.getlist("keywords"):
            word, colon, bonus = keyword.rpartition(":")
            if colon:
                weighted[word] = _number(bonus)
            elif bonus:
                plain.append(bonus)
        table = self.engine.phrases.table
        return {**await table(plain, "keyterm"), **await table(weighted, "keywords")}


def _number(text: str | None) -> float | str | None:
    """Return a number of an address, or what stands there instead, which `check_number` refuses."""
    try:
        return float(text or "")
    except ValueError:
        return text


def _is_true(query: QueryParams, name: str) -> bool:
    value = query.get(name, "false")
    if value not in ("true", "false"):
        raise BadRequestError(f"{name}={short_repr(value)} is not allowed: give true or false")
    return value == "true"
