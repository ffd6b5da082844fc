"""Gradients on their way to all ranks while back-propagation goes on: buckets, launched as soon as they are full."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ds2.distributed.communicator import Communicator, Moment, Pending

Copies = Callable[[], tuple[Tensor, ...]]
Collect = Callable[[Sequence[Tensor | None]], None]


@dataclass
class Slot:
    """A parameter and where its module keeps it."""

    module: nn.Module
    name: str
    parameter: nn.Parameter


class _Bucket:
    """Some parameters' gradients in one flat tensor, and the copies of these parameters that a pass computes with.

    Parameters of `low` come first in it, so that one concatenation and one conversion serve all of them, both ways.
    """

    def __init__(self, group: Sequence[Slot], low: Set[Tensor], dtype: torch.dtype) -> None:
        self.first = group[-1].module  # to be called: the order is reversed
        self.slots = sorted(group, key=lambda slot: slot.parameter not in low)
        self.parameters: list[Tensor] = [slot.parameter for slot in self.slots]
        self.flat, self._parts = _flat_like(self.parameters, self.parameters[0].dtype)
        for parameter, part in zip(self.parameters, self._parts, strict=True):
            parameter.grad = part
        self._low = [parameter for parameter in self.parameters if parameter in low]
        self._rounded: Tensor | None = None
        self._sources = self.parameters
        if self._low:
            self._rounded, copies = _flat_like(self._low, dtype)
            self._sources = copies + self.parameters[len(copies) :]
        self.current = False  # whether the rounded copies are those of the present parameters
        self.placed = False  # in the running forward pass
        self.passes = 0  # backward passes of this step that have added to it

    @property
    def rounded(self) -> dict[Tensor, Tensor]:
        """The copies of parameters of `low`, by parameter."""
        return dict(zip(self._low, self._sources, strict=False))

    def copies(self) -> tuple[Tensor, ...]:
        """The parameters, those of `low` rounded."""
        if self._rounded is not None and not self.current:
            self._rounded.copy_(_concatenated(self._low))
        return tuple(source.detach() for source in self._sources)

    def place(self, tensors: Sequence[Tensor]) -> None:
        """Give the modules these tensors in place of their parameters.

        Until the parameters are placed again, nothing else may read a module's parameters (state_dict, optimizer,
        deepcopy): autograd only sees a copy that is an attribute of the module.
        """
        for slot, tensor in zip(self.slots, tensors, strict=True):
            slot.module._parameters[slot.name] = tensor  # type: ignore[assignment]

    def collect(self, gradients: Sequence[Tensor | None]) -> None:
        """Take the gradients of one backward pass, those of the copies."""
        came = [(part, grad) for part, grad in zip(self._parts, gradients, strict=True) if grad is not None]
        if self.passes > 0:
            torch._foreach_add_([part for part, _ in came], [grad.to(part.dtype) for part, grad in came])
        else:
            if len(came) < len(self._parts):
                self.flat.zero_()
            for alike in _alike(came):
                torch._foreach_copy_([part for part, _ in alike], [grad for _, grad in alike])
        self.passes += 1


_ALIGNED = 8  # elements: 16 bytes, which kernels and matrix products like, in 16-bit types


def _flat_like(tensors: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """One tensor of zeros, and its parts in the shapes of the given ones, each on a boundary of 16 bytes."""
    places = [tensor.numel() + -tensor.numel() % _ALIGNED for tensor in tensors]
    flat = torch.zeros(sum(places), dtype=dtype, device=tensors[0].device)
    cut = torch.split(flat, places)
    return flat, [part[: tensor.numel()].view_as(tensor) for part, tensor in zip(cut, tensors, strict=True)]


def _concatenated(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors one after the other, placed as `_flat_like` places them."""
    pieces = []
    for tensor in tensors:
        pieces.append(tensor.reshape(-1))
        if gap := -tensor.numel() % _ALIGNED:
            pieces.append(tensor.new_zeros(gap))
    return torch.cat(pieces)


def _alike(came: Sequence[tuple[Tensor, Tensor]]) -> list[list[tuple[Tensor, Tensor]]]:
    """The pairs in groups of one type and of rows that follow one another or not: torch copies such a group at once."""
    groups: dict[tuple[torch.dtype, bool], list[tuple[Tensor, Tensor]]] = {}
    for part, grad in came:
        groups.setdefault((grad.dtype, grad.is_contiguous()), []).append((part, grad))
    return list(groups.values())


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
        self._buckets = [_Bucket(group, rounded, dtype) for group in in_buckets(_slots(model), bucket_bytes)]
        for bucket in self._buckets:
            bucket.first.register_forward_pre_hook(functools.partial(self._enter, bucket))
        self._passing = False
        self._under_way: list[Pending] = []
        self._armed = self._finished = False

    @property
    def buckets(self) -> list[Tensor]:
        """The flat gradients; zeros between the parts."""
        return [bucket.flat for bucket in self._buckets]

    @property
    def rounded(self) -> dict[Tensor, Tensor]:
        """The copies of parameters of `low`, by parameter: for whoever changes these and then says `copies_are`."""
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
        for bucket in self._buckets:
            bucket.passes = 0

    @property
    def overlaps(self) -> bool:
        """Whether sums begin during the last backward pass of a step."""
        return self.overlap and self.comm.world > 1

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

    def _enter(self, bucket: _Bucket, *_: Any) -> None:
        if not self._passing or bucket.placed:
            return
        collect = functools.partial(self._collect, bucket)
        bucket.place(_Copies.apply(bucket.copies, collect, *bucket.parameters))  # type: ignore[no-untyped-call]
        bucket.placed = True

    def _collect(self, bucket: _Bucket, gradients: Sequence[Tensor | None]) -> None:
        bucket.collect(gradients)
        while self._armed and len(self._under_way) < len(self._buckets):
            if self._buckets[len(self._under_way)].passes == 0:
                break
            self._launch()

    def _launch(self) -> None:
        self._under_way.append(self.comm.start_sum(self._buckets[len(self._under_way)].flat))

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
