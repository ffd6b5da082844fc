"""What batch norm knows of other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ds2.distributed.communicator import Communicator
from ds2.model.norm import SequenceBatchNorm


class NormStatistics:
    """What batch norm knows of other ranks: their utterances' statistics, or the mean of running averages.

    Shared statistics make a step the same for any number of ranks. A rank past the end of a short batch then runs a
    copy of another's utterance, to make the same calls: what it computes enters no statistics and, its loss weighing
    nothing, its gradients are exactly 0.

    Args:
        model: whose `SequenceBatchNorm` layers are meant.
        comm: the ranks; a single process changes nothing.
        shared: statistics of all ranks' utterances rather than of each rank's own.
    """

    def __init__(self, model: nn.Module, comm: Communicator, *, shared: bool) -> None:
        self.comm = comm
        self.idle = False
        self._backward = False
        norms = [m for m in model.modules() if isinstance(m, SequenceBatchNorm)] if comm.world > 1 else []
        self._own = [buffer for norm in norms for buffer in (norm.running_mean, norm.running_var) if not shared]
        for norm in norms:
            norm.reduce = self if shared else None

    @contextmanager
    def passing(self, *, backward: bool) -> Iterator[None]:
        """Say which pass the block is."""
        self._backward = backward
        yield

    def __call__(self, packed: Tensor) -> None:
        """Overwrite a float64 vector with its sum over the ranks that are not idle."""
        if self.idle:
            packed.zero_()
        self.comm.sum_(packed)
        if self.idle and self._backward:
            packed.zero_()  # the copy is not part of the statistics: no gradient reaches it through them

    def chunks(self, chunks: Tensor, own: Tensor | None = None) -> Tensor:
        """Return the sum of chunks (K, ...) and of the ranks that are not idle; as `Communicator.sum_chunks`."""
        if self.idle:
            chunks.zero_()
        total = self.comm.sum_chunks(chunks, own)
        if self.idle and self._backward:
            total.zero_()
        return total

    def end_step(self) -> None:
        """Give all ranks the mean of running averages that each took for itself: a checkpoint then holds them all."""
        if self._own:
            flat = torch.cat([buffer.view(-1) for buffer in self._own])
            self.comm.sum_(flat)
            torch._foreach_copy_(self._own, list(torch.split(flat / self.comm.world, [b.numel() for b in self._own])))
