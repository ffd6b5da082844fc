"""The weights that a forward pass computes with, and where its backward pass leaves their gradients.

A context is handed down beside `Ragged` through the model's forward.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from ds2_ops.recurrent.deferred import GradientSink
from torch import Tensor
from torch.nn import functional


class PassContext(Protocol):
    """What one forward pass is told about the parameters of the model."""

    def weight(self, parameter: Tensor) -> Tensor:
        """The tensor to compute with: the parameter, or a copy of it, which may have a lower precision."""
        ...

    def sink(self, parameter: Tensor) -> GradientSink | None:
        """Where the backward pass adds the gradient of the parameter; None: autograd returns it for `weight`."""
        ...


class OwnParameters:
    """The context of a pass that computes with the parameters themselves and leaves their gradients to autograd."""

    def weight(self, parameter: Tensor) -> Tensor:
        """Return the parameter."""
        return parameter

    def sink(self, parameter: Tensor) -> GradientSink | None:
        """Return None."""
        return None


OWN_PARAMETERS = OwnParameters()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, context: PassContext) -> Tensor:
    """Return x W^T + b, as `torch.nn.functional.linear`; without a bias the gradient of W goes to its sink.

    Args:
        x: (..., D).
        weight: (H, D), a parameter.
        bias: (H,), a parameter, or None.
        context: of the pass.

    Returns:
        (..., H)
    """
    sink = context.sink(weight)
    copy = context.weight(weight)
    if sink is None or bias is not None:
        return functional.linear(x, copy, None if bias is None else context.weight(bias))
    y: Tensor = _Linear.apply(x.to(copy.dtype), copy, sink)  # type: ignore[no-untyped-call]
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
