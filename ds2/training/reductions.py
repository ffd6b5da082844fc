"""Sums over ranks in a step: its numbers, the statistics of batch norm, and when gradients are summed."""

import logging
import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ds2.distributed.communicator import Communicator
from ds2.distributed.gradients import GradientReducer
from ds2.model.norm import SequenceBatchNorm

log = logging.getLogger(__name__)
# whether gradients are summed during the backward pass, and whether by copies between GPUs
_WAYS = {"after": (False, False), "during": (True, False), "by copies during": (True, True)}
_ENOUGH_STEPS = 12  # of each way, measured
_MAX_STEPS = 1000  # after which the choice is made from what was measured


@dataclass
class StepNumbers:
    """The numbers of a step over all ranks."""

    loss: float  # summed over the utterances of all ranks, nats
    norm: float  # of the gradients
    counts: list[float]  # sums of the ranks' counts
    finite: bool  # whether loss and norm are, on every rank


class StepReport:
    """Sums a step's numbers over ranks on the device, from construction on; `read` waits for them.

    No host waits for another: on GPUs the sum is queued between the passes and the update, and the update does not wait
    until a host has read it. All ranks clip by rank 0's norm: another kind of GPU may round its own differently.

    Args:
        comm: the ranks, all of which report.
        losses: (B,) each, of this rank's utterances, in nats; all finite unless something went wrong.
        norm: () float32, of the gradients of all ranks, as this one adds up their squares.
        counts: further numbers to add up, as many on every rank.
    """

    def __init__(self, comm: Communicator, losses: Sequence[Tensor], norm: Tensor, counts: Sequence[float]) -> None:
        self._status = comm.status
        on_gpu = norm.is_cuda
        loss = torch.stack([part.sum() for part in losses]).sum() if losses else norm.new_zeros(())
        own = torch.tensor(list(counts), dtype=torch.float64, pin_memory=on_gpu).to(norm.device, non_blocking=True)
        share = norm.double() if comm.rank == 0 else 0.0 * norm.double()  # 0 times a non-finite value is NaN
        sums = torch.cat([torch.stack([loss.double(), share]), own])
        comm.sum_(sums)
        # () float32 on the device: rank 0's norm, not finite where that of any rank or the loss is not.
        self.norm = (sums[1] + 0.0 * sums[0]).to(norm.dtype)
        self._numbers = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True) if on_gpu else sums
        self._copied: torch.cuda.Event | None = None
        if on_gpu:
            self._numbers.copy_(sums, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def read(self) -> StepNumbers:
        """Wait for the sums, not for work that was queued after them."""
        if self._copied is not None:
            with self._status.waiting("gradients"):
                self._copied.synchronize()
        loss, norm, *counts = self._numbers.tolist()
        return StepNumbers(loss, norm, counts, finite=math.isfinite(loss + norm))


class NormStatistics:
    """Sums the statistics of batch norm over ranks, or averages the running averages that each rank has of its own.

    With shared statistics a step is the same for any number of ranks. A rank past the end of a short batch then runs a
    copy of another rank's utterance, to make the same calls: it adds nothing to the statistics and, since its loss has
    weight 0, its gradients are exactly 0.

    Args:
        model: whose `SequenceBatchNorm` layers are meant.
        comm: the ranks; a single process changes nothing.
        shared: whether a batch is normalised by the statistics of all ranks' utterances, or of each rank's own.
        kernels: whether layers take the kernels of ds2_ops where these run.
    """

    def __init__(self, model: nn.Module, comm: Communicator, *, shared: bool, kernels: bool = True) -> None:
        self.comm = comm
        self.idle = False  # whether this rank's batch counts nothing
        self._backward = False
        norms = self._norms = [m for m in model.modules() if isinstance(m, SequenceBatchNorm)]
        shared = shared or comm.world == 1
        self._own = [buffer for norm in norms for buffer in (norm.running_mean, norm.running_var) if not shared]
        self._stream: torch.cuda.Stream | None = None
        if self._own:
            self._flat = torch.cat([buffer.view(-1) for buffer in self._own])
            self._parts = list(torch.split(self._flat, [buffer.numel() for buffer in self._own]))
            if self._flat.is_cuda:
                self._stream = torch.cuda.Stream(self._flat.device)  # type: ignore[no-untyped-call]
        for norm in norms:
            norm.reduce = self if shared and comm.world > 1 else None
            norm.kernels = kernels

    def release(self) -> None:
        """Let the layers use the statistics of this rank alone, until other `NormStatistics` are made."""
        for norm in self._norms:
            norm.reduce = None

    @contextmanager
    def during_pass(self, *, backward: bool, last: bool = False) -> Iterator[None]:
        """Say which pass the block runs; running averages are averaged during the last backward pass of a step."""
        self._backward = backward
        if not (backward and last and self._own):
            yield
            return
        if self._stream is None:
            self._average()
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.comm.device))
        with torch.cuda.stream(self._stream):
            self._average()
        yield
        torch.cuda.current_stream(self.comm.device).wait_stream(self._stream)

    def __call__(self, chunks: Tensor, own: Tensor | None = None) -> Tensor:
        """Return the sum over chunks (K, ...) and over the ranks that are not idle; as `Communicator.sum_chunks`."""
        if self.idle:
            chunks.zero_()
        total = self.comm.sum_chunks(chunks, own)
        if self.idle and self._backward:
            total.zero_()  # the copy is not part of the statistics: no gradient reaches it through them
        return total

    def _average(self) -> None:
        """Give all ranks the mean of their running averages, so that a checkpoint holds those of all.

        A value that is not finite on one rank is then so on all, and all drop it together.
        """
        with torch.no_grad():
            torch.cat([buffer.view(-1) for buffer in self._own], out=self._flat)
            self.comm.sum_(self._flat)
            self._flat.div_(self.comm.world)
            torch._foreach_copy_(self._own, self._parts)


class OverlapChoice:
    """Chooses when gradients are summed, by the time of steps that try each way in turn.

    On GPUs only: there the blocks that sum take multiprocessors away from kernels that need many at once. All ways give
    the same bits, so a resumed run may choose again. All ranks make the same calls with the same numbers.

    Args:
        gradients: whose `overlap` and `copied` are set; where overlap is off, it stays so.
    """

    def __init__(self, gradients: GradientReducer) -> None:
        self._gradients = gradients
        self.decided = not gradients.overlaps or gradients.comm.device.type != "cuda"  # whether the choice is made
        ways = list(_WAYS)[: 2 + (not self.decided and gradients.can_copy)]
        self._seconds: dict[str, list[float]] = {way: [] for way in ways}  # a second of audio, of each step
        self._way = ways[0]
        self._last: tuple[str, float, bool] | None = None
        self._steps = 0

    def start_step(self) -> None:
        """Set how the step that begins sums its gradients."""
        if not self.decided:
            self._set(list(self._seconds)[self._steps % len(self._seconds)])

    def end_step(self, audio_s: float, *, typical: bool, previous_s: float) -> None:
        """Record the time of a step.

        Args:
            audio_s: seconds of audio of all ranks together.
            typical: whether it took as long as later steps will, on every rank: recorded passes were only launched.
            previous_s: the time of the step before it, in seconds; the mean over ranks.
        """
        if self.decided:
            return
        self._steps += 1
        if self._last is not None:
            way, previous_audio_s, counts = self._last
            if counts and previous_s > 0 and previous_audio_s > 0:
                self._seconds[way].append(previous_s / previous_audio_s)
        self._last = self._way, audio_s, typical
        if self._steps >= _MAX_STEPS or min(map(len, self._seconds.values())) >= _ENOUGH_STEPS:
            self._decide()

    def _set(self, way: str) -> None:
        self._way = way
        self._gradients.overlap, self._gradients.copied = _WAYS[way]

    def _decide(self) -> None:
        self.decided = True
        medians = {way: statistics.median(seconds) for way, seconds in self._seconds.items() if seconds}
        all_measured = len(medians) == len(self._seconds)
        self._set(min(medians, key=medians.__getitem__) if all_measured else "after")
        if self._gradients.comm.rank == 0:
            times = ", ".join(f"{1000 * seconds:.3f} {way}" for way, seconds in medians.items())
            log.info("gradients are summed %s the backward pass; ms a second of audio: %s", self._way, times)
