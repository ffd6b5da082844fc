"""OpenAI's realtime interface for transcription: /v1/realtime?intent=transcription.

Audio is base64 of mono samples: 16-bit little-endian ones at 24 kHz, or 8-bit ones of telephones at 8 kHz (audio/pcmu,
audio/pcma). An utterance, which the protocol calls an item, ends with the client's input_audio_buffer.commit or, with
turn_detection of type server_vad, when the speaker pauses; the events speech_started and speech_stopped then say where.
A delta is never withdrawn: with turn detection words are sent once no later audio can change them, the rest before
`completed`, whose transcript is the deltas together. silence_duration_ms of turn_detection is applied; threshold, a
volume, is not. Our extension `only_keywords`: each keyword comes as a segment event, before `completed`, with its
confidence; it has no speaker.
"""

import base64
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ds2.audio.stream import Pcm
from ds2.config.allowed import Range
from ds2.decoding.hypothesis import times_record
from ds2.decoding.phrases import OTHERS, HotWords, LexiconError, PhraseError
from ds2.recognition.open_segments import NEVER, Endpoints, Segment
from ds2.serve.client import SessionSettings
from ds2.serve.limits import BadRequestError, check_number, refuse_misspelt
from ds2.serve.phrases import KEYWORDS
from ds2.serve.protocols.websocket import Connection, json_object
from ds2.system.plain import short_repr

RATE_HZ = 24000
_FORMATS: dict[str, tuple[int, Callable[[], Pcm]]] = {
    "audio/pcm": (RATE_HZ, Pcm),
    "audio/pcmu": (8000, partial(Pcm, "ULAW")),
    "audio/pcma": (8000, partial(Pcm, "ALAW")),
}
_DEFAULT_SILENCE_MS = 500  # of the protocol
_SILENCE_MS = Range(0, 3_600_000, above=True)
_INPUT = ("format", "transcription", "turn_detection", "noise_reduction")  # the last changes nothing here
_TRANSCRIPTION_SETTINGS = (
    "prompt", "keywords", "hot_words", "phrases", *KEYWORDS, "model", "language", "languages", "delay",
)  # fmt: skip
_DETECTION = (
    "type", "silence_duration_ms", "threshold", "prefix_padding_ms", "create_response", "interrupt_response",
    "idle_timeout_ms", "eagerness",
)  # fmt: skip
_TRANSCRIPTION = "conversation.item.input_audio_transcription"


class Realtime(Connection):
    """One connection."""

    summary = "OpenAI's realtime interface (transcription)"
    settings = SessionSettings(RATE_HZ, Endpoints(after_speech_s=_DEFAULT_SILENCE_MS / 1000))
    silence_ms: float | None = _DEFAULT_SILENCE_MS  # of turn detection; None: it is off
    format = "audio/pcm"
    item: str | None = None  # the open item, once some of its words were recognised
    last_item: str | None = None  # the item before
    # Seconds of audio: before the last input_audio_buffer.clear; and since then, up to the last item and commit.
    cleared_s = completed_s = committed_s = 0.0

    def refusal(self, message: str) -> dict[str, Any]:
        return _event("error", error=_error(message, None))

    async def handle_messages(self) -> None:
        """A wrong event is answered with an error, and the session goes on."""
        await self.send(_event("session.created", session=self._settings()))
        while (message := await self.receive()) is not None:
            event: dict[str, Any] = {}
            try:
                if message.get("bytes") is not None:
                    raise BadRequestError("a binary message: audio is base64, in input_audio_buffer.append")
                event = json_object(message.get("text") or "")
                await self._handle_event(event)
            except (BadRequestError, LexiconError, PhraseError) as error:  # the session goes on; other errors end it
                await self.send(_event("error", error=_error(str(error), event.get("event_id"))))

    async def _handle_event(self, event: dict[str, Any]) -> None:
        kind = event.get("type")
        if kind == "session.update":
            await self._update(event.get("session"))
            await self.send(_event("session.updated", session=self._settings()))
        elif kind == "input_audio_buffer.append":
            await self._append(event.get("audio"))
        elif kind == "input_audio_buffer.commit":
            if self._is_empty():
                raise BadRequestError("the buffer is empty: append audio before commit")
            await self.send_last_result()
        elif kind == "input_audio_buffer.clear":
            self.item = None
            self._clear()
            await self.send(_event("input_audio_buffer.cleared"))
        else:
            raise BadRequestError(
                f"type={short_repr(kind)} is no event of a transcription session: session.update, and "
                "input_audio_buffer.append, .commit and .clear are"
            )

    async def _append(self, audio: Any) -> None:
        result = await self.accept_audio(_decode_base64(audio))
        for segment in result.final:
            words = segment.hypothesis.words  # none with decode.times=false
            await self._start_item(words[0].start_s if words else segment.start_s)
            end_ms = round(1000 * (self.cleared_s + segment.end_s))
            stopped = {"audio_end_ms": end_ms, "item_id": self.item}
            await self.send(_event("input_audio_buffer.speech_stopped", **stopped))
            await self._complete_item([segment])
        if result.partial and self.silence_ms is not None and result.start_s is not None:
            await self._start_item(result.start_s)
            await self._send_words(result.partial.split()[: result.fixed_words])

    async def send_last_result(self) -> None:
        """Complete an item of all that was appended since the last commit."""
        if self.session is not None and not self._is_empty():
            final = await self.flush()
            self.committed_s = self.session.accepted_s
            await self._complete_item(final)

    def _is_empty(self) -> bool:
        """Whether nothing was appended since the last commit."""
        return self.session is None or self.session.accepted_s == self.committed_s

    def _clear(self) -> None:
        """Close the session; times go on counting."""
        self.cleared_s += self.session.accepted_s if self.session is not None else 0.0
        self.close_session()
        self.completed_s = self.committed_s = 0.0

    async def _start_item(self, start_s: float) -> None:
        """Send, once an item, that its speech started."""
        if self.item is None:
            self.item, self.sent_words = _new_item(), 0
            started = {"audio_start_ms": round(1000 * (self.cleared_s + start_s)), "item_id": self.item}
            await self.send(_event("input_audio_buffer.speech_started", **started))

    async def _complete_item(self, final: Sequence[Segment]) -> None:
        """Send the events of an item that ended."""
        text = " ".join(segment.hypothesis.text for segment in final)
        if self.item is None:
            self.item, self.sent_words = _new_item(), 0
        item, before = self.item, self.last_item
        accepted_s = self.session.accepted_s if self.session is not None else self.completed_s
        usage = {"type": "duration", "seconds": round(accepted_s - self.completed_s, 3)}
        await self.send(_event("input_audio_buffer.committed", item_id=item, previous_item_id=before))
        await self._send_words(text.split())
        self.last_item, self.completed_s, self.item = item, accepted_s, None
        of_item = {"item_id": item, "content_index": 0}
        words = [word for segment in final for word in segment.hypothesis.words]
        for word in words if self.settings.false_alarms is not None else ():
            if word.text != OTHERS:
                times = times_record(word, self.cleared_s)
                keyword = {"id": f"seg_{secrets.token_hex(10)}", "text": word.text, "speaker": "", **times}
                await self.send(_event(f"{_TRANSCRIPTION}.segment", **keyword, **of_item))
        await self.send(_event(f"{_TRANSCRIPTION}.completed", transcript=text, usage=usage, **of_item))

    async def _send_words(self, words: Sequence[str]) -> None:
        """Send the words of the open item that are final and were not sent yet."""
        if delta := self.unsent(words):
            await self.send(_event(f"{_TRANSCRIPTION}.delta", delta=delta, item_id=self.item, content_index=0))

    def _settings(self) -> dict[str, Any]:
        detection = None if self.silence_ms is None else {"type": "server_vad", "silence_duration_ms": self.silence_ms}
        audio = {"format": {"type": self.format, "rate": self.settings.sample_rate_hz}, "turn_detection": detection}
        return {"type": "transcription", "object": "realtime.transcription_session", "audio": {"input": audio}}

    async def _update(self, settings: Any) -> None:
        if not isinstance(settings, dict) or settings.get("type") != "transcription":
            raise BadRequestError("session.type must be transcription: this server does nothing else")
        audio_input = _object(_object(settings, "audio"), "input")
        audio_format = _object(audio_input, "format")
        kind = audio_format.get("type", self.format)
        if (
            not isinstance(kind, str)
            or kind not in _FORMATS
            or audio_format.get("rate") not in (None, _FORMATS[kind][0])
        ):
            taken = ", ".join(f"{name} at {rate_hz}" for name, (rate_hz, _) in _FORMATS.items())
            raise BadRequestError(f"session.audio.input.format={short_repr(audio_format)} is none of {taken}")
        transcription = _object(audio_input, "transcription")
        refuse_misspelt(audio_input, _INPUT, "session.audio.input.")
        refuse_misspelt(transcription, _TRANSCRIPTION_SETTINGS, "session.audio.input.transcription.")
        hot_words, phrases = await self._hot_words(transcription), self.settings.phrases
        false_alarms = self.settings.false_alarms
        if transcription.keys() & {"phrases", *KEYWORDS}:  # our extensions: only these
            phrases, false_alarms = await self.engine.phrases.only(transcription, "phrases", "transcription.")
        silence_ms = self._silence_ms(audio_input)
        endpoints = NEVER if silence_ms is None else Endpoints(after_speech_s=silence_ms / 1000)
        settings = SessionSettings(_FORMATS[kind][0], endpoints, hot_words, phrases, false_alarms=false_alarms)
        if (settings, kind) == (self.settings, self.format):
            return
        if not self._is_empty():
            raise BadRequestError(
                "format, turn_detection and transcription change before audio, after a commit or "
                "input_audio_buffer.clear"
            )
        self.settings, self.silence_ms = settings, silence_ms
        self.format, self.sample_reader = kind, _FORMATS[kind][1]
        self._clear()

    def _silence_ms(self, audio_input: dict[str, Any]) -> float | None:
        """Read turn_detection: the silence that ends an item, or None if it is off."""
        if "turn_detection" not in audio_input:
            return self.silence_ms
        if audio_input["turn_detection"] is None:
            return None
        detection = _object(audio_input, "turn_detection")
        if detection.get("type") != "server_vad":
            kind = short_repr(detection.get("type"))
            raise BadRequestError(
                f"turn_detection.type={kind} is not offered: turn_detection is null, or of type server_vad"
            )
        refuse_misspelt(detection, _DETECTION, "session.audio.input.turn_detection.")
        silence_ms = detection.get("silence_duration_ms", _DEFAULT_SILENCE_MS)
        return check_number(silence_ms, "turn_detection.silence_duration_ms", _SILENCE_MS)

    async def _hot_words(self, transcription: dict[str, Any]) -> HotWords | None:
        """Read prompt and keywords, or hot_words (our extension): phrases with weights."""
        if not transcription.keys() & {"prompt", "keywords", "hot_words"}:
            return self.settings.hot_words
        phrases = self.engine.phrases
        hints = await phrases.prompt(transcription.get("prompt"), transcription.get("keywords"))
        return {**hints, **await phrases.table(transcription.get("hot_words"), "transcription.hot_words")} or None


def _object(outer: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the object that `outer` holds under a name; an empty one if there is none."""
    inner = outer.get(name)
    if inner is not None and not isinstance(inner, dict):
        raise BadRequestError(f"{name} is {short_repr(inner)}, it must be an object")
    return inner or {}


def _decode_base64(audio: Any) -> bytes:
    if not isinstance(audio, str):
        raise BadRequestError(f"audio is {short_repr(audio)}: give base64 of samples, a text")
    try:
        return base64.b64decode(audio, validate=True)
    except ValueError as error:
        raise BadRequestError(f"audio is base64 of samples: {error}") from error


def _new_item() -> str:
    return f"item_{secrets.token_hex(10)}"


def _event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, "event_id": f"event_{secrets.token_hex(10)}", **fields}


def _error(message: str, event_id: Any) -> dict[str, Any]:
    event_id = event_id if isinstance(event_id, str) else None
    return {"type": "invalid_request_error", "code": None, "message": message, "param": None, "event_id": event_id}
