"""How far the utterances of a padded batch reach, in tensors on its device: the host never reads them back.

Shape letters: T frames, B batch.
"""

import functools
from dataclasses import dataclass

import torch
from ds2_ops.batch_norm.op import Reduce
from torch import Tensor


class Count:
    """How many positions of a batch are valid; each number is made when the first layer asks for it.

    Args:
        lengths: integers that sum to the number of valid frames.
        frames: of the batch, padding included.
        bins: positions of a frame; 1 where a frame is one position.
    """

    def __init__(self, lengths: Tensor, frames: int, bins: int = 1) -> None:
        self._lengths, self._bins = lengths, bins
        self.positions = frames * bins
        self._ratios: dict[torch.dtype, tuple[Tensor, Tensor]] = {}
        self._of_all_ranks: Tensor | None = None

    @functools.cached_property
    def valid(self) -> Tensor:
        """(1,) int32, at least 1."""
        return self._sum().clamp(min=1).int()

    def _sum(self) -> Tensor:
        return self._lengths.sum().view(1) * self._bins

    def over_ranks(self, reduce: Reduce | None) -> Tensor:
        """(1,) int32, at least 1: the sum over all ranks by `reduce`, made once; without `reduce` this rank's."""
        if reduce is None:
            return self.valid
        if self._of_all_ranks is None:  # a rank without frames adds none
            self._of_all_ranks = reduce(self._sum().double()[None], None)[0].clamp(min=1).int()
        return self._of_all_ranks

    def ratio(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """All positions over the valid ones, r, and 1 - r: scalars, divided in float64."""
        if dtype not in self._ratios:
            ratio = self.valid.new_full((), self.positions, dtype=torch.float64) / self.valid[0]
            self._ratios[dtype] = ratio.to(dtype), (1.0 - ratio).to(dtype)
        return self._ratios[dtype]


@dataclass(frozen=True)
class Ragged:
    """How far each utterance of a padded batch reaches, made once a batch."""

    lengths: Tensor  # (B,) int32, valid frames
    count: Count  # valid positions among the B T of the batch
    valid: Tensor  # (B, T) bool, True where t < length
    keys: Tensor | None = None  # (B,) int64, from which each utterance's dropout follows; None: nothing depends on them
    first: int = 0  # of a piece of a batch: the frame of the utterances that is frame 0 here

    @classmethod
    def of(cls, lengths: Tensor, frames: int, device: torch.device, keys: Tensor | None = None) -> "Ragged":
        """Make one from (B,) lengths, on ``device`` or the CPU, for batches padded to ``frames``."""
        lengths = lengths.to(device, torch.int32, non_blocking=True)
        valid = torch.arange(frames, device=device, dtype=torch.int32) < lengths[:, None]
        return cls(lengths, Count(lengths, lengths.numel() * frames), valid, keys)
