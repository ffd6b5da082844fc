"""A bucket of gradients: some parameters' in one flat tensor, and how what autograd and products bring gets there."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from ds2_ops.recurrent.deferred import DeferredGradients
from torch import Tensor, nn


@dataclass
class Slot:
    """A parameter and where its module keeps it."""

    module: nn.Module
    name: str
    parameter: nn.Parameter


class Bucket:
    """Some parameters' gradients in one flat tensor, and the copies of these parameters that a pass computes with.

    Parameters of `low` come first in it, so that one concatenation and one conversion serve all of them, both ways.
    """

    def __init__(
        self, group: Sequence[Slot], low: Set[Tensor], dtype: torch.dtype, deferred: DeferredGradients
    ) -> None:
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
        sinks = {parameter: _Sink(self, part) for parameter, part in zip(self._low, self._parts, strict=False)}
        self._sinks = [sinks.get(parameter) for parameter in self.parameters]
        self.deferred = deferred
        self._written: set[Tensor] = set()  # parts, by sinks, in the running backward pass
        self._written_rows: set[tuple[Tensor, int]] = set()  # of these, from which row on
        self._awaited = 0  # what was deferred and is not launched yet
        self.current = False  # whether the rounded copies are those of the present parameters
        self.placed = False  # in the running forward pass
        self.passes = 0  # backward passes of this step that have added to it

    @property
    def rounded(self) -> dict[Tensor, Tensor]:
        """The copies of parameters of `low`, by parameter and of its shape."""
        return dict(zip(self._low, self._sources, strict=False))

    def copies(self) -> tuple[Tensor, ...]:
        """The parameters in the order of `parameters`, of their shapes, those of `low` rounded."""
        if self._rounded is not None and not self.current:
            self._rounded.copy_(_concatenated(self._low))
        return tuple(source.detach() for source in self._sources)

    def place(self, tensors: Sequence[Tensor]) -> None:
        """Give the modules these tensors, shaped as `parameters` and in their order, in place of them.

        Until the parameters are placed again, nothing else may read a module's parameters (state_dict, optimizer,
        deepcopy): autograd only sees a copy that is an attribute of the module.
        """
        for slot, tensor, sink in zip(self.slots, tensors, self._sinks, strict=True):
            if sink is not None and tensor is not slot.parameter:
                tensor.sink = sink  # type: ignore[attr-defined]
            slot.module._parameters[slot.name] = tensor  # type: ignore[assignment]

    @property
    def whole(self) -> bool:
        """Whether a backward pass of this step has added to it, and nothing of that is held back."""
        return self.passes > 0 and self._awaited == 0

    def begin(self) -> None:
        """Forget the gradients of the last step."""
        self.passes = self._awaited = 0
        self._written.clear()
        self._written_rows.clear()

    def add_product(self, part: Tensor, left: Tensor, right: Tensor, rows: slice = slice(None)) -> None:
        """Add a product to the gradient of a parameter where that lies, in float32 on a GPU, ahead of `collect`.

        In a recording it is held back until the next recurrence runs.

        Args:
            part: (R, C), where the gradient lies.
            left: (R, N).
            right: (N, C).
            rows: of the part that are meant; left has as many.
        """
        fresh = self._take(part, rows)
        part = part[rows]
        if not left.is_cuda and left.dtype != part.dtype:
            product = left @ right
            part.copy_(product) if fresh else part.add_(product)
            return
        wide: dict[str, Any] = {} if left.dtype == part.dtype else {"out_dtype": part.dtype}

        def add() -> None:
            if fresh:
                torch.mm(left, right, out=part, **wide)
            else:
                torch.addmm(part, left, right, out=part, **wide)

        self._later(add)

    def add(self, part: Tensor, make: Callable[[], Tensor], rows: slice = slice(None)) -> None:
        """Add what `make` makes to the gradient of a parameter, ahead of `collect`, in a recording as `add_product`."""
        fresh = self._take(part, rows)
        part = part[rows]

        def add() -> None:
            part.copy_(make()) if fresh else part.add_(make())

        self._later(add)

    def collect(self, gradients: Sequence[Tensor | None]) -> None:
        """Take the gradients of one backward pass, those of the copies; in a recording as `add_product` does."""
        first: list[tuple[Tensor, Tensor]] = []
        further: list[tuple[Tensor, Tensor]] = []
        missing: list[Tensor] = []
        for part, grad in zip(self._parts, gradients, strict=True):
            fresh = self.passes == 0 and part not in self._written
            if grad is not None:
                (first if fresh else further).append((part, grad))
            elif fresh:
                missing.append(part)

        def add() -> None:
            if missing:
                torch._foreach_zero_(missing)
            for alike in _alike(first):
                torch._foreach_copy_([part for part, _ in alike], [grad for _, grad in alike])
            if further:
                torch._foreach_add_([part for part, _ in further], [grad.to(part.dtype) for part, grad in further])

        self._later(add)
        self._written.clear()
        self._written_rows.clear()
        self.passes += 1

    def _take(self, part: Tensor, rows: slice) -> bool:
        """Note that a sink took a gradient; returns whether it is the first of these rows and this step."""
        taken = (part, rows.start or 0)
        fresh = self.passes == 0 and taken not in self._written_rows
        self._written_rows.add(taken)
        self._written.add(part)
        return fresh

    def _later(self, add: Callable[[], None]) -> None:
        def done() -> None:
            self._awaited -= 1

        self._awaited += 1
        self.deferred.later(add, done)


class _Sink:
    """Takes the gradient of a parameter's copy as products, made where the bucket keeps it."""

    def __init__(self, bucket: Bucket, part: Tensor, rows: slice = slice(None)) -> None:
        self._bucket, self._part, self._rows = bucket, part, rows

    @property
    def deferred(self) -> DeferredGradients:
        """What runs beside the recurrences of a backward pass."""
        return self._bucket.deferred

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add left (R, N) times right (N, C) to the gradient (R, C)."""
        self._bucket.add_product(self._part, left, right, self._rows)

    def add(self, make: Callable[[], Tensor]) -> None:
        """Add a gradient like the parameter, which `make` makes when it suits."""
        self._bucket.add(self._part, make, self._rows)

    def rows(self, start: int, stop: int) -> _Sink:
        """The sink of these rows: whoever adds to some of them in a pass adds to all."""
        first = self._rows.start or 0
        return _Sink(self._bucket, self._part, slice(first + start, first + stop))


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
