"""The weights that a forward pass computes with, and where its backward pass leaves their gradients.

A context is handed down beside `Ragged` through the model's forward.
"""

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from ds2_ops.recurrent.deferred import GradientSink
from torch import Tensor
from torch.nn import functional


class PassContext(Protocol):
    """The tensors that one forward pass uses in place of the model's parameters, and where their gradients go.

    By default it computes with the parameters themselves and leaves their gradients to autograd.
    """

    def weight(self, parameter: Tensor) -> Tensor:
        """The tensor to compute with: the parameter, or a copy of it, which may have a lower precision."""
        return parameter

    def bias(self, parameters: Sequence[Tensor]) -> Tensor:
        """The bias to compute with where it is the sum of several parameters."""
        return functools.reduce(torch.add, parameters)

    def sink(self, parameter: Tensor) -> GradientSink | None:
        """The place where the backward pass adds the parameter's gradient; None: autograd returns it for `weight`."""
        return None


class OwnParameters(PassContext):
    """The context by default."""


OWN_PARAMETERS = OwnParameters()


def sinks_of(parameters: Sequence[Tensor], context: PassContext) -> list[GradientSink] | None:
    """The sinks of parameters that one operation takes together; None unless all of them have one."""
    sinks = [sink for parameter in parameters if (sink := context.sink(parameter)) is not None]
    return sinks if len(sinks) == len(parameters) else None


def linear(
    x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, context: PassContext, biases: Sequence[Tensor] = ()
) -> Tensor:
    """Return x W^T + b (..., rows of W), as `torch.nn.functional.linear`; the gradients of weights go to their sinks.

    Args:
        x: (..., D).
        weights: (H, D) each, parameters; W has the rows of one after the other.
        bias: (rows of W,), computed from what the context has for its parameters; or None.
        biases: in place of `bias`, the parameters whose sum is the bias of a single weight; their gradients go to their
            sinks too.
    """
    copies = [context.weight(weight) for weight in weights]
    weight = copies[0] if len(copies) == 1 else torch.cat(copies)
    if biases:
        bias = context.bias(biases)
    sinks, bias_sinks = sinks_of(weights, context), sinks_of(biases, context)
    if sinks is None:
        return functional.linear(x, weight, bias)
    y: Tensor = _Linear.apply(x.to(weight.dtype), weight, bias, sinks, bias_sinks)  # type: ignore[no-untyped-call]
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sinks: Sequence[GradientSink],
        bias_sinks: Sequence[GradientSink] | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sinks, ctx.bias_sinks = sinks, bias_sinks or ()
        ctx.bias_dtype = None if bias is None or bias_sinks else bias.dtype
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2).t()
        for sink, part in zip(ctx.sinks, rows.chunk(len(ctx.sinks)), strict=True):
            sink.add_products([(part, x.flatten(0, -2))], ctx.bias_sinks)
        grad_bias = None if ctx.bias_dtype is None else rows.sum(1).to(ctx.bias_dtype)
        return grad @ weight if ctx.needs_input_grad[0] else None, None, grad_bias, None, None
