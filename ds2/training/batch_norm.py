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
        self._stream: torch.cuda.Stream | None = None
        if self._own:
            self._flat = torch.cat([buffer.view(-1) for buffer in self._own])
            self._parts = list(torch.split(self._flat, [buffer.numel() for buffer in self._own]))
            if self._flat.is_cuda:
                self._stream = torch.cuda.Stream(self._flat.device)  # type: ignore[no-untyped-call]
        for norm in norms:
            norm.reduce = self if shared else None

    @contextmanager
    def passing(self, *, backward: bool, last: bool = False) -> Iterator[None]:
        """Say which pass the block is; beside the last backward pass of a step running averages are joined."""
        self._backward = backward
        if not (backward and last and self._own):
            yield
            return
        if self._stream is None:
            self._join()
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.comm.device))
        with torch.cuda.stream(self._stream):
            self._join()
        yield
        torch.cuda.current_stream(self.comm.device).wait_stream(self._stream)

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

    def _join(self) -> None:
        """Give all ranks the mean of running averages that each took for itself: a checkpoint then holds them all.

        What is not finite on one rank is so on all, which then forget it together.
        """
        with torch.no_grad():
            torch.cat([buffer.view(-1) for buffer in self._own], out=self._flat)
            self.comm.sum_(self._flat)
            self._flat.div_(self.comm.world)
            torch._foreach_copy_(self._own, self._parts)
