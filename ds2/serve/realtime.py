"""OpenAI's realtime interface for transcription: /v1/realtime?intent=transcription.

Audio is base64 of 16-bit little-endian mono at 24 kHz. An utterance, which the protocol calls an item, ends by the
client's input_audio_buffer.commit or, with turn_detection of type server_vad, when the speaker pauses, of which
speech_started and speech_stopped tell. A delta is text that is final: deltas are never taken back, so an item has one,
before its `completed`. Of turn_detection silence_duration_ms is followed; threshold, a volume, is not.
"""

from __future__ import annotations

import base64
import secrets
from typing import Any

from starlette.websockets import WebSocket

from ds2.config.allowed import Range
from ds2.decoding.lexicon import HotWords, LexiconError
from ds2.recognition.session import NEVER, Endpoints
from ds2.serve.limits import BAD_DATA, LimitError, OverError, check_number
from ds2.serve.sockets import Client, json_object

RATE_HZ = 24000
_DEFAULT_SILENCE_MS = 500  # of the protocol
_SILENCE_MS = Range(0, 3_600_000, above=True)


class Realtime(Client):
    """One connection."""

    silence_ms: float | None = _DEFAULT_SILENCE_MS  # of turn detection; None: there is none
    last_item: str | None = None
    item: str | None = None  # that is being spoken, once something of it was heard
    told_s = 0.0  # audio of the items before, since the buffer was cleared
    cleared_s = 0.0  # audio before that
    flushed_s = 0.0  # audio up to the last commit, counted as told_s
    hot_words: HotWords | None = None

    def refusal(self, message: str) -> dict[str, Any]:
        """What a client is told before its connection ends."""
        return _event("error", error=_error(message, None))

    async def serve(self, socket: WebSocket) -> None:
        """Answer events; one that is wrong is answered by an error, and the session goes on."""
        await self.send(socket, _event("session.created", session=self._session()))
        while (message := await self.next(socket)) is not None:
            event: dict[str, Any] = {}
            try:
                event = json_object(message.get("text") or "")
                await self._answer(socket, event)
            except OverError:
                raise
            except (LimitError, LexiconError) as error:  # of this event; a server that fails is another matter
                await self.send(socket, _event("error", error=_error(str(error), event.get("event_id"))))

    async def _answer(self, socket: WebSocket, event: dict[str, Any]) -> None:
        kind = event.get("type")
        if kind == "session.update":
            await self._update(event.get("session"))
            await self.send(socket, _event("session.updated", session=self._session()))
        elif kind == "input_audio_buffer.append":
            rules = NEVER if self.silence_ms is None else Endpoints(after_speech_s=self.silence_ms / 1000)
            heard = await self.hear(_decoded(event.get("audio")), RATE_HZ, rules, self.hot_words)
            for segment in heard.final:
                words = segment.hypothesis.words  # none with decode.times=false
                await self._started(socket, words[0].start_s if words else segment.start_s)
                end_ms = round(1000 * (self.cleared_s + segment.end_s))
                stopped = {"audio_end_ms": end_ms, "item_id": self.item}
                await self.send(socket, _event("input_audio_buffer.speech_stopped", **stopped))
                await self._complete(socket, segment.hypothesis.text)
            if heard.partial and self.silence_ms is not None and self.source is not None:
                await self._started(socket, self.source.accepted_s)
        elif kind == "input_audio_buffer.commit":
            if self._empty():
                raise _EventError("the buffer is empty: append audio before commit")
            await self.last(socket)
        elif kind == "input_audio_buffer.clear":
            self.item = None
            self._begin_anew()
            await self.send(socket, _event("input_audio_buffer.cleared"))
        else:
            raise _EventError(f"type={kind!r} is no event of a transcription session")

    async def last(self, socket: WebSocket) -> None:
        """Complete an item of all that was appended."""
        if self.source is not None and not self._empty():
            final = (await self.source.flush()).final
            self.flushed_s = self.source.accepted_s
            await self._complete(socket, " ".join(segment.hypothesis.text for segment in final))

    def _empty(self) -> bool:
        """Whether nothing was appended since the last commit."""
        return self.source is None or self.source.accepted_s == self.flushed_s

    def _begin_anew(self) -> None:
        """Forget what was heard; times go on."""
        self.cleared_s += self.source.accepted_s if self.source is not None else 0.0
        self.leave()
        self.told_s = self.flushed_s = 0.0

    async def _started(self, socket: WebSocket, start_s: float) -> None:
        """Tell, once, that something of an item is heard."""
        if self.item is None:
            self.item = _new_item()
            started = {"audio_start_ms": round(1000 * (self.cleared_s + start_s)), "item_id": self.item}
            await self.send(socket, _event("input_audio_buffer.speech_started", **started))

    async def _complete(self, socket: WebSocket, text: str) -> None:
        """Tell of an item that ended."""
        item, before = self.item or _new_item(), self.last_item
        accepted_s = self.source.accepted_s if self.source is not None else self.told_s
        usage = {"type": "duration", "seconds": round(accepted_s - self.told_s, 3)}
        self.last_item, self.told_s, self.item = item, accepted_s, None
        await self.send(socket, _event("input_audio_buffer.committed", item_id=item, previous_item_id=before))
        kind, of_item = "conversation.item.input_audio_transcription", {"item_id": item, "content_index": 0}
        if text:
            await self.send(socket, _event(f"{kind}.delta", delta=text, **of_item))
        await self.send(socket, _event(f"{kind}.completed", transcript=text, usage=usage, **of_item))

    def _session(self) -> dict[str, Any]:
        detection = None if self.silence_ms is None else {"type": "server_vad", "silence_duration_ms": self.silence_ms}
        audio = {"format": {"type": "audio/pcm", "rate": RATE_HZ}, "turn_detection": detection}
        return {"type": "transcription", "object": "realtime.transcription_session", "audio": {"input": audio}}

    async def _update(self, session: Any) -> None:
        if not isinstance(session, dict) or session.get("type") != "transcription":
            raise _EventError("session.type must be transcription: this server does nothing else")
        given = _inner(_inner(session, "audio"), "input")
        form = _inner(given, "format")
        if form.get("type", "audio/pcm") != "audio/pcm" or form.get("rate", RATE_HZ) != RATE_HZ:
            raise _EventError(f"session.audio.input.format={form!r}: audio/pcm at {RATE_HZ} is taken")
        hot_words, silence_ms = await self._expected(_inner(given, "transcription")), self._pause_ms(given)
        if (hot_words, silence_ms) == (self.hot_words, self.silence_ms):
            return
        if not self._empty():
            raise _EventError(
                "turn_detection and what to expect change before audio, after a commit or input_audio_buffer.clear"
            )
        self._begin_anew()
        self.hot_words, self.silence_ms = hot_words, silence_ms

    def _pause_ms(self, given: dict[str, Any]) -> float | None:
        """What turn_detection shall be: silence that ends an item, or None."""
        if "turn_detection" not in given:
            return self.silence_ms
        if given["turn_detection"] is None:
            return None
        detection = _inner(given, "turn_detection")
        if detection.get("type") != "server_vad":
            raise _EventError("turn_detection is null, or of type server_vad")
        silence_ms = detection.get("silence_duration_ms", _DEFAULT_SILENCE_MS)
        return check_number(silence_ms, "turn_detection.silence_duration_ms", _SILENCE_MS)

    async def _expected(self, hints: dict[str, Any]) -> HotWords | None:
        """Those of transcription.prompt and keywords, or of hot_words, which is ours: phrases and weights."""
        hot_words, phrases = self.hot_words, self.batcher.phrases
        if hints.get("prompt") or hints.get("keywords"):
            hot_words = await phrases.prompt(hints.get("prompt"), hints.get("keywords"))
        if hints.get("hot_words"):
            hot_words = await phrases.table(hints["hot_words"], "transcription.hot_words")
        return hot_words


class _EventError(LimitError):
    """An event that is wrong; the session goes on."""

    def __init__(self, message: str) -> None:
        super().__init__(message, 400, BAD_DATA)


def _inner(outer: dict[str, Any], name: str) -> dict[str, Any]:
    """What an object holds under a name, which is an object too; an empty one where there is none."""
    found = outer.get(name)
    if found is not None and not isinstance(found, dict):
        raise _EventError(f"{name} is {found!r}, it must be an object")
    return found or {}


def _decoded(audio: Any) -> bytes:
    try:
        return base64.b64decode(audio, validate=True)
    except (TypeError, ValueError) as error:
        raise _EventError(f"audio is base64 of 16-bit samples: {error}") from error


def _new_item() -> str:
    return f"item_{secrets.token_hex(10)}"


def _event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, "event_id": f"event_{secrets.token_hex(10)}", **fields}


def _error(message: str, event_id: Any) -> dict[str, Any]:
    event_id = event_id if isinstance(event_id, str) else None
    return {"type": "invalid_request_error", "code": None, "message": message, "param": None, "event_id": event_id}
