"""The cells: one row each, which all backends, the planner and the checks read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the planner reads this table where there is no torch
    from torch import Tensor


@dataclass(frozen=True)
class Cell:
    """What happens to a unit in a frame: y = f(pre), from whose output alone its slope can be told.

    Attributes:
        name: as ``nonlinearity`` of :func:`ds2_ops.recurrence`.
        cuda: the struct of csrc/recurrent/cells.cuh.
        forward: y from (pre, clip), differentiable.
        forward_: writes y in the place of pre, from (pre, clip).
        backward_: writes the gradient of pre in the place of y's, from (gradient, y, clip).
        takes_clip: whether clip means anything to it.
        gates: rows of the recurrent matrix a unit.
    """

    name: str
    cuda: str
    forward: Callable[[Tensor, float], Tensor]
    forward_: Callable[[Tensor, float], object]
    backward_: Callable[[Tensor, Tensor, float], object]
    takes_clip: bool = False
    gates: int = 1
    saved: int = 0
    carries_c: bool = False
    last_apart: bool = False
    phases: int = 1


@dataclass(frozen=True)
class GatedCell:
    """A cell with gates, whose equations stand in ``gated/reference.py``.

    Attributes:
        name: as ``cell`` of :func:`ds2_ops.recurrent.gated.op.gated`.
        cuda: the struct of csrc/recurrent/cells.cuh.
        gates: rows of the recurrent matrix a unit, in the order of torch.nn.
        saved: numbers a unit and frame that forward keeps for backward.
        carries_c: whether a state beside h goes from frame to frame.
        last_apart: whether the last gate's product has a gradient, and may have a bias, of its own.
        phases: rounds in which blocks exchange something in a step.
    """

    name: str
    cuda: str
    gates: int
    saved: int = 5
    carries_c: bool = False
    last_apart: bool = False
    phases: int = 1


def _relu_backward_(grad: Tensor, y: Tensor, clip: float) -> None:
    import torch

    torch.ops.aten.threshold_backward.grad_input(grad, y, 0.0, grad_input=grad)


def _clipped_relu_backward_(grad: Tensor, y: Tensor, clip: float) -> None:
    import torch

    torch.ops.aten.hardtanh_backward.grad_input(grad, y, 0.0, clip, grad_input=grad)


def _tanh_backward_(grad: Tensor, y: Tensor, clip: float) -> None:
    import torch

    torch.ops.aten.tanh_backward.grad_input(grad, y, grad_input=grad)


_ROWS = (
    Cell("relu", "Relu", lambda pre, clip: pre.relu(), lambda pre, clip: pre.relu_(), _relu_backward_),
    Cell(
        "clipped_relu",
        "ClippedRelu",
        lambda pre, clip: pre.clamp(0.0, clip),
        lambda pre, clip: pre.clamp_(0.0, clip),
        _clipped_relu_backward_,
        takes_clip=True,
    ),
    Cell("tanh", "Tanh", lambda pre, clip: pre.tanh(), lambda pre, clip: pre.tanh_(), _tanh_backward_),
)
CELLS = {cell.name: cell for cell in _ROWS}

_GATED_ROWS = (
    GatedCell("lstm", "Lstm", gates=4, carries_c=True),
    GatedCell("gru_after", "GruAfter", gates=3, last_apart=True),
    GatedCell("gru_before", "GruBefore", gates=3, phases=2),
)
GATED = {cell.name: cell for cell in _GATED_ROWS}
ALL: dict[str, Cell | GatedCell] = {**CELLS, **GATED}
