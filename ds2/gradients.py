"""Gradients on their way to all ranks while back-propagation goes on: buckets, launched as soon as they are full."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ds2.distributed import Communicator, Moment, Pending
from ds2.metrics import StepTimer
from ds2.norm import SequenceBatchNorm


class GradientReducer:
    """Sums gradients over ranks, bucket by bucket (Persistent RNN paper, section 5.1.3).

    Buckets follow the reverse order of the parameters, about the order in which back-propagation finishes them, and are
    launched in that order on every rank. Each parameter's `grad` is a view into its bucket, so nothing is copied.
    A single process keeps its gradients as torch makes them, and every method but `zero` does nothing.

    Args:
        parameters: in the order of their use, all on `comm.device`.
        comm: the ranks.
        bucket_bytes: a bucket is closed once it holds so much.
        overlap: launch during back-propagation; False waits for its end. Either way gives the same bits.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], comm: Communicator, bucket_bytes: int, *, overlap: bool
    ) -> None:
        self.parameters, self.comm, self.overlap = parameters, comm, overlap
        self.buckets: list[Tensor] = []
        self._waiting_for: list[int] = []  # parameters of each bucket whose gradients are still to come
        self._sizes: list[int] = []
        self._under_way: list[Pending] = []
        self._armed = False
        if comm.world > 1:
            for members in in_buckets(parameters, bucket_bytes):
                self._add_bucket(members)

    def _add_bucket(self, members: Sequence[nn.Parameter]) -> None:
        number = len(self.buckets)
        flat = torch.zeros(sum(p.numel() for p in members), dtype=members[0].dtype, device=members[0].device)
        for parameter, part in zip(members, torch.split(flat, [p.numel() for p in members]), strict=True):
            parameter.grad = part.view_as(parameter)
            parameter.register_post_accumulate_grad_hook(lambda _: self._arrived(number))  # type: ignore[no-untyped-call]
        self.buckets.append(flat)
        self._sizes.append(len(members))

    def zero(self) -> None:
        """Forget the gradients of the last step."""
        if self.comm.world == 1:
            for parameter in self.parameters:
                parameter.grad = None
        for flat in self.buckets:
            flat.zero_()

    def arm(self) -> None:
        """Say that the next backward pass is the step's last: its gradients are final as they arrive."""
        self._armed = self.overlap
        self._waiting_for = list(self._sizes)

    def _arrived(self, number: int) -> None:
        if not self._armed:
            return
        self._waiting_for[number] -= 1
        while len(self._under_way) < len(self.buckets) and self._waiting_for[len(self._under_way)] == 0:
            self._launch()

    def _launch(self) -> None:
        self._under_way.append(self.comm.start_sum(self.buckets[len(self._under_way)]))

    def finish(self, timer: StepTimer) -> None:
        """Launch what is left and wait for all; gives `timer` how long the sums took, as `allreduce_total`."""
        self._armed = False
        while len(self._under_way) < len(self.buckets):
            self._launch()
        last: Moment | None = None
        for pending in self._under_way:
            began, ended = pending.wait()
            if isinstance(began, float) and isinstance(last, float):
                began = max(began, last)  # sums on their way together count their common time once
            timer.add("allreduce_total", began, ended)
            last = ended
        self._under_way = []


def in_buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Cut parameters, last first, into groups of one type that are closed once they hold `bucket_bytes`."""
    groups: list[list[nn.Parameter]] = []
    filled = bucket_bytes
    for parameter in reversed([p for p in parameters if p.requires_grad]):
        if filled >= bucket_bytes or groups[-1][0].dtype != parameter.dtype:
            groups.append([])
            filled = 0
        groups[-1].append(parameter)
        filled += parameter.numel() * parameter.element_size()
    return groups


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

    def end_step(self) -> None:
        """Give all ranks the mean of running averages that each took for itself: a checkpoint then holds them all."""
        if self._own:
            flat = torch.cat([buffer.view(-1) for buffer in self._own])
            self.comm.sum_(flat)
            torch._foreach_copy_(self._own, list(torch.split(flat / self.comm.world, [b.numel() for b in self._own])))
