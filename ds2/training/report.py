"""What ranks tell each other of a step: numbers that are added up on the device, and read while it goes on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds2.distributed.communicator import Communicator


@dataclass
class Numbers:
    """A step as all ranks see it.

    Attributes:
        loss: summed over the utterances of all ranks, nats.
        norm: of the gradients.
        counts: sums of what ranks counted.
        finite: whether loss and norm are, on every rank.
    """

    loss: float
    norm: float
    counts: list[float]
    finite: bool


class StepReport:
    """Sums over ranks of a step's numbers, under way on the device from the first moment on.

    No rank's host waits for another's: on GPUs the sum is queued between the passes and the update, which thus need not
    wait for anybody to look at it.

    Args:
        comm: the ranks, who all report.
        losses: (B,) each, of this rank's utterances, in nats; all finite unless something went wrong.
        norm: () float32, of the gradients of all ranks.
        counts: further numbers to add up, as many on every rank.

    Attributes:
        norm: () float32 on the device: `norm`, or NaN where it or any rank's loss is not finite.
    """

    def __init__(self, comm: Communicator, losses: Sequence[Tensor], norm: Tensor, counts: Sequence[float]) -> None:
        self._whereabouts = comm.whereabouts
        on_gpu = norm.is_cuda
        loss = torch.stack([part.sum() for part in losses]).sum() if losses else norm.new_zeros(())
        told = torch.tensor(list(counts), dtype=torch.float64, pin_memory=on_gpu).to(norm.device, non_blocking=True)
        sums = torch.cat([torch.stack([loss.double(), 0.0 * norm.double()]), told])  # 0 x what is not finite: NaN
        comm.sum_(sums)
        self.norm = norm + 0.0 * (sums[0] + sums[1]).to(norm.dtype)
        numbers = torch.cat([sums, norm.double().view(1)])
        self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True) if on_gpu else numbers
        self._arrived: torch.cuda.Event | None = None
        if on_gpu:
            self._numbers.copy_(numbers, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def read(self) -> Numbers:
        """Wait for the sums and for nothing that was queued behind them."""
        if self._arrived is not None:
            with self._whereabouts.wait_in("gradients"):
                self._arrived.synchronize()
        loss, flaw, *counts, norm = self._numbers.tolist()
        return Numbers(loss, norm, counts, finite=math.isfinite(loss + flaw))
