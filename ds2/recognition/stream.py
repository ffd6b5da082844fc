"""one source, chunk by chunk"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ds2.audio.read import audio_blocks
from ds2.model.acoustic import AcousticModel
from ds2.model.checkpoint import LoadedModel


class _FeatureReader:
    """Features of a file block by block: every frame of the whole file, once; `samples` were read so far."""

    def __init__(self, loaded: LoadedModel, path: Path, device: torch.device, block_frames: int) -> None:
        self.features, self.path, self.device, self.block_frames = loaded.features, path, device, block_frames
        self.samples = 0

    def blocks(self) -> Iterator[Tensor]:
        """Yield (1, F, T) float32 on the device: `block_frames` frames each, fewer in the last."""
        features = self.features
        enough = (self.block_frames - 1) * features.step_samples + features.window_samples
        held = np.empty(0, np.float32)
        for audio in audio_blocks(self.path, features.sample_rate_hz):
            self.samples += len(audio)
            held = np.concatenate([held, audio])
            while len(held) >= enough:
                yield self._frames(held[:enough])
                held = held[self.block_frames * features.step_samples :]
        if features.frames(len(held)):
            yield self._frames(held)

    def _frames(self, samples: np.ndarray) -> Tensor:
        waveforms = torch.from_numpy(samples)[None].to(self.device)
        found: Tensor = self.features(waveforms, torch.tensor([len(samples)]))[0]
        return found


def _streamed(model: AcousticModel, blocks: Iterator[Tensor]) -> Iterator[Tensor]:
    state = None
    for block in blocks:
        state = model.start() if state is None else state
        yield model.step(block, state)
    if state is not None:
        yield model.finish(state)


def _windowed(model: AcousticModel, blocks: Iterator[Tensor], context_frames: int) -> Iterator[Tensor]:
    """Logits (T', 1, V) of each block, computed with its context; all starts are multiples of the model's stride."""
    block = next(blocks, None)
    before = None if block is None else block[:, :, :0]
    while block is not None and before is not None:
        following = next(blocks, None)
        after = block[:, :, :0] if following is None else following[:, :, :context_frames]
        window = torch.cat([before, block, after], dim=2)
        logits, _ = model(window, torch.tensor([window.shape[2]]))
        first = model.output_frames(before.shape[2])
        yield logits[first : first + model.output_frames(block.shape[2])]
        before = block[:, :, block.shape[2] - context_frames :]
        block = following
