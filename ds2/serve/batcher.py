"""What protocols ask: sources that are heard in the batches of all, by a recogniser in this process or in another."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds2.decoding.lexicon import HotWords
from ds2.recognition.recogniser import Recogniser
from ds2.recognition.session import Endpoints, Live
from ds2.serve.dispatch import Answers, Dispatch, Heard, Job
from ds2.serve.limits import FullError, Limits
from ds2.serve.phrases import PhraseReader

log = logging.getLogger(__name__)


class Batcher(ABC):
    """Where sources are heard.

    Args:
        phrases: reads hot words.
        sample_rate_hz: of the model.
    """

    def __init__(self, phrases: PhraseReader, sample_rate_hz: int) -> None:
        self.phrases, self.sample_rate_hz = phrases, sample_rate_hz
        self.ending = False

    def end(self) -> None:
        """Let no source join any more; those that are open may go on to their end."""
        self.ending = True

    async def open(self, sample_rate_hz: int, endpoints: Endpoints, hot_words: HotWords | None = None) -> Source:
        """Let a source join.

        Raises:
            FullError: no place, or the server is ending; where the recogniser is in another process, this and the
                following are raised by the first that is asked of the source.
            AudioError: a rate that is no audio's.
            LexiconError: hot words that cannot be looked for.
        """
        if self.ending:
            raise FullError("this server is ending: try again later")
        joining = asyncio.ensure_future(self._join(sample_rate_hz, endpoints, hot_words))
        try:
            return Source(self, await asyncio.shield(joining), sample_rate_hz)
        except asyncio.CancelledError:
            joining.add_done_callback(self._leave_again)
            raise

    def _leave_again(self, joining: asyncio.Future[Any]) -> None:
        """Let a source go whose client went while it joined."""
        if not joining.cancelled() and joining.exception() is None:
            self.leave(joining.result())

    @abstractmethod
    async def _join(self, sample_rate_hz: int, endpoints: Endpoints, hot_words: HotWords | None) -> Any:
        """As `open`: what the source is called here."""

    @abstractmethod
    def hear(self, called: Any, samples: NDArray[np.float32] | None) -> asyncio.Future[Heard]:
        """As `Source.accept` of samples (N,); None as `Source.flush`."""

    @abstractmethod
    def leave(self, called: Any) -> None:
        """Let a source go; twice does no harm."""

    @abstractmethod
    def refused(self, reason: str) -> None:
        """Count a refusal."""

    @abstractmethod
    async def counted(self) -> bytes:
        """All that is counted, as Prometheus reads it."""

    async def begin(self) -> None:
        """Begin, in the loop that will ask."""
        return

    @abstractmethod
    def close(self) -> None:
        """End, once all that was asked is answered."""


class Source:
    """One client's audio on its way; `Batcher.open` makes it."""

    def __init__(self, batcher: Batcher, called: Any, sample_rate_hz: int) -> None:
        self._batcher, self._called, self._sample_rate_hz = batcher, called, sample_rate_hz
        self.accepted_s = 0.0  # audio taken so far
        self._missed: list[asyncio.Future[Heard]] = []  # for which whoever asked did not wait

    async def accept(self, samples: NDArray[np.float32]) -> Heard:
        """Have the next samples (N,) in [-1, 1] heard.

        Raises:
            AudioError: NaN or infinite samples; the source goes on without them.
            DecodeError: the model gives NaN or infinity.
        """
        self.accepted_s += len(samples) / self._sample_rate_hz
        return await self._hear(samples)

    async def flush(self) -> Heard:
        """Make all that was accepted final, to the last sample; the source may go on.

        What became final in a chunk for which nobody waited to the end is told here.
        """
        missed, self._missed = self._missed, []
        before = [segment for done in missed for segment in (await done).final]  # first: a batch has each source once
        heard = await self._hear(None)
        return replace(heard, final=before + heard.final)

    async def _hear(self, samples: NDArray[np.float32] | None) -> Heard:
        done = self._batcher.hear(self._called, samples)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            self._missed.append(done)
            raise

    def close(self) -> None:
        """Leave; twice does no harm."""
        self._batcher.leave(self._called)


class Here(Batcher):
    """A recogniser in a thread of this process.

    Args:
        recogniser: with a unidirectional model.
        limits: as of `Dispatch`.

    Raises:
        ConfigError: a bidirectional model.
    """

    def __init__(self, recogniser: Recogniser, limits: Limits) -> None:
        phrases = PhraseReader(recogniser.alphabet, recogniser.decoder.hot_characters)
        super().__init__(phrases, recogniser.features.sample_rate_hz)
        self.dispatch = Dispatch(recogniser, limits)
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._asker: _Loop | None = None
        self._thread = threading.Thread(target=self.dispatch.run, args=[self._arrived], name="recogniser", daemon=True)
        self._thread.start()

    async def _join(self, sample_rate_hz: int, endpoints: Endpoints, hot_words: HotWords | None) -> Live:
        if not hot_words:
            return self.dispatch.open(sample_rate_hz, endpoints)
        return await self.phrases.run(self.dispatch.open, sample_rate_hz, endpoints, hot_words)

    def hear(self, called: Live, samples: NDArray[np.float32] | None) -> asyncio.Future[Heard]:
        """See `Batcher`."""
        loop = asyncio.get_running_loop()
        if self._asker is None or self._asker.loop is not loop:
            self._asker = _Loop(loop)
        done: asyncio.Future[Heard] = loop.create_future()
        self._jobs.put(Job(called, samples, self._asker, done))
        return done

    def leave(self, called: Live) -> None:
        """See `Batcher`."""
        self.dispatch.leave(called)

    def refused(self, reason: str) -> None:
        """See `Batcher`."""
        self.dispatch.refused(reason)

    async def counted(self) -> bytes:
        """See `Batcher`."""
        return self.dispatch.counted()

    def close(self) -> None:
        """See `Batcher`."""
        self._jobs.put(None)
        self._thread.join()

    def _arrived(self, block: bool) -> list[Job | None]:
        found: list[Job | None] = [self._jobs.get()] if block else []
        while not self._jobs.empty():
            found.append(self._jobs.get())
        return found


class _Loop:
    """Who waits in an event loop, which is woken once for all of its own."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop

    def settle(self, answers: Answers) -> None:
        """See `Asker`."""
        try:
            self.loop.call_soon_threadsafe(settle, [(job.called, answer) for job, answer in answers])
        except RuntimeError:  # the loop has ended, and with it who waited
            log.debug("an answer came after its loop had ended")


def settle(answers: Sequence[tuple[asyncio.Future[Any], Any]]) -> None:
    """Wake who waits, unless nobody does any more."""
    for done, answer in answers:
        if done.done():
            continue
        if isinstance(answer, Exception):
            done.set_exception(answer)
        else:
            done.set_result(answer)
