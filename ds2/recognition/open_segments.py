"""Segments of live sessions, the rules that end them, and the open ones, a row of a table each.

Those of a batch are updated at once.

Shapes: B sessions in a batch, N rows, A output frames whose audio is there and whose logits are not, W the most of a
session in the batch.
"""

import math
import threading
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from ds2.config.schema import ConfigError
from ds2.decoding.hypothesis import Hypothesis

PAUSE_S = 0.2  # a pause of the logits that ends a segment which is too long; after it silent audio counts too
OVERTIME_S = 5.0  # a segment that exceeds `Endpoints.longest_s` by this ends without a pause
_SILENT = 0.01  # mean square of silence, relative to that of the words before it: 20 dB less
_LOUD = 0.3  # mean square of speech after a pause, relative to that of the words before it: at least
_LOUDER = 10.0  # and relative to that of the pause
_RESUMED_S = 0.1  # so much loud audio is speech and no click
_FIRST_SIZE = 64  # N and A; doubled when they do not suffice
_ROW = np.dtype(
    [
        ("frames", np.int64),  # output frames since the model's state was last reset
        ("start", np.int64),  # the first of the segment
        ("speech_start", np.int64),  # the first of the segment that is not quiet; -1 before it
        ("quiet", np.int64),  # quiet ones at the end
        ("speech_energy", np.float64),  # sum of levels over the words of the segment
        ("speech_frames", np.int64),  # their frames
        ("pause_level", np.float64),  # the lowest mean level of an update since the last word; infinity: none yet
        ("first_level", np.int64),  # the first frame whose level waits for its logits
        ("levels", np.int64),  # how many wait
    ]
)


@dataclass(frozen=True)
class Endpoints:
    """Rules that end a segment, in seconds; infinity turns a rule off.

    A segment ends after `silence_s` of silence without words, after `after_speech_s` of silence after words, and at
    the next pause once it is `longest_s` long, or 5 s later without a pause. Rules are applied after every block.

    The logits decide what is silence. After words, audio whose logits still wait for their lookahead counts too if all
    of it is 20 dB below the words. In noise a segment therefore ends later, by the lookahead. If the speaker seems to
    go on in that audio, the segment does not end unless the logits stay silent there.
    """

    silence_s: float = 2.4
    after_speech_s: float = 0.8
    longest_s: float = 20.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ConfigError(f"{field.name}={value} must be seconds above 0; inf turns the rule off")


NEVER = Endpoints(math.inf, math.inf, math.inf)


@dataclass(frozen=True)
class Segment:
    """A part of a source with its final hypothesis; word times count from the source's start."""

    start_s: float
    end_s: float
    hypothesis: Hypothesis


class OpenSegments:
    """A table of open segments. One thread updates it; others may take rows."""

    def __init__(self) -> None:
        self.free = list[int]()  # rows that nobody has; whoever took a row gives it back here
        self._used, self._lock = 0, threading.Lock()
        self.rows = np.zeros(_FIRST_SIZE, _ROW)  # (N,); only methods write them
        self._levels = np.zeros((_FIRST_SIZE, _FIRST_SIZE))  # (N, A) mean squares of samples; frame f is at f modulo A

    def take(self) -> int:
        """Return a row of its own for a source that begins."""
        with self._lock:
            row = self.free.pop() if self.free else self._used
            self._used = max(self._used, row + 1)
            self._grow(row + 1, 0)
        self.restart(row)
        return row

    def restart(self, row: int) -> None:
        """Forget the source so far; the model's state was reset."""
        with self._lock:
            self.rows[row] = (0, 0, -1, 0, 0.0, 0, math.inf, 0, 0)

    def start_segment(self, row: int) -> None:
        """Begin the next segment of a source."""
        with self._lock:
            before = self.rows[row]
            frames, first_level, levels = (before[name] for name in ("frames", "first_level", "levels"))
            self.rows[row] = (frames, frames, -1, 0, 0.0, 0, math.inf, first_level, levels)

    def add_levels(self, rows: NDArray[np.int64], counts: NDArray[np.int64], levels: NDArray[np.float32]) -> None:
        """Add the levels of the next output frames of sources, whose logits come later.

        Args:
            rows: (B,) of the table, all different.
            counts: (B,) frames of each.
            levels: (sum of counts,) mean squares of the frames' samples, source by source.
        """
        with self._lock:
            waiting = self.rows["levels"][rows]
            self._grow(0, int((waiting + counts).max()))
            next_frame = self.rows["first_level"][rows] + waiting
            numbers = np.arange(len(levels)) + np.repeat(next_frame - counts.cumsum() + counts, counts)
            self._levels[np.repeat(rows, counts), numbers % self._levels.shape[1]] = levels
            self.rows["levels"][rows] = waiting + counts

    def update(
        self,
        rows: NDArray[np.int64],
        frames: NDArray[np.int64],
        quiet_before: NDArray[np.int64],
        quiet: NDArray[np.int64],
        rules: NDArray[np.float64],
        frame_s: float,
    ) -> NDArray[np.bool_]:
        """Count the output frames whose logits have come; return (B,) whether the segment ends after them.

        Args:
            rows: (B,) of the table, all different.
            frames: (B,) of each source.
            quiet_before, quiet: (B,) how many of them are quiet at their start and at their end.
            rules: (B, 3) `Endpoints`.
            frame_s: seconds of an output frame.
        """
        with self._lock:
            r, speaks = self.rows[rows], quiet < frames
            at = np.arange(r["levels"].max())
            numbers = r["first_level"][:, None] + at  # of the frames whose levels wait
            levels = self._levels[rows[:, None], numbers % self._levels.shape[1]]
            waiting, numbers = at < r["levels"][:, None], numbers - r["frames"][:, None]
            np.copyto(r["speech_start"], r["frames"] + quiet_before, where=speaks & (r["speech_start"] < 0))
            r["quiet"] = quiet + r["quiet"] * ~speaks
            taken = waiting & (numbers < frames[:, None])
            in_words = taken & (numbers >= quiet_before[:, None]) & (numbers < (frames - quiet)[:, None])
            _take_levels(r, levels, taken, in_words)
            r["pause_level"][speaks] = math.inf
            r["frames"] += frames
            self.rows[rows] = r
        silence_s, after_speech_s, longest_s = rules.T
        pause_s, excess_s = r["quiet"] * frame_s, (r["frames"] - r["start"]) * frame_s - longest_s
        ahead_s = _pause_ahead_s(r, levels, waiting ^ taken, pause_s, frame_s)
        after_words = (r["speech_start"] >= 0) & (pause_s + ahead_s >= after_speech_s)
        too_long = ((excess_s >= 0) & (pause_s >= PAUSE_S)) | (excess_s >= OVERTIME_S)
        ends: NDArray[np.bool_] = (pause_s >= silence_s) | too_long | after_words
        return ends

    def _grow(self, rows: int, columns: int) -> None:
        n, a = self._levels.shape
        while n < rows:
            n *= 2
        while a < columns:
            a *= 2
        if (n, a) != self._levels.shape:
            before, self._levels = self._levels, np.zeros((n, a))
            row, numbers = np.indices(before.shape, sparse=True)
            numbers = numbers + self.rows["first_level"][:, None]
            self._levels[row, numbers % a] = before[row, numbers % before.shape[1]]
            self.rows = np.concatenate([self.rows, np.zeros(n - len(self.rows), _ROW)])


def _take_levels(
    r: NDArray[np.void], levels: NDArray[np.float64], taken: NDArray[np.bool_], in_words: NDArray[np.bool_]
) -> None:
    """Take levels (B, W) from those that wait: sum those in words, and note the mean where it is the lowest so far."""
    sums = np.zeros((2, len(r), levels.shape[1] + 1))
    sums[1, :, 0] = r["speech_energy"]
    for each, valid in zip(sums, (taken, in_words), strict=True):
        np.copyto(each[:, 1:], levels, where=valid)
    total, r["speech_energy"] = sums.cumsum(2)[:, :, -1]  # one after the other: no sum depends on the batch
    counts = taken.sum(1)
    np.minimum(r["pause_level"], total / np.maximum(counts, 1), out=r["pause_level"], where=counts > 0)
    r["speech_frames"] += in_words.sum(1)
    r["first_level"] += counts
    r["levels"] -= counts


def _pause_ahead_s(
    r: NDArray[np.void],
    levels: NDArray[np.float64],
    ahead: NDArray[np.bool_],
    pause_s: NDArray[np.float64],
    frame_s: float,
) -> NDArray[np.float64]:
    """Return (B,) what the audio after the last output frame adds to pauses, seconds.

    All of it if it is silent, minus all of it if there is speech in it, else 0.

    Args:
        levels, ahead: (B, W), and which of them are of that audio.
    """
    ahead_s = r["levels"] * frame_s * ((pause_s >= PAUSE_S) & (r["speech_frames"] > 0))
    if not ahead_s.any():
        return ahead_s
    words = r["speech_energy"] / np.maximum(r["speech_frames"], 1)
    loud = np.maximum(_LOUD * words, _LOUDER * r["pause_level"])
    silent = ~(ahead & (levels > _SILENT * words[:, None])).any(1)
    resumed = (ahead & (levels > loud[:, None])).sum(1) * frame_s >= _RESUMED_S
    return np.where(silent, ahead_s, np.where(resumed, -ahead_s, 0.0))
