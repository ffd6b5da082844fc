"""Batch Dispatch: what has arrived from any source when the device becomes free is the next batch.

Amodei et al. 2016, "Deep Speech 2", section 7. One thread owns the recogniser; sources wait for what it finds in their
chunks before they take more from their clients, so a client that sends faster than it is heard is slowed down.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ds2.decoding.lexicon import HotWords
from ds2.recognition.recogniser import Recogniser
from ds2.recognition.session import Endpoints, Live, Segment, decode_sessions, finish_segments, results
from ds2.serve.limits import BrokenError, FullError, Limits
from ds2.serve.metrics import Metrics
from ds2.system.errors import UserError

log = logging.getLogger(__name__)
transcripts = logging.getLogger("ds2.serve.transcripts")
transcripts.setLevel(logging.WARNING)  # INFO, which who runs a server must ask for, logs what is said


@dataclass(frozen=True)
class Heard:
    """What a chunk gave."""

    final: list[Segment]
    partial: str  # of the segment that is open


Answers = Sequence[tuple["Job", Heard | Exception]]


class Asker(Protocol):
    """Who waits for answers."""

    def settle(self, answers: Answers) -> None:
        """Take the answers to own jobs; in the recogniser's thread."""


@dataclass(eq=False)
class Job:
    """A chunk of a source, or its end, that somebody waits for."""

    live: Live
    samples: NDArray[np.float32] | None  # None: all that was heard becomes final
    asker: Asker
    called: Any  # as the asker calls it
    arrived_s: float = field(default_factory=time.monotonic)


class Dispatch:
    """A recogniser, the sources that it hears, and the thread that calls `run`.

    Args:
        recogniser: with a unidirectional model.
        limits: of which `sessions` and `batch` are kept here.

    Raises:
        ConfigError: a bidirectional model.
    """

    def __init__(self, recogniser: Recogniser, limits: Limits) -> None:
        self.recogniser, self.most_sources, self.most_batch = recogniser, limits.sessions, limits.batch
        self.metrics = Metrics()
        recogniser.session().runner.prepare(limits.sessions)  # a model that cannot stream is refused here
        self._rehearse()
        self._open: set[Live] = set()
        self._lock = threading.Lock()  # sources with hot words join in a thread of their own

    def _rehearse(self) -> None:
        """Hear a second of nothing: what is built once, as a search's kernels are, no client waits for."""
        live = self.recogniser.live()
        live.accept_waveform(np.zeros(live.sample_rate_hz, np.float32))
        while live.is_ready():
            live.decode()
        results([live])
        live.flush()

    def open(self, sample_rate_hz: int, endpoints: Endpoints, hot_words: HotWords | None = None) -> Live:
        """Let a source join.

        Raises:
            FullError: no place.
            AudioError: a rate that is no audio's.
            LexiconError: hot words that cannot be looked for.
        """
        self._check_place()
        live = self.recogniser.live(sample_rate_hz=sample_rate_hz, endpoints=endpoints, hot_words=hot_words)
        with self._lock:
            self._check_place()
            self._open.add(live)
            self.metrics.sessions.set(len(self._open))
        return live

    def _check_place(self) -> None:
        if len(self._open) >= self.most_sources:
            raise FullError(f"all {self.most_sources} sessions of this server are taken: try again later")

    def leave(self, live: Live) -> None:
        """Let a source go; twice does no harm."""
        with self._lock:
            self._open.discard(live)
            self.metrics.sessions.set(len(self._open))

    def refused(self, reason: str) -> None:
        """Count a refusal."""
        self.metrics.refused.labels(reason).inc()

    def counted(self) -> bytes:
        """All that is counted, as Prometheus reads it."""
        return self.metrics.told()

    def run(self, arrived: Callable[[bool], Sequence[Job | None]]) -> None:
        """Answer jobs until None arrives and none is left.

        Args:
            arrived: gives those that came since the last time; if True is given, it waits for one.
        """
        waiting: list[Job] = []
        ending = False
        while waiting or not ending:
            jobs = arrived(not waiting)
            ending = ending or None in jobs
            waiting += [job for job in jobs if job is not None and self._begun(job)]
            failures = _Failures()
            try:
                waiting = self._answered(waiting, failures)
                batch = [job.live for job in waiting[: self.most_batch]]
                if batch:
                    self.metrics.batch.observe(len(batch))
                    decode_sessions(batch, failures)
            except Exception as error:  # of no single source: whoever waits must know, the thread must live
                for job in waiting:
                    failures(job.live, error)
            waiting = failures.told_among(waiting)

    def _begun(self, job: Job) -> bool:
        try:
            if job.samples is None:
                job.live.input_finished()
            else:
                job.live.accept_waveform(job.samples)
                self.metrics.audio_s.inc(len(job.samples) / job.live.sample_rate_hz)
        except UserError as error:  # of this source alone: its client is told
            _tell([(job, error)])
            return False
        except Exception:
            log.exception("a source failed")
            _tell([(job, BrokenError())])
            return False
        return True

    def _answered(self, waiting: list[Job], failures: _Failures) -> list[Job]:
        """Answer those whose blocks are all heard; return the others."""
        done = {id(job.live): job for job in waiting if not job.live.is_ready()}
        if not done:
            return waiting
        finish_segments([job.live for job in done.values() if job.samples is None], failures)
        partial = results([job.live for job in done.values()], failures)
        answers = [
            (job, Heard(_taken(job.live), found.text))
            for job, found in zip(done.values(), partial, strict=True)
            if job.live not in failures
        ]
        for _, heard in answers:  # told first, a client could be gone before its words are in the log
            for segment in heard.final:
                transcripts.info("%s", segment.hypothesis.text)
                self.metrics.words.inc(len(segment.hypothesis.text.split()))
        _tell(answers)
        now_s = time.monotonic()
        for job, _ in answers:
            self.metrics.latency_s.observe(now_s - job.arrived_s)
        answered = {id(job) for job, _ in answers}
        return [job for job in waiting if id(job) not in answered]


class _Failures:
    """Sources that failed in a batch, each with its error."""

    def __init__(self) -> None:
        self._errors: dict[int, Exception] = {}

    def __call__(self, live: Live, error: Exception) -> None:
        """Take note of one."""
        self._errors.setdefault(id(live), error)

    def __contains__(self, live: Live) -> bool:
        return id(live) in self._errors

    def told_among(self, waiting: list[Job]) -> list[Job]:
        """Answer the jobs of sources that failed with their errors; return the others."""
        failed = [job for job in waiting if job.live in self]
        if not failed:
            return waiting
        first = self._errors[id(failed[0].live)]
        log.error("%d of %d sources failed in a batch", len(failed), len(waiting), exc_info=first)
        answers: list[tuple[Job, Heard | Exception]] = []
        for job in failed:
            job.live.blocks.clear()
            error = self._errors[id(job.live)]
            answers.append((job, error if isinstance(error, UserError) else BrokenError()))
        _tell(answers)
        return [job for job in waiting if job.live not in self]


def _taken(live: Live) -> list[Segment]:
    """What is final since the last time."""
    final = list(live.segments)
    live.segments.clear()
    return final


def _tell(answers: Answers) -> None:
    """Give each asker all of its own at once."""
    of_asker: defaultdict[int, list[tuple[Job, Heard | Exception]]] = defaultdict(list)
    for job, answer in answers:
        of_asker[id(job.asker)].append((job, answer))
    for own in of_asker.values():
        own[0][0].asker.settle(own)
