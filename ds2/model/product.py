"""Products with a weight whose gradient goes where it is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ds2_ops.recurrent.deferred import GradientSink
from torch import Tensor
from torch.nn import functional


def sink_of(weight: Tensor) -> GradientSink | None:
    """What takes the gradient of a weight (H, D) instead of autograd, an attribute of its copy in a pass; or None."""
    return getattr(weight, "sink", None)


def adder_of(weight: Tensor) -> Callable[[Callable[[], Tensor]], None] | None:
    """What takes what makes the gradient of a weight (H, D) instead of autograd; or None."""
    sink = getattr(weight, "sink", None)
    return None if sink is None else sink.add


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As `torch.nn.functional.linear`; without a bias the gradient goes to the weight's sink, if it has one.

    Args:
        x: (..., D).
        weight: (H, D).
        bias: (H,) or None.

    Returns:
        (..., H)
    """
    sink = sink_of(weight)
    if sink is None or bias is not None:
        return functional.linear(x, weight, bias)
    y: Tensor = _Linear.apply(x.to(weight.dtype), weight, sink)  # type: ignore[no-untyped-call]
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sink: GradientSink) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sink = sink
        return functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        ctx.sink.add_product(grad.flatten(0, -2).t(), x.flatten(0, -2))
        return grad @ weight, None, None
