"""The engine: one thread whose next batch is the audio that has arrived of all sessions, and its clients' interface.

Amodei et al. 2016, "Deep Speech 2", section 7 (Batch Dispatch). A session waits for the result of its samples before it
takes more from its client, so a client that sends faster than its audio is decoded is slowed down.
"""

import asyncio
import faulthandler
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from ds2.decoding.hypothesis import Hypothesis
from ds2.decoding.phrases import LexiconError
from ds2.recognition.recogniser import Recogniser
from ds2.recognition.session import LiveSession, decode_sessions, finish_segments, results
from ds2.serve.client import EngineClient, SessionSettings, StreamResult, resolve
from ds2.serve.limits import BrokenError, FullError, Limits
from ds2.serve.phrases import PhraseReader
from ds2.system import UserError
from ds2.system.plain import counted, grouped

log = logging.getLogger(__name__)
transcripts = logging.getLogger("ds2.serve.transcripts")
transcripts.setLevel(logging.WARNING)  # `ds2 serve --log-transcripts` sets INFO
HANGS_S = 20.0  # an engine whose turn lasts so long hangs; a turn of 64 sessions takes some two seconds of a busy core
_LONG_S = 30.0  # longer segments are those of files: the default rules end one after 25 s
_LONG_SHARE = 0.1  # a turn may take so much longer for each second beyond: some searches read the segment again
_TICKS = 20  # looks at the turn in that time. They are counted, as time in which the process is stopped does not count
_STDERR = 2  # its file descriptor: sys.stderr may be None


Answers = Sequence[tuple["Chunk", StreamResult | Exception]]


@dataclass(eq=False)
class Chunk:
    """Samples of a session and who waits for their result."""

    live: LiveSession
    samples: NDArray[np.float32] | None  # (N,); None: all samples before are made final
    deliver: Callable[[Answers], None]  # takes the answers to all chunks that have the same, in the engine's thread
    call: Any  # by which the one who waits knows it
    arrived_s: float = field(default_factory=time.monotonic)
    has_16_bits: bool = False  # see `Resampler.accept`
    answered: bool = False


class Metrics:
    """The metrics of a server, for Prometheus; they hold nothing of the transcripts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.sessions = Gauge(
            "ds2_sessions", "Sessions that are open now", registry=self.registry, multiprocess_mode="livesum"
        )
        self.refused = Counter("ds2_refused", "Requests refused", ["reason"], registry=self.registry)
        self.audio_s = Counter("ds2_audio_seconds", "Audio taken, seconds", registry=self.registry)
        self.words = Counter("ds2_words", "Words that became final", registry=self.registry)
        self.batch = Histogram(
            "ds2_batch_size", "Sources in a batch", buckets=[2**n for n in range(12)], registry=self.registry
        )
        self.latency_s = Histogram(
            "ds2_latency_seconds",
            "From a chunk's arrival to its result",
            buckets=[0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10],
            registry=self.registry,
        )

        self.last_word_s = Histogram(
            "ds2_last_word_seconds",
            "From the end of the last word before a pause to its final text: pause, lookahead, blocks, computation",
            buckets=[0.5, 0.7, 1, 1.2, 1.5, 2, 2.5, 3, 5, 10],
            registry=self.registry,
        )

    def text(self) -> bytes:
        """All metrics in Prometheus' format; of several recogniser processes, which count in a folder, their sum."""
        registry = self.registry
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)


class Engine:
    """A recogniser and the sessions that share its batches; one thread calls `run`.

    Of the limits `sessions` and `batch` are applied here. Raises ConfigError for a bidirectional model.
    """

    def __init__(self, recogniser: Recogniser, limits: Limits) -> None:
        self.recogniser, self.max_sessions, self.max_batch = recogniser, limits.sessions, limits.batch
        self.metrics = Metrics()
        recogniser.session().runner.prepare(limits.sessions)  # refuses a model that cannot stream
        self._warm_up()
        self._open: set[LiveSession] = set()
        self._lock = threading.Lock()  # sessions with hot words are opened in another thread
        self._turn: Sequence[Chunk] = ()  # the chunks of the present turn

    def _warm_up(self) -> None:
        """Decode a second of silence, so that no client waits for what is built once, such as a search's kernels."""
        live = self.recogniser.live()
        live.accept_waveform(np.zeros(live.sample_rate_hz, np.float32))
        while live.is_ready():
            live.decode()
        results([live])
        live.flush()

    def open(self, settings: SessionSettings) -> LiveSession:
        """Open a session; takes time where `settings.is_slow`.

        Raises:
            FullError: all sessions are taken.
            AudioError: a sample rate outside the allowed range.
            LexiconError, PhraseError, DecodeError: as `EngineClient.open`.
        """
        self._check_free()
        recogniser, phrases, false_alarms = self.recogniser, settings.phrases, settings.false_alarms
        if phrases and settings.hot_words:
            raise LexiconError("hot words with phrases or keywords: a session takes one of the three")
        if phrases and false_alarms is not None:
            recogniser = recogniser.only_keywords(phrases, false_alarms)
        elif phrases:
            recogniser = recogniser.only_phrases(phrases)
        live = recogniser.live(
            sample_rate_hz=settings.sample_rate_hz, endpoints=settings.endpoints, hot_words=settings.hot_words
        )
        live.wants_words = settings.interim_words
        with self._lock:
            self._check_free()
            self._open.add(live)
            self.metrics.sessions.set(len(self._open))
        return live

    def _check_free(self) -> None:
        if len(self._open) >= self.max_sessions:
            raise FullError(
                f"this server has {counted(self.max_sessions, 'session')} at most, all are taken: try again later"
            )

    def close(self, live: LiveSession) -> None:
        """Close a session, which may be closed already."""
        with self._lock:
            self._open.discard(live)
            self.metrics.sessions.set(len(self._open))

    def run(self, receive: Callable[[bool], Sequence[Chunk | None]], hangs: Callable[[Sequence[Chunk]], None]) -> None:
        """Decode chunks until None arrives and no chunk waits.

        Args:
            receive: returns the chunks that arrived since the last call; called with True it waits for one.
            hangs: called once, in another thread, with the chunks of a turn that lasts longer than `allowed_s` of it.
        """
        waiting: list[Chunk] = []
        ending, ended = False, threading.Event()
        watch = threading.Thread(target=self._watch, args=[hangs, ended], name="ds2-watch", daemon=True)
        watch.start()
        try:
            while waiting or not ending:
                arrived = receive(not waiting)
                ending = ending or None in arrived
                chunks = [chunk for chunk in arrived if chunk is not None]
                self._turn = [*waiting, *chunks]
                waiting = self.turn(waiting, chunks)
                self._turn = ()
        finally:
            ended.set()
            watch.join()  # else it frees tensors while Python ends, which aborts the process

    def _watch(self, hangs: Callable[[Sequence[Chunk]], None], ended: threading.Event) -> None:
        turn, ticks = self._turn, 0
        while not ended.wait(HANGS_S / _TICKS):
            ticks = ticks + 1 if turn and turn is self._turn else 0
            turn = self._turn
            duration_s = ticks * HANGS_S / _TICKS
            if ticks >= _TICKS and duration_s >= allowed_s(turn):
                log.critical(
                    "the recogniser hangs: it has decoded one batch for %.0f s; its threads are at", duration_s
                )
                faulthandler.dump_traceback(file=_STDERR)  # code, no words
                hangs(turn)
                return

    def turn(self, waiting: Sequence[Chunk], arrived: Sequence[Chunk]) -> list[Chunk]:
        """Accept chunks, decode a block of those that have one in one batch, and answer those decoded to their end.

        Args:
            waiting: what the last turn returned.
            arrived: since then.

        Returns:
            The chunks that are not answered yet.
        """
        accepted = [chunk for chunk in arrived if self._accept(chunk)]
        self.metrics.audio_s.inc(sum(len(c.samples) / c.live.sample_rate_hz for c in accepted if c.samples is not None))
        waiting, failures = [*waiting, *accepted], dict[LiveSession, Exception]()
        try:
            waiting = self._answer_finished(waiting, failures)  # some need no decoding
            batch = list(dict.fromkeys(chunk.live for chunk in waiting[: self.max_batch]))
            if batch:
                self.metrics.batch.observe(len(batch))
                decode_sessions(batch, failures.setdefault)
                waiting = self._answer_finished(waiting, failures)
        except Exception as error:  # not of one session: all that wait get the error, and the thread goes on
            waiting = [chunk for chunk in waiting if not chunk.answered]
            for chunk in waiting:
                failures.setdefault(chunk.live, error)
        return self._answer_failed(waiting, failures)

    def _accept(self, chunk: Chunk) -> bool:
        """Give a chunk to its session; return whether that worked."""
        try:
            if chunk.samples is None:
                chunk.live.input_finished()
            else:
                chunk.live.accept_waveform(chunk.samples, has_16_bits=chunk.has_16_bits)
        except Exception as error:  # of this session alone
            if not isinstance(error, UserError):
                log.exception("a session failed")
            _deliver([(chunk, _for_client(error))])
            return False
        return True

    def _answer_finished(self, waiting: list[Chunk], failures: dict[LiveSession, Exception]) -> list[Chunk]:
        """Answer the chunks that are decoded to their end; return the others. Adds the sessions that fail."""
        finished = {c.live: c for c in waiting if not c.live.is_ready() and c.live not in failures}
        if not finished:
            return waiting
        finish_segments([chunk.live for chunk in finished.values() if chunk.samples is None], failures.setdefault)
        partial = results([chunk.live for chunk in finished.values()], failures.setdefault)
        answers = [
            (chunk, _result(chunk.live, hypothesis))
            for chunk, hypothesis in zip(finished.values(), partial, strict=True)
            if chunk.live not in failures
        ]
        for _, result in answers:  # before the client can get its words and leave
            for segment in result.final:
                transcripts.info("%s", segment.hypothesis.text)
                self.metrics.words.inc(len(segment.hypothesis.text.split()))
        _deliver(answers)
        now_s = time.monotonic()
        for chunk, result in answers:
            self.metrics.latency_s.observe(now_s - chunk.arrived_s)
            if chunk.samples is not None and result.final and (words := result.final[-1].hypothesis.words):
                audio_s = chunk.live.duration_s - words[-1].end_s
                self.metrics.last_word_s.observe(audio_s + now_s - chunk.arrived_s)
        return [chunk for chunk in waiting if not chunk.answered]

    def _answer_failed(self, waiting: list[Chunk], failures: dict[LiveSession, Exception]) -> list[Chunk]:
        """Answer the chunks of sessions that failed with the errors; return the others."""
        failed = [chunk for chunk in waiting if chunk.live in failures]
        if failed:
            error = failures[failed[0].live]
            log.error("%d of %d sessions failed in a batch", len(failed), len(waiting), exc_info=error)
        for chunk in failed:
            chunk.live.blocks.clear()
        _deliver([(chunk, _for_client(failures[chunk.live])) for chunk in failed])
        return [chunk for chunk in waiting if chunk.live not in failures]


def allowed_s(turn: Sequence[Chunk]) -> float:
    """Return the longest time that a turn may take: `HANGS_S`, and more for long segments."""
    open_s = [live.duration_s - live.segment_start_s for live in {chunk.live for chunk in turn}]
    return HANGS_S + _LONG_SHARE * sum(max(0.0, seconds - _LONG_S) for seconds in open_s)


def _for_client(error: Exception) -> Exception:
    return error if isinstance(error, UserError) else BrokenError()


def _result(live: LiveSession, partial: Hypothesis) -> StreamResult:
    """Return what a session's client gets; final segments are returned once."""
    segments = list(live.segments)
    live.segments.clear()
    words = live.in_source(partial.words) if live.wants_words else []
    return StreamResult(segments, partial.text, partial.fixed_words, live.speech_start_s, words)


def _deliver(answers: Answers) -> None:
    """Deliver all answers at once to each who waits; one who cannot be answered keeps nobody else from an answer.

    If that fails, all get an error instead. Of two answers to a chunk, one who waits takes the first.
    """
    for deliver, own in grouped(answers, lambda answer: answer[0].deliver).items():
        for chunk, _ in own:
            chunk.answered = True
        try:
            deliver(own)
        except Exception:
            log.exception("answers cannot be delivered")
            with suppress(Exception):
                deliver([(chunk, BrokenError()) for chunk, _ in own])


class LocalRecogniser(EngineClient):
    """An engine in a thread of this process; arguments and errors as of `Engine`."""

    def __init__(self, recogniser: Recogniser, limits: Limits) -> None:
        phrases = PhraseReader(recogniser.alphabet, recogniser.decoder.hot_characters)
        super().__init__(phrases, recogniser.features.sample_rate_hz)
        self.engine = Engine(recogniser, limits)
        self.hangs = False  # then all calls raise BrokenError
        self._chunks: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self.engine.run, args=[self._receive, self._hang], name="recogniser", daemon=True
        )
        self._thread.start()

    def _hang(self, chunks: Sequence[Chunk]) -> None:
        """End all calls with an error."""

        def end() -> None:
            self.hangs = True
            _deliver([(chunk, BrokenError()) for chunk in [*chunks, *self._receive(False)] if chunk is not None])
            self.lost()

        chunks[0].call.get_loop().call_soon_threadsafe(end)

    async def open_handle(self, settings: SessionSettings) -> LiveSession:
        if self.hangs:
            raise BrokenError()
        if not settings.is_slow:
            return self.engine.open(settings)
        return await self.phrases.run(self.engine.open, settings)

    def submit(self, handle: LiveSession, samples: NDArray[np.float32] | None) -> asyncio.Future[StreamResult]:
        if self.hangs:
            raise BrokenError()
        future: asyncio.Future[StreamResult] = asyncio.get_running_loop().create_future()
        self._chunks.put(Chunk(handle, samples, _resolve_in_loops, future))
        return future

    def close_handle(self, handle: LiveSession) -> None:
        self.engine.close(handle)

    def count_refusal(self, reason: str) -> None:
        self.engine.metrics.refused.labels(reason).inc()

    async def metrics(self) -> bytes:
        return self.engine.metrics.text()

    def close(self) -> None:
        self._chunks.put(None)
        if not self.hangs:
            self._thread.join()

    def _receive(self, block: bool) -> list[Chunk | None]:
        chunks: list[Chunk | None] = [self._chunks.get()] if block else []
        while not self._chunks.empty():
            chunks.append(self._chunks.get())
        return chunks


def _resolve_in_loops(answers: Answers) -> None:
    """Resolve the futures of chunks; each event loop wakes up once for all answers of a batch."""
    calls: list[tuple[asyncio.Future[Any], Any]] = [(chunk.call, answer) for chunk, answer in answers]
    for loop, own in grouped(calls, lambda call: call[0].get_loop()).items():
        try:
            loop.call_soon_threadsafe(resolve, own)
        except RuntimeError:  # the loop has ended, and all its futures with it
            log.debug("an answer came after its event loop had ended")
