"""A source without end as segments: each is final when a speaker pauses, or when it is asked for."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from ds2.config.schema import ConfigError
from ds2.decoding.decoder import Decoder
from ds2.decoding.hypothesis import Hypothesis
from ds2.decoding.lexicon import HotWords
from ds2.recognition.parts import Parts
from ds2.recognition.stream import BLOCK_S, Session, ended, step

_ANY_PAUSE_S = 0.2  # ends a segment that is too long
_NO_PAUSE_S = 5.0  # past `longest_s` a segment ends amid speech


@dataclass(frozen=True)
class Endpoints:
    """When a segment ends, seconds; infinity never.

    `silence_s` of silence in which nothing was said, `after_speech_s` of silence after words, or a pause once it is
    `longest_s` long, and at last without one. Looked at after every block that the model hears.
    """

    silence_s: float = 2.4
    after_speech_s: float = 1.2
    longest_s: float = 20.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ConfigError(f"{field.name}={value} must be seconds above 0; inf turns the rule off")


NEVER = Endpoints(math.inf, math.inf, math.inf)


@dataclass(frozen=True)
class Segment:
    """What was said in a part of a source; its words' times count from the source's start."""

    start_s: float
    end_s: float
    hypothesis: Hypothesis


class Live(Session):
    """A session whose hypotheses become final segment by segment; `best` is that of the segment that is open.

    The model hears on through an endpoint and the decoder starts anew, its language model too. Where a segment ends
    does not depend on how the samples were cut.

    Args:
        parts, block_s, sample_rate_hz, decoder, hot_words: as `Session`.
        endpoints: the rules.

    Raises:
        ConfigError, AudioError, ValueError: as `Session`.
    """

    def __init__(
        self,
        parts: Parts,
        block_s: float = BLOCK_S,
        *,
        sample_rate_hz: int | None = None,
        decoder: Decoder | None = None,
        endpoints: Endpoints | None = None,
        hot_words: HotWords | None = None,
    ) -> None:
        super().__init__(parts, block_s, sample_rate_hz=sample_rate_hz, decoder=decoder, hot_words=hot_words)
        self.endpoints = endpoints or Endpoints()
        self.final: deque[Segment] = deque()  # for the user to take
        self._before_s = 0.0  # of the source, before the model began
        self._heard = self._first = self._silent = 0  # frames since then, of the segment's start, silent at the end
        self._spoken = False  # in this segment

    def notice(self, frames: int, quiet: int) -> bool:
        """Whether a rule says that the segment ends."""
        self._spoken = self._spoken or quiet < frames
        self._silent = quiet if quiet < frames else self._silent + quiet
        self._heard += frames
        frame_s, rules = self.parts.frame_s, self.endpoints
        pause_s, length_s = self._silent * frame_s, (self._heard - self._first) * frame_s
        too_long_s = length_s - rules.longest_s
        return (
            pause_s >= rules.silence_s
            or (too_long_s >= 0 and pause_s >= _ANY_PAUSE_S)
            or too_long_s >= _NO_PAUSE_S
            or (pause_s >= rules.after_speech_s and self._spoken)
        )

    def flush(self) -> None:
        """Make all that was accepted final now, to its last sample; what comes after it is heard as a new start."""
        self.drain()
        while self.ready():
            step([self])
        conclude([self])

    def restart(self) -> None:
        """Hear what comes next as a new start."""
        self._before_s, self._heard, self._first = self.duration_s, 0, 0
        self._begin()

    @property
    def duration_s(self) -> float:
        """Audio heard so far, seconds."""
        return self._before_s + super().duration_s

    def end(self, found: Hypothesis) -> None:
        """Make the open segment final."""
        frame_s = self.parts.frame_s
        start_s = self._before_s + self._first * frame_s
        if found.text:
            words = (replace(w, start_s=w.start_s + start_s, end_s=w.end_s + start_s) for w in found.words)
            end_s = self._before_s + self._heard * frame_s
            self.final.append(Segment(start_s, end_s, replace(found, words=tuple(words))))
        self.decoding = self.decoder.start(1, self.hot_words)
        self._first, self._silent, self._spoken = self._heard, 0, False


def conclude(lives: Sequence[Live]) -> None:
    """Make the open segments of sources final that were drained and have heard all, in one batch; they may go on."""
    for live, found in zip(lives, ended(lives), strict=True):
        live.end(found)
        live.restart()
