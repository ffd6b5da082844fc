"""An engine as the protocols use it, from an event loop; here by messages to another process.

Messages are dataclasses, sent as data (`ds2.system.messages`). Those of one turn of an event loop are sent together,
and so are all answers of a batch. A worker process imports no torch: nor do this module and what it imports.
"""

import asyncio
import itertools
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray

from ds2.audio.read import AudioError
from ds2.decoding.hypothesis import DecodeError, Hypothesis, Word
from ds2.decoding.phrases import HotWords, LexiconError
from ds2.recognition.open_segments import Endpoints, Segment
from ds2.serve.limits import BrokenError, FullError
from ds2.serve.phrases import PhraseReader
from ds2.system import UserError
from ds2.system.messages import MessageError, decode, encode

_LENGTH = struct.Struct("<Q")
_MAX_BYTES = 1 << 31  # of messages sent together: 2 s of 300 clients at 768 kHz, the highest rate


@dataclass(frozen=True)
class SessionSettings:
    """What a client asks of a session; the first three are as for `LiveSession`."""

    sample_rate_hz: int
    endpoints: Endpoints
    hot_words: HotWords | None = None
    phrases: Sequence[str] = ()  # as `Recogniser.only_phrases` takes them; only these are recognised
    interim_words: bool = False  # results of the open segment have words with times, which a beam search aligns
    false_alarms: float | None = None  # an hour; then phrases are keywords, as `Recogniser.only_keywords` takes them

    @property
    def is_slow(self) -> bool:
        """Whether a session with these takes time to open."""
        return bool(self.hot_words or self.phrases)


@dataclass
class StreamResult:
    """The result of a chunk of samples: segments that became final, and the text of the open segment."""

    final: list[Segment]
    partial: str
    fixed_words: int = 0  # first words of the open segment's text that no later audio changes
    start_s: float | None = None  # where the first word of the open segment begins, seconds of the source
    words: list[Word] = field(default_factory=list)  # of the open segment, for a session that wants them


class EngineClient(ABC):
    """An engine as the protocols use it, from an event loop."""

    def __init__(self, phrases: PhraseReader, sample_rate_hz: int) -> None:
        self.phrases, self.sample_rate_hz = phrases, sample_rate_hz
        self.ending = False
        self.lost: Callable[[], None] = lambda: None  # called, in the event loop, once nothing is answered any more

    async def start(self) -> None:
        """Start, in the event loop that will use it."""
        return

    def end(self) -> None:
        """Open no more sessions; open ones may go on to their end."""
        self.ending = True

    @abstractmethod
    def close(self) -> None:
        """Stop, once all calls are answered."""

    async def open(self, settings: SessionSettings) -> "EngineSession":
        """Open a session.

        Raises:
            FullError: all sessions are taken, or the server is ending. If the engine is in another process and
                `settings.is_slow` is false, this error and the following are raised by the first call of the session
                instead.
            AudioError: a sample rate outside the allowed range.
            LexiconError: hot words that the decoder cannot look for, or keywords that the language model lacks.
            PhraseError: phrases that cannot be read.
            DecodeError: keywords for a decoder that was not measured, or with fewer false alarms than can be had.
        """
        if self.ending:
            raise FullError("this server is ending: try again later")
        opening = asyncio.ensure_future(self.open_handle(settings))
        try:
            return EngineSession(self, await asyncio.shield(opening), settings.sample_rate_hz)
        except asyncio.CancelledError:
            opening.add_done_callback(self._close_opened)
            raise

    def _close_opened(self, opening: asyncio.Future[Any]) -> None:
        """Close a session whose client left while it was opened."""
        if not opening.cancelled() and opening.exception() is None:
            self.close_handle(opening.result())

    @abstractmethod
    async def open_handle(self, settings: SessionSettings) -> Any:
        """As `open`; return the session's handle for the other methods."""

    @abstractmethod
    def submit(self, handle: Any, samples: NDArray[np.float32] | None) -> asyncio.Future[StreamResult]:
        """Submit samples (N,) of a session; None: make all samples before final."""

    @abstractmethod
    def close_handle(self, handle: Any) -> None:
        """Close a session, which may be closed already."""

    @abstractmethod
    def count_refusal(self, reason: str) -> None:
        """Count a refused request in the metrics."""

    @abstractmethod
    async def metrics(self) -> bytes:
        """All metrics in Prometheus' format."""


class EngineSession:
    """The audio of one client; `EngineClient.open` makes it."""

    def __init__(self, engine: EngineClient, handle: Any, sample_rate_hz: int) -> None:
        self._engine, self._handle, self._sample_rate_hz = engine, handle, sample_rate_hz
        self.accepted_s = 0.0  # audio accepted so far

    async def accept_waveform(self, samples: NDArray[np.float32]) -> StreamResult:
        """Decode the next samples (N,) in [-1, 1].

        Raises:
            AudioError: NaN or infinite samples; the session goes on without them.
            DecodeError: the model gives NaN or infinity.
            BrokenError: the recogniser failed.
        """
        self.accepted_s += len(samples) / self._sample_rate_hz
        return await self._engine.submit(self._handle, samples)

    async def flush(self) -> StreamResult:
        """Make all samples final, to the last one; the session may go on."""
        return await self._engine.submit(self._handle, None)

    def close(self) -> None:
        """Close the session; twice does no harm."""
        self._engine.close_handle(self._handle)


def resolve(answers: Sequence[tuple[asyncio.Future[Any], Any]]) -> None:
    """Set results or exceptions of futures that are not done."""
    for future, answer in answers:
        if future.done():
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)


@dataclass(frozen=True)
class WorkerStarted:
    """A worker listens now."""


@dataclass(frozen=True)
class OpenSession:
    """Open a session. Where `settings.is_slow`, `call` is not 0 and the message is answered."""

    call: int
    session: int  # the worker's number for it
    settings: SessionSettings


@dataclass(frozen=True)
class AcceptWaveforms:
    """Decode the next samples of sessions, or make those before final; an entry of each list for a call."""

    calls: list[int]
    sessions: list[int]
    arrived_s: list[float]
    lengths: list[int | None]  # of samples; None: all samples of the session are made final
    samples: bytearray  # float32, of one call after the other


@dataclass(frozen=True)
class CloseSession:
    """Close a session."""

    session: int


@dataclass(frozen=True)
class CountRefusal:
    """Count a refused request in the metrics."""

    reason: str


@dataclass(frozen=True)
class ReadMetrics:
    """Send the metrics."""

    call: int


@dataclass(frozen=True)
class PartialResults:
    """The results of several calls without final segments or words; lists as `StreamResult` has them."""

    calls: list[int]
    texts: list[str]
    fixed_words: list[int]
    starts_s: list[float | None]


@dataclass(frozen=True)
class Answer:
    """The value of a call: None, a StreamResult, or bytes of metrics."""

    call: int
    value: Any


@dataclass(frozen=True)
class Failure:
    """The error of a call."""

    call: int
    kind: str  # one of `_ERRORS`; anything else is a fault of the server
    message: str

    @classmethod
    def of(cls, call: int, error: Exception) -> Self:
        """An error as a message."""
        kind = next((name for name, kind in _ERRORS.items() if isinstance(error, kind)), "")
        return cls(call, kind, str(error) if kind else "")

    def error(self) -> Exception:
        """The error."""
        return _ERRORS[self.kind](self.message) if self.kind in _ERRORS else BrokenError()


_ERRORS: dict[str, type[UserError]] = {  # a class before those that it derives from
    kind.__name__: kind for kind in (FullError, LexiconError, AudioError, DecodeError, BrokenError, UserError)
}
TO_ENGINE = (
    WorkerStarted, OpenSession, AcceptWaveforms, CloseSession, CountRefusal, ReadMetrics, SessionSettings, Endpoints,
)  # fmt: skip
TO_WORKER = (PartialResults, Answer, Failure, StreamResult, Segment, Hypothesis, Word)


def pack(messages: Sequence[Any]) -> bytes:
    """Return messages as bytes, after their length."""
    data = encode(list(messages))
    return _LENGTH.pack(len(data)) + data


class Unpacker:
    """Bytes of `pack` as they arrive, in any pieces; `classes` are the messages that may come, and what they hold."""

    def __init__(self, classes: Sequence[type]) -> None:
        self.classes = classes
        self._buffer = bytearray()

    def accept(self, data: bytes) -> Iterator[Any]:
        """Take the next bytes; yield the messages that are complete.

        Raises:
            MessageError: they cannot be read, or more of them are announced than any sender has.
        """
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > _MAX_BYTES:
                raise MessageError(f"{length} bytes of messages are announced; {_MAX_BYTES} may come together")
            first = start + _LENGTH.size
            if len(self._buffer) < first + length:
                break
            start = first + length
            yield from decode(memoryview(self._buffer)[first:start], self.classes)
        del self._buffer[:start]


class RemoteRecogniser(EngineClient, asyncio.Protocol):
    """An engine in another process, as a worker uses it; `end` is of the socket pair."""

    def __init__(self, end: socket.socket, phrases: PhraseReader, sample_rate_hz: int) -> None:
        super().__init__(phrases, sample_rate_hz)
        self._end = end
        self._numbers, self._unpacker = itertools.count(1), Unpacker(TO_WORKER)
        self._waiting: dict[int, asyncio.Future[Any]] = {}  # by the number of the call
        self._unsent: list[Any] = []
        self._transport: asyncio.Transport | None = None

    async def start(self) -> None:
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=self._end)
        self._post(WorkerStarted())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not derive from it

    def data_received(self, data: bytes) -> None:
        answers: list[tuple[int, Any]] = []
        for message in self._unpacker.accept(data):
            match message:
                case PartialResults(calls, texts, fixed_words, starts_s):
                    results = map(StreamResult, itertools.repeat([]), texts, fixed_words, starts_s)
                    answers += zip(calls, results, strict=True)
                case Answer(call, value):
                    answers.append((call, value))
                case Failure(call):
                    answers.append((call, message.error()))
        waiting = self._waiting  # of two answers the first counts
        resolve([(waiting.pop(call), answer) for call, answer in answers if call in waiting])

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        resolve([(future, BrokenError()) for future in self._waiting.values()])
        self._waiting.clear()
        self.lost()

    async def open_handle(self, settings: SessionSettings) -> int:
        session = next(self._numbers)
        if not settings.is_slow:
            self._post(OpenSession(0, session, settings))
            return session
        call, future = self._call()
        self._post(OpenSession(call, session, settings))
        await future
        return session

    def submit(self, handle: int, samples: NDArray[np.float32] | None) -> asyncio.Future[StreamResult]:
        call, future = self._call()
        if not self._unsent or not isinstance(self._unsent[-1], AcceptWaveforms):
            self._post(AcceptWaveforms([], [], [], [], bytearray()))
        waveforms = self._unsent[-1]
        waveforms.calls.append(call)
        waveforms.sessions.append(handle)
        waveforms.arrived_s.append(time.monotonic())
        waveforms.lengths.append(None if samples is None else len(samples))
        waveforms.samples.extend(b"" if samples is None else samples.tobytes())
        return future

    def close_handle(self, handle: int) -> None:
        self._post(CloseSession(handle))

    def count_refusal(self, reason: str) -> None:
        self._post(CountRefusal(reason))

    async def metrics(self) -> bytes:
        call, future = self._call()
        self._post(ReadMetrics(call))
        return cast(bytes, await future)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _call(self) -> tuple[int, asyncio.Future[Any]]:
        if self._transport is None:
            raise BrokenError()
        call = next(self._numbers)
        self._waiting[call] = future = asyncio.get_running_loop().create_future()
        return call, future

    def _post(self, message: Any) -> None:
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send)
        self._unsent.append(message)

    def _send(self) -> None:
        messages, self._unsent = self._unsent, []
        if self._transport is not None:
            self._transport.write(pack(messages))
