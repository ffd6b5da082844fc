"""Batch Dispatch: what has arrived from any source when the device becomes free is the next batch.

Amodei et al. 2016, "Deep Speech 2", section 7. One thread owns the recogniser; sources wait for what it finds in their
chunks before they take more from their clients, so a client that sends faster than it is heard is slowed down.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds2.decoding.lexicon import HotWords
from ds2.recognition.live import Endpoints, Live, Segment, conclude
from ds2.recognition.recogniser import Recogniser
from ds2.recognition.stream import best, step
from ds2.serve.metrics import Metrics
from ds2.system.errors import UserError

log = logging.getLogger(__name__)
transcripts = logging.getLogger("ds2.serve.transcripts")
transcripts.setLevel(logging.WARNING)  # INFO, which who runs a server must ask for, logs what is said


class FullError(UserError):
    """As many sessions are open as the server takes."""


@dataclass(frozen=True)
class Heard:
    """What a chunk gave."""

    final: list[Segment]
    partial: str  # of the segment that is open


@dataclass
class Job:
    """Something that a source waits for."""

    source: Source
    act: Callable[[], None]  # in the recogniser's thread, before the next batch
    concludes: bool  # once all its blocks are heard
    done: asyncio.Future[Heard]
    loop: asyncio.AbstractEventLoop
    arrived_s: float = field(default_factory=time.monotonic)


def _tell(answers: Sequence[tuple[Job, Heard | Exception]]) -> None:
    """Wake who waits, unless nobody does any more; a loop is woken once for all of its own."""
    of_loop: defaultdict[asyncio.AbstractEventLoop, list[tuple[Job, Heard | Exception]]] = defaultdict(list)
    for job, answer in answers:
        of_loop[job.loop].append((job, answer))
    for loop, own in of_loop.items():
        try:
            loop.call_soon_threadsafe(_settle, own)
        except RuntimeError:  # the loop has ended, and with it who waited
            log.debug("an answer came after its loop had ended")


def _settle(answers: Sequence[tuple[Job, Heard | Exception]]) -> None:
    for job, answer in answers:
        if job.done.done():
            continue
        if isinstance(answer, Exception):
            job.done.set_exception(answer)
        else:
            job.done.set_result(answer)


class Source:
    """One client's audio on its way; `Batcher.open` makes it."""

    def __init__(self, batcher: Batcher, live: Live) -> None:
        self._batcher, self._live = batcher, live
        self.accepted_s = 0.0  # audio taken so far

    async def accept(self, samples: NDArray[np.float32]) -> Heard:
        """Have the next samples (N,) in [-1, 1] heard.

        Raises:
            AudioError: NaN or infinite samples; the source goes on without them.
            DecodeError: the model gives NaN or infinity.
        """
        self.accepted_s += len(samples) / self._live.sample_rate_hz
        self._batcher.metrics.audio_s.inc(len(samples) / self._live.sample_rate_hz)
        return await self._batcher.ask(self, lambda: self._live.accept(samples))

    async def flush(self) -> Heard:
        """Make all that was accepted final, to the last sample; the source may go on."""
        return await self._batcher.ask(self, self._live.drain, concludes=True)

    def close(self) -> None:
        """Leave; twice does no harm."""
        self._batcher.leave(self)

    @property
    def ready(self) -> bool:
        """Whether blocks wait for the model."""
        return self._live.ready()

    @property
    def live(self) -> Live:
        """The session, which belongs to the recogniser's thread."""
        return self._live

    def take(self) -> list[Segment]:
        """What is final since the last time."""
        final = list(self._live.final)
        self._live.final.clear()
        return final


class Batcher:
    """A recogniser in a thread of its own, and the sources it hears.

    Args:
        recogniser: with a unidirectional model.
        most_sources: open at once.
        metrics: what is counted.
    """

    def __init__(self, recogniser: Recogniser, most_sources: int, metrics: Metrics) -> None:
        self.recogniser, self.most_sources, self.metrics = recogniser, most_sources, metrics
        recogniser.session().hearing.prepare(most_sources)  # a model that cannot stream is refused here
        self._rehearse()
        self._open: set[Source] = set()
        self._ending = False
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="recogniser", daemon=True)
        self._thread.start()

    def _rehearse(self) -> None:
        """Hear a second of nothing: what is built once, as a search's kernels are, no client waits for."""
        live = self.recogniser.live()
        live.accept(np.zeros(live.sample_rate_hz, np.float32))
        while live.ready():
            step([live])
        best([live])
        live.flush()

    def open(self, sample_rate_hz: int, endpoints: Endpoints, hot_words: HotWords | None = None) -> Source:
        """Let a source join.

        Raises:
            FullError: no place, or the server is ending.
            AudioError: a rate that is no audio's.
            LexiconError: hot words that cannot be looked for.
        """
        if self._ending:
            raise FullError("this server is ending: try again later")
        if len(self._open) >= self.most_sources:
            raise FullError(f"all {self.most_sources} sessions of this server are taken: try again later")
        live = self.recogniser.live(sample_rate_hz=sample_rate_hz, endpoints=endpoints, hot_words=hot_words)
        source = Source(self, live)
        self._open.add(source)
        self.metrics.sessions.set(len(self._open))
        return source

    def leave(self, source: Source) -> None:
        """Let a source go."""
        self._open.discard(source)
        self.metrics.sessions.set(len(self._open))

    async def ask(self, source: Source, act: Callable[[], None], *, concludes: bool = False) -> Heard:
        """Do something with a source in the recogniser's thread, and wait until all its blocks are heard.

        Args:
            source: with nothing else to wait for.
            act: what gives it blocks.
            concludes: whether all that was heard becomes final then.
        """
        loop = asyncio.get_running_loop()
        job = Job(source, act, concludes, loop.create_future(), loop)
        self._jobs.put(job)
        heard = await job.done
        self.metrics.latency_s.observe(time.monotonic() - job.arrived_s)
        for segment in heard.final:
            transcripts.info("%s", segment.hypothesis.text)
        self.metrics.words.inc(sum(len(segment.hypothesis.text.split()) for segment in heard.final))
        return heard

    @property
    def ending(self) -> bool:
        """Whether sources shall come to their end."""
        return self._ending

    def end(self) -> None:
        """Let no source join any more; those that are open may go on to their end."""
        self._ending = True

    def close(self) -> None:
        """End the thread when it has answered what was asked."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        waiting: list[Job] = []
        ending = False
        while waiting or not ending:
            arrived = self._arrived(block=not waiting)
            ending = ending or None in arrived
            waiting += [job for job in arrived if job is not None and self._begun(job)]
            try:
                waiting = self._answered(waiting)
                batch = [job.source.live for job in waiting]
                if batch:
                    self.metrics.batch.observe(len(batch))
                    step(batch)
            except Exception as error:  # of the model: whoever was in the batch must know, the thread must live
                log.exception("a batch of %d failed", len(waiting))
                _tell([(job, error) for job in waiting])
                waiting = []

    def _arrived(self, *, block: bool) -> list[Job | None]:
        found: list[Any] = [self._jobs.get()] if block else []
        while not self._jobs.empty():
            found.append(self._jobs.get())
        return found

    def _begun(self, job: Job) -> bool:
        try:
            job.act()
        except Exception as error:  # of this source alone: its client is told
            _tell([(job, error)])
            return False
        return True

    def _answered(self, waiting: list[Job]) -> list[Job]:
        """Answer those whose blocks are all heard; return the others."""
        done = [job for job in waiting if not job.source.ready]
        conclude([job.source.live for job in done if job.concludes])
        partial = best([job.source.live for job in done])
        _tell([(job, Heard(job.source.take(), found.text)) for job, found in zip(done, partial, strict=True)])
        return [job for job in waiting if job.source.ready]
