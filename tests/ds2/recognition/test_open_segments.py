"""Open segments of a batch are those of sources that are followed one by one, to the bit."""

from __future__ import annotations

import math
import random
from collections import deque

import numpy as np
import pytest

from ds2.recognition import open_segments
from ds2.recognition.open_segments import OVERTIME_S, PAUSE_S, OpenSegments

FRAME_S = 0.02


class Followed:
    """One source: the rules of `Endpoints`, frame by frame."""

    def __init__(self) -> None:
        self.levels = deque[float]()
        self.frames = self.first_level = 0
        self.start_segment()

    def start_segment(self) -> None:
        self.start, self.quiet, self.energy, self.words, self.pause_level = self.frames, 0, 0.0, 0, math.inf
        self.speech_start = -1

    def update(self, frames: int, quiet_before: int, quiet: int, rules: tuple[float, float, float]) -> bool:
        if self.speech_start < 0 and quiet < frames:
            self.speech_start = self.frames + quiet_before
        self.quiet = quiet if quiet < frames else self.quiet + quiet
        before, self.frames = self.frames, self.frames + frames
        taken = list[float]()
        while self.levels and self.first_level < self.frames:
            taken.append(self.levels.popleft())
            if quiet_before <= self.first_level - before < frames - quiet:
                self.energy, self.words = self.energy + taken[-1], self.words + 1
            self.first_level += 1
        if quiet < frames:
            self.pause_level = math.inf
        elif taken:
            self.pause_level = min(self.pause_level, _sum(taken) / len(taken))
        pause_s, excess_s = self.quiet * FRAME_S, (self.frames - self.start) * FRAME_S - rules[2]
        return (
            pause_s >= rules[0]
            or (excess_s >= 0 and pause_s >= PAUSE_S)
            or excess_s >= OVERTIME_S
            or (self.speech_start >= 0 and pause_s + self.ahead_s(pause_s) >= rules[1])
        )

    def ahead_s(self, pause_s: float) -> float:
        if pause_s < PAUSE_S or not self.levels or not self.words:
            return 0.0
        words, ahead_s = self.energy / self.words, len(self.levels) * FRAME_S
        if max(self.levels) <= 0.01 * words:
            return ahead_s
        loud = max(0.3 * words, 10.0 * self.pause_level)
        return -ahead_s if sum(level > loud for level in self.levels) * FRAME_S >= 0.1 else 0.0


def _sum(values: list[float]) -> float:
    """From left to right; the built-in function corrects its rounding since Python 3.12."""
    total = 0.0
    for value in values:
        total += value
    return total


@pytest.mark.parametrize("seed", range(3))
def test_a_batch_has_the_segments_of_its_sources(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_segments, "_FIRST_SIZE", 2)
    draw, table = random.Random(seed), OpenSegments()
    sources = [Followed() for _ in range(9)]
    rows = [table.take() for _ in sources]
    rules = [(draw.choice((0.6, 2.4)), draw.choice((0.3, 0.8)), draw.choice((1.0, 20.0))) for _ in sources]
    ends = 0
    for _ in range(300):
        batch = draw.sample(range(len(sources)), draw.randint(1, len(sources)))
        where = np.array([rows[n] for n in batch])
        levels = [
            [float(np.float32(draw.choice((1e-5, 1e-3, 0.1)) * draw.random())) for _ in range(draw.randint(0, 12))]
            for _ in batch
        ]
        for n, own in zip(batch, levels, strict=True):
            sources[n].levels.extend(own)
        flat = np.array([level for own in levels for level in own], np.float32)
        table.add_levels(where, np.array([len(own) for own in levels]), flat)
        frames = [draw.randint(1, 10) for _ in batch]
        quiet = [draw.choice((draw.randrange(count), count)) for count in frames]
        before = [
            count if all_ == count else draw.randrange(count - all_) for count, all_ in zip(frames, quiet, strict=True)
        ]
        wanted = [sources[n].update(*counts, rules[n]) for n, *counts in zip(batch, frames, before, quiet, strict=True)]
        columns = (np.array(column) for column in (frames, before, quiet))
        ends_after = table.update(where, *columns, np.array([rules[n] for n in batch]), FRAME_S)
        assert ends_after.tolist() == wanted
        for n, row in zip(batch, where, strict=True):
            source, own = sources[n], table.rows[row]
            assert (own["speech_energy"], own["speech_frames"]) == (source.energy, source.words)
            assert (own["pause_level"], own["levels"]) == (source.pause_level, len(source.levels))
        for n, end in zip(batch, wanted, strict=True):
            if end:
                ends += 1
                sources[n].start_segment()
                table.start_segment(rows[n])
    assert ends > 50


def test_a_row_that_is_free_starts_anew() -> None:
    table = OpenSegments()
    first, second = table.take(), table.take()
    one = np.array([1])
    table.update(np.array([first]), 9 * one, 3 * one, 0 * one, np.full((1, 3), math.inf), FRAME_S)
    assert table.rows["speech_start"][[first, second]].tolist() == [3, -1]
    table.free.append(first)
    assert table.take() == first
    assert table.rows["speech_start"][first] == -1 and table.rows["frames"][first] == 0
