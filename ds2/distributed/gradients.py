"""Gradients on their way to all ranks while back-propagation goes on: buckets, launched as soon as they are full."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from ds2_ops.recurrent.deferred import DeferredGradients
from torch import Tensor, nn

from ds2.distributed.bucket import Bucket, Slot
from ds2.distributed.communicator import Communicator, Moment, Pending

Copies = Callable[[], tuple[Tensor, ...]]
Collect = Callable[[Sequence[Tensor | None]], None]


class _Copies(torch.autograd.Function):
    """Copies of a bucket's parameters; backward runs once all their gradients are there, and hands them over."""

    @staticmethod
    def forward(ctx: Any, copies: Copies, collect: Collect, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.collect = collect
        ctx.set_materialize_grads(False)
        return copies()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.collect(gradients)
        return (None,) * (2 + len(gradients))


class GradientReducer:
    """Gathers gradients in buckets and sums these over ranks while back-propagation goes on.

    (Persistent RNN paper, section 5.1.3.) Buckets follow the reverse order of the parameters, about the order in which
    back-propagation finishes them, and are launched in that order on every rank. Within `passing`, modules compute with
    copies of a bucket's parameters, made as the first of them is needed; so autograd itself knows when a bucket is
    full, and rounding the weights, adding up and converting gradients take one launch a bucket instead of some a
    parameter: at 4 utterances a GPU, launches are what a step waits for. A parameter's `grad` is a part of its bucket.

    Args:
        model: whose modules are called in the order in which their parameters are defined.
        comm: the ranks; a single process has nothing to sum, the rest is the same.
        bucket_bytes: a bucket is closed once it holds so much.
        overlap: launch during back-propagation; False waits for its end. Either way gives the same bits.
        low: parameters whose copies have `dtype`, as autocast would round them; gradients keep the parameter's type.
        dtype: see `low`.

    Attributes:
        copied: whether sums that overlap are made by copies, of `can_copy`; the same bits again.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        bucket_bytes: int,
        *,
        overlap: bool,
        low: Iterable[nn.Parameter] = (),
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.comm, self.overlap = comm, overlap
        rounded: set[Tensor] = set(low)
        self._deferred = DeferredGradients(self._launch_whole)
        groups = in_buckets(_slots(model), bucket_bytes)
        self._buckets = [Bucket(group, rounded, dtype, self._deferred) for group in groups]
        self._copies = comm.copies(self.buckets) if self.overlaps else None
        self.copied = False
        for bucket in self._buckets:
            bucket.first.register_forward_pre_hook(functools.partial(self._enter, bucket))
        self._passing = False
        self._under_way: list[Pending] = []
        self._armed = self._finished = False

    @property
    def buckets(self) -> list[Tensor]:
        """The gradients, (N,) a bucket; zeros between the parts."""
        return [bucket.flat for bucket in self._buckets]

    @property
    def rounded(self) -> dict[Tensor, Tensor]:
        """Copies of parameters of `low`, by parameter, of its shape: who changes these then says `copies_are`."""
        return {parameter: copy for bucket in self._buckets for parameter, copy in bucket.rounded.items()}

    def copies_are(self, *, current: bool) -> None:
        """Say whether the rounded copies are those of the present parameters; else every pass makes them."""
        for bucket in self._buckets:
            bucket.current = current

    @property
    def current(self) -> bool:
        """What was last said of the rounded copies."""
        return all(bucket.current for bucket in self._buckets)

    def begin(self) -> None:
        """Forget the gradients of the last step."""
        self._armed = self._finished = False
        self._under_way = []
        self._deferred.begin()
        for bucket in self._buckets:
            bucket.begin()

    @property
    def overlaps(self) -> bool:
        """Whether sums begin during the last backward pass of a step."""
        return self.overlap and self.comm.world > 1

    @property
    def can_copy(self) -> bool:
        """Whether there is a choice of `copied`."""
        return self._copies is not None

    @property
    def fresh(self) -> bool:
        """Whether no backward pass of this step has added gradients yet."""
        return all(bucket.passes == 0 for bucket in self._buckets)

    def count_pass(self, *, finished: bool) -> None:
        """Take notice of a backward pass that runs as a recording of an earlier one, which may hold `finish` too."""
        self._finished = finished
        for bucket in self._buckets:
            bucket.passes += 1

    @contextmanager
    def passing(self, *, last: bool) -> Iterator[None]:
        """The block is a forward pass, the step's last one if `last`: its gradients are then final as they arrive."""
        self._armed = self.overlaps and last
        self._passing = True
        try:
            yield
        finally:
            self._passing = False
            for bucket in self._buckets:
                bucket.place(bucket.parameters)
                bucket.placed = False

    def _enter(self, bucket: Bucket, *_: Any) -> None:
        if not self._passing or bucket.placed:
            return
        collect = functools.partial(self._collect, bucket)
        bucket.place(_Copies.apply(bucket.copies, collect, *bucket.parameters))  # type: ignore[no-untyped-call]
        bucket.placed = True

    def _collect(self, bucket: Bucket, gradients: Sequence[Tensor | None]) -> None:
        bucket.collect(gradients)
        self._launch_whole()

    def _launch_whole(self) -> None:
        while self._armed and len(self._under_way) < len(self._buckets):
            if not self._buckets[len(self._under_way)].whole:
                break
            self._launch()

    def _launch(self) -> None:
        number = len(self._under_way)
        if self._copies is not None and self.copied and self.overlap:
            self._under_way.append(self._copies[number]())
        else:
            self._under_way.append(self.comm.start_sum(self._buckets[number].flat, beside=self.overlap))

    def end_pass(self) -> None:
        """Launch what a backward pass, which has been launched, holds back still."""
        self._deferred.flush()

    def finish(self) -> list[tuple[Moment, Moment]]:
        """Launch what is left and wait for all, once a step.

        Returns:
            When the sums went on, time that they share counted once; nothing where a recording held them.
        """
        if self._finished:
            return []
        self._armed, self._finished = False, True
        for bucket in self._buckets:
            if bucket.passes == 0:
                bucket.flat.zero_()
        while self.comm.world > 1 and len(self._under_way) < len(self._buckets):
            self._launch()
        spans: list[tuple[Moment, Moment]] = []
        for pending in self._under_way:
            began, ended = pending.wait()
            if spans and isinstance(began, float) and isinstance(last := spans[-1][1], float):
                began = max(began, last)
            spans.append((began, ended))
        self._under_way = []
        return spans


def _slots(model: nn.Module) -> list[Slot]:
    """The parameters that are trained, in the order of their definition."""
    return [
        Slot(module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad
    ]


def in_buckets(slots: Sequence[Slot], bucket_bytes: int) -> list[list[Slot]]:
    """Cut parameters, last first, into groups of one type that are closed once they hold `bucket_bytes`."""
    groups: list[list[Slot]] = []
    filled = bucket_bytes
    for slot in reversed(slots):
        if filled >= bucket_bytes or groups[-1][0].parameter.dtype != slot.parameter.dtype:
            groups.append([])
            filled = 0
        groups[-1].append(slot)
        filled += slot.parameter.numel() * slot.parameter.element_size()
    return groups
