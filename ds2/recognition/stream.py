"""A source that is heard chunk by chunk: what live audio and files of any length have in common."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds2.audio.stream import FeatureStream
from ds2.decoding.hypothesis import Hypothesis
from ds2.model.acoustic import AcousticModel
from ds2.model.stream_state import join, split
from ds2.recognition.parts import Parts

BLOCK_S = 0.2  # audio that the model hears at once: what a result is late beside the model's lookahead


class Session:
    """One source on its way through a recogniser; any number of them share batches by `step`.

    The model hears blocks of a fixed length, so its logits do not depend on how the samples were cut.

    Args:
        parts: with a unidirectional model.
        block_s: audio that the model hears at once, seconds.

    Raises:
        ConfigError: a bidirectional model, which needs the end of a source first.
        ValueError: blocks of less than one output frame.
    """

    def __init__(self, parts: Parts, block_s: float = BLOCK_S) -> None:
        self.parts = parts
        frames = parts.model.time_stride * round(block_s / parts.frame_s)
        if frames < 1:
            raise ValueError(f"block_s={block_s} is less than an output frame of {parts.frame_s:g} s")
        self.state = parts.model.start()
        self.blocks: deque[Tensor] = deque()  # (1, F, T) features that the model has not heard
        self._features = FeatureStream(parts.features, parts.device, frames)
        self._decoding = parts.decoder.start()

    @property
    def duration_s(self) -> float:
        """Audio accepted so far, seconds."""
        return self._features.samples / self.parts.features.sample_rate_hz

    def accept(self, samples: NDArray[np.float32]) -> None:
        """Take the next samples (N,) of the model's rate in [-1, 1], any number."""
        self.blocks.extend(self._features.accept(samples))

    def ready(self) -> bool:
        """Whether `step` has something to do for this session."""
        return bool(self.blocks)

    def heard(self, logits: Tensor) -> None:
        """Take what the model says of this session's next frames, logits (T', 1, V); `step` does it."""
        if len(logits):
            self._decoding.step(logits.float().log_softmax(2), torch.tensor([len(logits)]))

    def best(self) -> Hypothesis:
        """The best hypothesis of what was heard so far."""
        return self._decoding.best()[0]

    @torch.inference_mode()
    def finish(self) -> Hypothesis:
        """Hear what is left and end: the best hypothesis of the whole source.

        Raises:
            DecodeError: the model gives NaN or infinity.
        """
        self.blocks.extend(self._features.finish())
        while self.ready():
            step([self])
        with self.parts.running():
            self.heard(self.parts.model.finish(self.state))
        return self._decoding.finish()[0][0]


@torch.inference_mode()
def step(sessions: Sequence[Session]) -> None:
    """Let sessions of one recogniser hear their next block, those that are ready and alike in one batch."""
    ready = [session for session in sessions if session.ready()]

    def shape(session: Session) -> str:
        return str((session.blocks[0].shape[2], session.state.signature()))

    for _, alike in groupby(sorted(ready, key=shape), key=shape):
        group = list(alike)
        state = join([session.state for session in group])
        model = group[0].parts.model
        with group[0].parts.running():
            logits = model.step(torch.cat([session.blocks.popleft() for session in group]), state)
        for row, (session, own) in enumerate(zip(group, split(state), strict=True)):
            session.state = own
            session.heard(logits[:, row : row + 1])


def windowed(model: AcousticModel, blocks: Iterator[Tensor], context_frames: int) -> Iterator[Tensor]:
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
