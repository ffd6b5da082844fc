"""Samples of any rate in, those of blocks of feature frames out: all of the recording's, block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import soxr
from numpy.typing import NDArray

from ds2.audio.features import Features
from ds2.audio.read import RATES_HZ, AudioError


class Resampler:
    """Samples of one source at another rate, as they come: however they are cut, those of the whole.

    Raises:
        AudioError: a rate that is no audio's.
    """

    def __init__(self, from_hz: int, to_hz: int) -> None:
        low, high = RATES_HZ
        if not low <= from_hz <= high:
            raise AudioError(f"samples at {from_hz} Hz: allowed are {low} to {high} Hz")
        self._stream = None if from_hz == to_hz else soxr.ResampleStream(from_hz, to_hz, 1, dtype="float32")

    def accept(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """Take the next samples (N,); return those that are known by now, in [-1, 1].

        Raises:
            AudioError: NaN or infinite samples.
        """
        low, high = (samples.min(), samples.max()) if len(samples) else (0.0, 0.0)
        if not (-np.inf < low and high < np.inf):  # of NaN too
            raise AudioError("samples hold NaN or infinity: send finite floats in [-1, 1]")
        samples = np.asarray(samples, np.float32)
        if self._stream is None and low >= -1.0 and high <= 1.0:
            return samples
        return self._next(samples, last=False)

    def finish(self) -> NDArray[np.float32]:
        """Return the samples (N,) float32 in [-1, 1] that were held back."""
        return self._next(np.empty(0, np.float32), last=True)

    def _next(self, samples: NDArray[np.float32], *, last: bool) -> NDArray[np.float32]:
        found = samples if self._stream is None else self._stream.resample_chunk(samples, last=last)
        clipped: NDArray[np.float32] = np.clip(found, -1.0, 1.0)
        return clipped


class Pcm16:
    """Samples from bytes of headerless 16-bit little-endian mono audio, wherever the bytes were cut."""

    def __init__(self) -> None:
        self._left = b""

    def accept(self, data: bytes) -> NDArray[np.float32]:
        """Take the next bytes; return the samples (N,) in [-1, 1] that are whole."""
        data = self._left + data
        self._left = data[len(data) // 2 * 2 :]
        samples: NDArray[np.float32] = np.frombuffer(data, "<i2", len(data) // 2).astype(np.float32) / np.float32(32768)
        return samples


class SampleBlocks:
    """Samples of one source, that come piece by piece, as those of blocks of feature frames; every frame once.

    Args:
        features: which frames samples make.
        block_frames: frames T of every block but the last.
        room: where the samples of a block by its number are to lie, (N,); anywhere if it is not given.
    """

    def __init__(
        self, features: Features, block_frames: int, room: Callable[[int], NDArray[np.float32]] | None = None
    ) -> None:
        self.features, self.block_frames = features, block_frames
        self.samples = 0  # heard so far
        self._lead_samples = features.lead_samples  # that the first window still lacks
        self._enough = features.span(block_frames)
        self._step = block_frames * features.step_samples  # from a block's start to the next one's
        self._room = room or self._anywhere
        self._block, self._count, self._number = np.empty(0, np.float32), 0, -1  # what is held, of which block

    def _anywhere(self, number: int) -> NDArray[np.float32]:
        return np.empty(self._enough, np.float32)

    def accept(self, samples: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
        """Take the next samples (N,) of the features' rate in [-1, 1]; yield those of the windows they complete."""
        self.samples += len(samples)
        if self._lead_samples:
            samples = self._block = np.concatenate([self._block, samples])
            if len(samples) < self._lead_samples:
                return
            samples = np.concatenate([samples[: self._lead_samples][::-1], samples])
            self._lead_samples = 0
        if self._number < 0:
            self._block, self._number = self._room(0), 0
        while len(samples):
            if self._count < 0:  # between windows that do not meet
                skipped = min(-self._count, len(samples))
                self._count, samples = self._count + skipped, samples[skipped:]
                continue
            block, here = self._block, samples[: self._enough - self._count]
            block[self._count : self._count + len(here)] = here
            self._count, samples = self._count + len(here), samples[len(here) :]
            if self._count == self._enough:
                self._number += 1
                self._block, self._count = self._room(self._number), self._enough - self._step
                self._block[: max(0, self._count)] = block[self._step :]
                yield block

    def finish(self) -> NDArray[np.float32]:
        """Return the samples (N,) float32 that are left; they may be too few for a frame."""
        rest = self._block[: max(0, self._count)].copy()
        self._count = 0
        return rest
