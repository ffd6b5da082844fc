"""Samples in, feature frames out: the frames of the whole recording, block by block."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds2.audio.features import Features


class FeatureStream:
    """Blocks of features of one source whose samples come piece by piece; every frame of the whole, once.

    Args:
        features: on `device`.
        device: where the blocks are made.
        block_frames: frames T of every block but the last.
    """

    def __init__(self, features: Features, device: torch.device, block_frames: int) -> None:
        self.features, self.device, self.block_frames = features, device, block_frames
        self.samples = 0  # heard so far
        self._held = np.empty(0, np.float32)
        self._enough = (block_frames - 1) * features.step_samples + features.window_samples

    def accept(self, samples: NDArray[np.float32]) -> Iterator[Tensor]:
        """Take the next samples (N,) of the features' rate in [-1, 1]; yield the blocks (1, F, T) they complete."""
        self.samples += len(samples)
        self._held = np.concatenate([self._held, samples])
        while len(self._held) >= self._enough:
            yield self._frames(self._held[: self._enough])
            self._held = self._held[self.block_frames * self.features.step_samples :]

    def finish(self) -> Iterator[Tensor]:
        """Yield what is left, where that is a frame or more."""
        if self.features.frames(len(self._held)):
            yield self._frames(self._held)
        self._held = self._held[:0]

    def _frames(self, samples: NDArray[np.float32]) -> Tensor:
        waveforms = torch.from_numpy(samples)[None].to(self.device)
        found: Tensor = self.features(waveforms, torch.tensor([len(samples)]))[0]
        return found
