"""Batches of sequences of several lengths: zeros past each of them."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ragged:
    """How far each utterance of a padded batch reaches, on the CPU and on the device, made once a batch.

    Attributes:
        lengths_cpu: (B,) int64 on the CPU, valid frames.
        lengths: (B,) int32 on the model's device.
        count: valid frames of the batch.
        valid: (B, T) bool on the device, True where t < length.
        keys: (B,) int64 on the device, from which each utterance's dropout follows; None where nothing depends on them.
    """

    lengths_cpu: Tensor
    lengths: Tensor
    count: int
    valid: Tensor
    keys: Tensor | None = None

    @classmethod
    def of(cls, lengths_cpu: Tensor, frames: int, device: torch.device, keys: Tensor | None = None) -> "Ragged":
        """Make one from (B,) lengths on the CPU, for batches padded to ``frames``."""
        lengths = lengths_cpu.to(device, torch.int32, non_blocking=True)
        valid = torch.arange(frames, device=device, dtype=torch.int32) < lengths[:, None]
        return cls(lengths_cpu, lengths, int(lengths_cpu.sum()), valid, keys)

    @property
    def frames(self) -> int:
        """T, the padded number of frames."""
        return self.valid.shape[1]


def reverse(x: Tensor, ragged: Ragged) -> Tensor:
    """Reverse each utterance of (T, B, D) in time within its own length; padding stays where it is."""
    time = torch.arange(x.shape[0], device=x.device, dtype=torch.int64)[:, None]
    index = torch.where(ragged.valid.t(), ragged.lengths - 1 - time, time)
    return x[index, torch.arange(x.shape[1], device=x.device)]
