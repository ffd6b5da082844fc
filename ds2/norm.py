"""Sequence-wise batch norm: statistics over the valid frames of batch and time, in float32.

Shape letters: T frames, B batch, C channels, F bins, H features; N positions, all axes but the channels taken together.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class SequenceBatchNorm(nn.Module):
    """Normalise each channel over all valid positions of a batch (Deep Speech 2, section 3.2).

    In training, y = (x - mean) / sqrt(var + eps) * weight + bias with the batch's own mean and variance (the mean
    square deviation, not the unbiased estimate). Positions at padding must hold exactly 0: sums over everything are
    then sums over the valid positions, and only the count has to be known. What comes out at padding, and the gradient
    that goes back there, is finite and means nothing: the caller's next layer overwrites it.

    In evaluation, running averages of the same two. Each batch weighs in by its number of valid positions, and the
    first one fully, so early short batches and the initial values leave no bias.

    Args:
        channels: number of channels.
        momentum: weight of a batch of average size in the running averages.
        eps: added to the variance.
        axis: of the channels; -1 for (T, B, H), 1 for (B, C, F, T).

    Attributes:
        reduce: sums a float32 vector over all ranks in place, or None; with it the statistics are those of all ranks.
    """

    running_mean: Tensor
    running_var: Tensor
    running_count: Tensor

    def __init__(self, channels: int, momentum: float = 0.1, *, eps: float = 1e-5, axis: int = -1) -> None:
        super().__init__()
        self.momentum, self.eps, self.axis = momentum, eps, axis
        self.reduce: Callable[[Tensor], None] | None = None
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.register_buffer("running_count", torch.zeros(()))

    def forward(self, x: Tensor, count: Tensor | None = None) -> Tensor:
        """Normalise.

        Args:
            x: any float dtype, channels on ``axis``, 0 at padding.
            count: () float32, valid positions; unused in evaluation.

        Returns:
            The shape and dtype of ``x``.
        """
        axis = self.axis % x.dim()
        if not self.training:
            scale = self.weight * torch.rsqrt(self.running_var + self.eps)
            return _affine(x, scale, self.bias - self.running_mean * scale, axis)
        if count is None:
            raise ValueError("batch norm in training needs the count of valid positions; in evaluation call .eval()")
        y: Tensor
        y, mean, var, total = _Normalise.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, count, self.eps, axis, self.reduce
        )
        with torch.no_grad():
            self.running_count.lerp_(total, self.momentum)
            share = self.momentum * total / self.running_count.clamp_min(1e-6)
            self.running_mean.lerp_(mean, share)
            self.running_var.lerp_(var, share)
        return y


class _Normalise(torch.autograd.Function):
    """Two passes over the data each way: reduce, then transform. Saves its input and vectors of channels only."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        count: Tensor,
        eps: float,
        axis: int,
        reduce: Callable[[Tensor], None] | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        others = [a for a in range(x.dim()) if a != axis]
        total_dtype = torch.promote_types(x.dtype, torch.float32)
        sums = x.sum(others, dtype=total_dtype)
        squares = torch.linalg.vector_norm(x, 2, others, dtype=total_dtype).square()
        if reduce is not None:
            packed = torch.cat([sums, squares, count.view(1)])
            reduce(packed)
            sums, squares, count = packed[: len(sums)], packed[len(sums) : -1], packed[-1]
        safe_count = count.clamp_min(1.0)
        mean = sums / safe_count
        var = (squares / safe_count - mean.square()).clamp_min(0.0)
        inverse = torch.rsqrt(var + eps)
        scale = weight * inverse
        ctx.save_for_backward(x, mean, inverse, scale, safe_count)
        ctx.axis, ctx.reduce = axis, reduce
        ctx.mark_non_differentiable(mean, var, count)
        return _affine(x, scale, bias - mean * scale, axis), mean, var, count

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, inverse, scale, count = ctx.saved_tensors
        others = [a for a in range(x.dim()) if a != ctx.axis]
        grad_bias = grad_y.sum(others, dtype=mean.dtype)
        grad_weight = ((grad_y * x).sum(others, dtype=mean.dtype) - mean * grad_bias) * inverse
        sums = torch.stack([grad_bias, grad_weight])
        if ctx.reduce is not None:
            sums = sums.clone()
            ctx.reduce(sums)
        # grad_x = scale * (grad_y - mean(grad_y) - x_hat * mean(grad_y * x_hat)), the means over valid positions
        mean_grad, mean_grad_x_hat = sums / count
        slope = -scale * inverse * mean_grad_x_hat
        shift = -scale * mean_grad - mean * slope
        grad_x = _affine(x, slope, shift, ctx.axis).add_(_affine(grad_y, scale, None, ctx.axis))
        return grad_x, grad_weight, grad_bias, None, None, None, None


def _affine(x: Tensor, scale: Tensor, shift: Tensor | None, axis: int) -> Tensor:
    shape = [1] * x.dim()
    shape[axis] = -1
    scaled = x * scale.view(shape) if shift is None else torch.addcmul(shift.view(shape), x, scale.view(shape))
    return scaled.to(x.dtype)
