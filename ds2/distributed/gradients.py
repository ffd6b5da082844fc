"""Gradients in buckets, each summed over ranks as soon as the backward pass has completed it.

A parameter's `grad` is a part of its bucket's flat tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import torch
from ds2_ops.recurrent.deferred import DeferredGradients, Factors, GradientSink, product
from torch import Tensor

from ds2.distributed.communicator import Communicator, Moment, Pending
from ds2.system.plain import grouped

MakeCopies = Callable[[], tuple[Tensor, ...]]
TakeGradients = Callable[[Sequence[Tensor | None]], None]


class GradientReducer:
    """Gathers gradients in buckets and sums these over ranks while back-propagation goes on.

    (Persistent RNN paper, section 5.1.3.) Buckets follow the reverse order of the parameters, about the order in which
    back-propagation reaches them, and are summed in that order on every rank. A forward pass computes with copies of
    the parameters (`start_pass`), made bucket by bucket. So autograd itself knows when a bucket is complete, and
    rounding the weights, adding up and converting gradients take one launch a bucket instead of several a parameter:
    at 4 utterances a GPU, a step waits for launches.

    The calls of a step: `start_step`; for each batch `start_pass`, a forward pass, a backward pass, `end_pass`; then
    `finish_step`.

    Args:
        parameters: of the model, about in the order in which its forward pass uses them; those that require no
            gradient are left out.
        comm: the ranks; a single process has nothing to sum, the rest is the same.
        bucket_bytes: a bucket is closed once it holds so much.
        overlap: start sums during back-propagation; False waits for its end. Either way gives the same bits.
        low_precision: parameters whose copies have `dtype`, as autocast would round them; gradients keep the type of
            the parameter.
        dtype: see `low_precision`.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        comm: Communicator,
        bucket_bytes: int,
        *,
        overlap: bool,
        low_precision: Iterable[Tensor] = (),
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.comm, self.overlap = comm, overlap
        self._deferred = DeferredGradients(self._start_ready_sums)
        groups = split_into_buckets([p for p in parameters if p.requires_grad], bucket_bytes)
        low_precision = set(low_precision)
        self._buckets = [Bucket(group, low_precision, dtype, self._deferred) for group in groups]
        self._sums_by_copies = comm.copy_sums(self.buckets) if self.overlaps else None
        self.copied = False  # whether overlapping sums are copies between GPUs, see `can_copy`; the same bits again
        self._pending: list[Pending] = []  # the sums that have started, in the order of the buckets
        self._last_pass = self._finished = False

    @property
    def buckets(self) -> list[Tensor]:
        """The gradients, a flat tensor (N,) a bucket, with zeros between the parameters' parts."""
        return [bucket.flat for bucket in self._buckets]

    @property
    def rounded(self) -> dict[Tensor, Tensor]:
        """The copies in low precision, by parameter; whoever writes them calls `set_copies_current`."""
        return {parameter: copy for bucket in self._buckets for parameter, copy in bucket.rounded.items()}

    def set_copies_current(self, current: bool) -> None:
        """Say whether the rounded copies hold the present parameters; if not, every pass rounds them again."""
        for bucket in self._buckets:
            bucket.current = current

    @property
    def overlaps(self) -> bool:
        """Whether sums start during the last backward pass of a step."""
        return self.overlap and self.comm.world > 1

    @property
    def can_copy(self) -> bool:
        """Whether `copied` may be set."""
        return self._sums_by_copies is not None

    @property
    def variant(self) -> tuple[int, ...]:
        """What the launches of the next pass depend on besides shapes: its place in the step, and the copies."""
        first_of_step = all(bucket.passes == 0 for bucket in self._buckets)
        return int(first_of_step), int(all(bucket.current for bucket in self._buckets))

    def start_step(self) -> None:
        """Forget the gradients of the last step."""
        self._last_pass = self._finished = False
        self._pending = []
        self._deferred.begin()
        for bucket in self._buckets:
            bucket.start_step()

    def start_pass(self, *, last: bool) -> PassWeights:
        """Return the context of a forward pass; gradients of the `last` one of a step are final as they arrive."""
        self._last_pass = last
        for bucket in self._buckets:
            bucket.collected = False
        return PassWeights(self._buckets, self._collect)

    def end_pass(self) -> None:
        """Launch the deferred work of a backward pass."""
        self._deferred.flush()

    def advance(self) -> None:
        """Count a pass that is replayed from a recording; a last pass with overlap was recorded with `finish_step`."""
        for bucket in self._buckets:
            bucket.passes += 1
        self._finished = self._last_pass and self.overlaps

    def finish_step(self) -> list[tuple[Moment, Moment]]:
        """Start the sums that have not started, and wait for all.

        Returns:
            When the sums began and ended, without the time that they share with the one before; nothing where a
            recording contained them.
        """
        if self._finished:
            return []
        self._last_pass, self._finished = False, True
        for bucket in self._buckets:
            if bucket.passes == 0:
                bucket.flat.zero_()
        while self.comm.world > 1 and len(self._pending) < len(self._buckets):
            self._start_sum()
        spans: list[tuple[Moment, Moment]] = []
        for pending in self._pending:
            began, ended = pending.wait()
            if spans and isinstance(began, float) and isinstance(previous_end := spans[-1][1], float):
                began = max(began, previous_end)
            spans.append((began, ended))
        self._pending = []
        return spans

    def _collect(self, bucket: Bucket, gradients: Sequence[Tensor | None]) -> None:
        bucket.collect(gradients)
        self._start_ready_sums()

    def _start_ready_sums(self) -> None:
        if not (self._last_pass and self.overlaps):
            return
        while len(self._pending) < len(self._buckets) and self._buckets[len(self._pending)].complete:
            self._start_sum()

    def _start_sum(self) -> None:
        number = len(self._pending)
        if self._sums_by_copies is not None and self.copied and self.overlap:
            self._pending.append(self._sums_by_copies[number]())
        else:
            self._pending.append(self.comm.start_sum(self._buckets[number].flat, overlapped=self.overlap))


class PassWeights:
    """The weights of one forward pass, and the sinks of their gradients: a `ds2.model.pass_context.PassContext`.

    Args:
        buckets: of the parameters that are trained; a pass uses other parameters themselves.
        collect: takes a bucket and the gradients of its copies once the backward pass has all of them.
    """

    def __init__(self, buckets: Sequence[Bucket], collect: Callable[[Bucket, Sequence[Tensor | None]], None]) -> None:
        self._bucket_of = {parameter: bucket for bucket in buckets for parameter in bucket.parameters}
        self._collect = collect
        self._copies: dict[Tensor, Tensor] = {}

    def weight(self, parameter: Tensor) -> Tensor:
        """Return the copy of a parameter; the first call for any parameter of a bucket copies all of the bucket.

        The copies' place in autograd's order is that of their first use, so that the gradients of a bucket are
        collected, and its sum starts, before back-propagation goes on to earlier layers.
        """
        bucket = self._bucket_of.get(parameter)
        if bucket is None:
            return parameter
        if parameter not in self._copies:
            take_gradients = functools.partial(self._collect, bucket)
            copies = _BucketCopies.apply(bucket.copies, take_gradients, *bucket.parameters)  # type: ignore[no-untyped-call]
            self._copies.update(zip(bucket.parameters, copies, strict=True))
        return self._copies[parameter]

    def bias(self, parameters: Sequence[Tensor]) -> Tensor:
        """See `ds2.model.pass_context.PassContext`."""
        return functools.reduce(torch.add, map(self.weight, parameters))

    def sink(self, parameter: Tensor) -> BucketSink | None:
        """Return where the backward pass adds a parameter's gradient, see `Bucket.sinks`; None: autograd returns it."""
        bucket = self._bucket_of.get(parameter)
        return None if bucket is None else bucket.sinks.get(parameter)


class _BucketCopies(torch.autograd.Function):
    """Copies of a bucket's parameters; autograd runs the backward once it has all their gradients."""

    @staticmethod
    def forward(
        ctx: Any, make_copies: MakeCopies, take_gradients: TakeGradients, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.take_gradients = take_gradients
        ctx.set_materialize_grads(False)
        return make_copies()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.take_gradients(gradients)
        return (None,) * (2 + len(gradients))


class Bucket:
    """The gradients of some parameters in one flat tensor, and the copies of these parameters for a pass.

    The order of parts is that of the group, whatever `low_precision` holds: ranks whose GPUs run other kernels round
    other parameters, and a sum over ranks adds numbers that have the same place.

    Attributes:
        flat: (N,) the gradients.
        parameters: in the order of their parts of `flat`.
        rounded: the copies of parameters of `low_precision`, by parameter and of its shape.
        sinks: of the parameters of `low_precision`, and of vectors in the same bucket.
    """

    def __init__(
        self, group: Sequence[Tensor], low_precision: Set[Tensor], dtype: torch.dtype, deferred: DeferredGradients
    ) -> None:
        self.parameters = list(group)
        self.flat, self._parts = _flat_like(self.parameters, self.parameters[0].dtype)
        for parameter, part in zip(self.parameters, self._parts, strict=True):
            parameter.grad = part
        self._rounded: Tensor | None = None
        self.rounded: dict[Tensor, Tensor] = {}
        if low := [parameter for parameter in self.parameters if parameter in low_precision]:
            self._rounded, rounded = _flat_like(low, dtype)
            self.rounded = dict(zip(low, rounded, strict=True))
        self.sinks = {
            parameter: BucketSink(self, part)
            for parameter, part in zip(self.parameters, self._parts, strict=True)
            if self.rounded and (parameter in self.rounded or parameter.ndim == 1)
        }
        self.deferred = deferred
        self._written: set[tuple[Tensor, int]] = set()  # parts that sinks wrote in this backward pass, from which row
        self._unfinished = 0  # additions that are deferred
        self.current = False  # whether the rounded copies hold the present parameters
        self.passes = 0  # backward passes of this step that have added to it
        self.collected = False  # whether the present pass is one of them

    def copies(self) -> tuple[Tensor, ...]:
        """Return copies of `parameters`, those of `low_precision` rounded."""
        if self._rounded is not None and not self.current:
            self._rounded.copy_(_concatenated(list(self.rounded)))
        return tuple(self.rounded.get(parameter, parameter).detach() for parameter in self.parameters)

    @property
    def complete(self) -> bool:
        """Whether the present backward pass has added its gradients, none of which is deferred still."""
        return self.collected and self._unfinished == 0

    def start_step(self) -> None:
        """Forget the gradients of the last step."""
        self.passes = self._unfinished = 0
        self._written.clear()

    def collect(self, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients that autograd has for the copies, None where sinks took them or there are none."""
        first: list[tuple[Tensor, Tensor]] = []
        further: list[tuple[Tensor, Tensor]] = []
        missing: list[Tensor] = []
        written = {part for part, _ in self._written}
        for part, gradient in zip(self._parts, gradients, strict=True):
            is_first = self.passes == 0 and part not in written
            if gradient is not None:
                (first if is_first else further).append((part, gradient))
            elif is_first:
                missing.append(part)

        def add() -> None:
            if missing:
                torch._foreach_zero_(missing)
            # torch copies gradients of one type and contiguity in one launch.
            kinds = grouped(first, lambda pair: (pair[1].dtype, pair[1].is_contiguous()))
            for group in kinds.values():
                torch._foreach_copy_([part for part, _ in group], [gradient for _, gradient in group])
            if further:
                converted = [gradient.to(part.dtype) for part, gradient in further]
                torch._foreach_add_([part for part, _ in further], converted)

        self.add_later(add)
        self._written.clear()
        self.passes += 1
        self.collected = True

    def is_first_write(self, part: Tensor, first_row: int) -> bool:
        """Note that a sink writes rows of a part; returns whether these hold nothing of this step yet."""
        rows = (part, first_row)
        is_first = self.passes == 0 and rows not in self._written
        self._written.add(rows)
        return is_first

    def add_later(self, add: Callable[[], None]) -> None:
        """Call `add`, which launches an addition: now, or, while a graph is recorded, when the next recurrence runs."""

        def done() -> None:
            self._unfinished -= 1

        self._unfinished += 1
        self.deferred.later(add, done)


class BucketSink:
    """Adds to the gradient of a parameter, a `part` (R, ...) of the bucket, or to rows: a `GradientSink` of ds2_ops."""

    def __init__(self, bucket: Bucket, part: Tensor, rows: slice = slice(None)) -> None:
        self._bucket, self._part, self._first_row = bucket, part, rows.start or 0
        self._rows = part[rows]

    @property
    def deferred(self) -> DeferredGradients:
        """What defers work of a backward pass."""
        return self._bucket.deferred

    def add_products(self, factors: Factors, biases: Sequence[GradientSink] = ()) -> None:
        """Add the products of left (R, N) and right (N, C) to the gradient (R, C); on a GPU they have its dtype."""
        joined = functools.cache(lambda: product(factors))
        for bias in biases:
            bias.add(lambda: joined()[0].sum(1, dtype=torch.promote_types(joined()[0].dtype, torch.float32)))
        is_first, rows = self._bucket.is_first_write(self._part, self._first_row), self._rows
        left = factors[0][0]
        if not left.is_cuda and left.dtype != rows.dtype:
            left, right = joined()
            matrix = left @ right
            rows.copy_(matrix) if is_first else rows.add_(matrix)
            return
        options: dict[str, Any] = {} if left.dtype == rows.dtype else {"out_dtype": rows.dtype}

        def add() -> None:
            left, right = joined()
            if is_first:
                torch.mm(left, right, out=rows, **options)
            else:
                torch.addmm(rows, left, right, out=rows, **options)

        self._bucket.add_later(add)

    def add(self, make: Callable[[], Tensor]) -> None:
        """Add the tensor that `make` returns, shaped like the gradient."""
        is_first, rows = self._bucket.is_first_write(self._part, self._first_row), self._rows

        def add() -> None:
            rows.copy_(make()) if is_first else rows.add_(make())

        self._bucket.add_later(add)

    def rows(self, start: int, stop: int) -> BucketSink:
        """Return the sink of these rows; whoever adds to some rows in a pass must add to all."""
        return BucketSink(self._bucket, self._part, slice(self._first_row + start, self._first_row + stop))


def split_into_buckets(parameters: Sequence[Tensor], bucket_bytes: int) -> list[list[Tensor]]:
    """Cut parameters, last first, into groups of one type that are closed once they hold `bucket_bytes`."""
    groups: list[list[Tensor]] = []
    filled = bucket_bytes
    for parameter in reversed(parameters):
        if filled >= bucket_bytes or groups[-1][0].dtype != parameter.dtype:
            groups.append([])
            filled = 0
        groups[-1].append(parameter)
        filled += parameter.nbytes
    return groups


_ALIGNED = 8  # elements, 16 bytes in 16-bit types: kernels and matrix products need or like such addresses


def _flat_like(tensors: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Return a flat tensor of zeros, and its parts in the shapes of `tensors`, each aligned to 16 bytes."""
    sizes = [tensor.numel() + -tensor.numel() % _ALIGNED for tensor in tensors]
    flat = torch.zeros(sum(sizes), dtype=dtype, device=tensors[0].device)
    parts = torch.split(flat, sizes)
    return flat, [part[: tensor.numel()].view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def _concatenated(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors one after the other, laid out as `_flat_like` does."""
    pieces = []
    for tensor in tensors:
        pieces.append(tensor.reshape(-1))
        if gap := -tensor.numel() % _ALIGNED:
            pieces.append(tensor.new_zeros(gap))
    return torch.cat(pieces)
