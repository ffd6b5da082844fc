"""Batches of sequences of several lengths: zeros past each of them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ds2.model.norm import Count


@dataclass(frozen=True)
class Ragged:
    """How far each utterance of a padded batch reaches, on its device, made once a batch and never read back.

    Attributes:
        lengths: (B,) int32, valid frames.
        count: valid positions among the B T of the batch.
        valid: (B, T) bool, True where t < length.
        keys: (B,) int64, from which each utterance's dropout follows; None where nothing depends on them.
        share: (B,) float64, how much of its rate dropout of inputs has; None: all of it.
        first: frame of the utterances that is frame 0 here, of a piece of a batch.
    """

    lengths: Tensor
    count: Count
    valid: Tensor
    keys: Tensor | None = None
    share: Tensor | None = None
    first: int = 0

    @classmethod
    def of(
        cls,
        lengths: Tensor,
        frames: int,
        device: torch.device,
        keys: Tensor | None = None,
        share: Tensor | None = None,
    ) -> "Ragged":
        """Make one from (B,) lengths, on ``device`` or the CPU, for batches padded to ``frames``."""
        lengths = lengths.to(device, torch.int32, non_blocking=True)
        valid = torch.arange(frames, device=device, dtype=torch.int32) < lengths[:, None]
        return cls(lengths, Count(lengths, lengths.numel() * frames), valid, keys, share)

    @property
    def frames(self) -> int:
        """T, the padded number of frames."""
        return self.valid.shape[1]
