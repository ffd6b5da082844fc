"""Batch norm of ragged batches on a GPU, with the clip that follows it, and sums over ranks between its launches.

From top to bottom: the launches (sums over rows, then the transform, in both passes), the operator, and the equation as
a reference.

Shape letters: B utterances, F bins, T frames, C channels, N rows: all axes but the channels taken together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds2_ops.batch_norm.rows import BYTES, NUMBERS, Rows
from ds2_ops.checks import check_read, refuse_second_derivative, why_no_gpu
from ds2_ops.jit.launch import multiprocessors, run


def why_not(dtype: torch.dtype, channels: int, device: torch.device) -> str | None:
    """Say why the kernels cannot normalise channels of a dtype on a device; None if they can."""
    if _name(dtype) not in NUMBERS:
        return f"the data is {dtype}, the kernels support bfloat16, float16 and float32"
    numbers = BYTES // dtype.itemsize
    if channels % numbers:
        return f"there are {channels} channels, the kernels load {numbers} at a time"
    return why_no_gpu(device)


# Sums over chunks and ranks. Arguments: sums of chunks of rows (K, 2, C) float64, which may be overwritten, and None or
# (2, C) float32 to receive the sums of this rank. Returns the sums over all chunks and ranks (1, 2, C).
Reduce = Callable[[Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class RunningStatistics:
    """Running averages (C,) float32: mean and variance of a batch enter them with weight `share`."""

    mean: Tensor
    var: Tensor
    share: float


def batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    count: Tensor,
    *,
    eps: float,
    lengths: Tensor | None = None,
    clip: float | None = None,
    running: RunningStatistics | None = None,
    reduce: Reduce | None = None,
) -> Tensor:
    """Normalise each channel over the valid positions, y = (x - mean) / sqrt(var + eps) * weight + bias.

    (Deep Speech 2, section 3.2.) Two launches in each pass; statistics are float64 sums of sums of four numbers in
    float32. Runs on torch's current stream, can be captured in a CUDA graph, gives the same bits on every run.
    Differentiable in ``x``, ``weight`` and ``bias``. Requires that `why_not` returns None.

    Args:
        x: (..., C) contiguous, bfloat16, float16 or float32. Without ``lengths``, x and the gradient of y must be 0 at
            padding.
        weight, bias: (C,) float32.
        count: (1,) int32 on the device, valid positions, at least 1; with ``reduce`` those of all ranks.
        eps: added to the variance, the mean square deviation.
        lengths: (B,) int32 on the device, valid frames of x (B, F, T, C): padding is ignored, comes out as 0 and has no
            gradient.
        clip: apply clipped ReLU up to this value in the same launch; None: no nonlinearity.
        running: averages to update.
        reduce: sums over chunks and ranks; the statistics are then those of all ranks.

    Returns:
        y like x.

    Raises:
        TypeError, ValueError: a tensor has another dtype, or is on another device.
    """
    check_read("weight", weight, torch.float32, x)
    check_read("bias", bias, torch.float32, x)
    check_read("count", count, torch.int32, x)
    if lengths is not None:
        check_read("lengths", lengths, torch.int32, x)
    y: Tensor = _BatchNorm.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, count, lengths, eps, clip, running, reduce
    )
    return y


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _partial(rows: Rows, device: torch.device) -> Tensor:
    """Allocate the sums of each chunk, which the second launch reads: (chunks, 2, C) float64."""
    return torch.empty(rows.chunk[1], 2, rows.channels, dtype=torch.float64, device=device)


def _run(rows: Rows, kernel: str, lengths: Tensor | None, partial: Tensor, *arguments: Tensor | float | None) -> None:
    """Launch a kernel; `partial` holds the sums of each chunk, (chunks, 2, C), or of all, (1, 2, C)."""
    numbers = [lengths, *rows.shape(len(partial)), partial, *arguments]
    run(rows.launch(kernel), numbers, lambda: f"batch norm, {kernel} of {rows}", partial.device)


class _BatchNorm(torch.autograd.Function):
    """Saves only the input and vectors of channels; the backward pass recomputes where the clip applies."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, count: Tensor, lengths: Tensor | None, eps: float,
        clip: float | None, running: RunningStatistics | None, reduce: Reduce | None,
    ) -> Tensor:  # fmt: skip
        channels, device = x.shape[-1], x.device
        bins, frames = (x.shape[1], x.shape[2]) if lengths is not None else (0, 0)
        sms = multiprocessors(device)
        rows = Rows(_name(x.dtype), x.numel() // channels, channels, sms, bins, frames, clip is not None)
        limit = 0.0 if clip is None else clip
        partial = _partial(rows, device)
        _run(rows, "sum_rows", lengths, partial, x)
        if reduce is not None:
            partial = reduce(partial, None)
        mean, inverse = torch.empty(2, channels, dtype=torch.float32, device=device)
        averages = (None, None, 0.0) if running is None else (running.mean, running.var, running.share)
        y = torch.empty_like(x)
        _run(rows, "normalise", lengths, partial, x, y, count, weight, bias, mean, inverse, *averages, eps, limit)
        ctx.save_for_backward(x, weight, bias, mean, inverse, count, lengths)
        ctx.rows, ctx.clip, ctx.reduce = rows, limit, reduce
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("batch_norm")
        x, weight, bias, mean, inverse, count, lengths = ctx.saved_tensors
        rows = ctx.rows
        channel = (weight, bias, mean, inverse)
        grad_y = grad_y.contiguous()
        partial = _partial(rows, x.device)
        _run(rows, "sum_gradients", lengths, partial, grad_y, x, *channel, ctx.clip)
        grad_weight: Tensor | None = torch.empty_like(mean)
        grad_bias: Tensor | None = torch.empty_like(mean)
        gradients = grad_weight, grad_bias
        if ctx.reduce is not None:
            own = torch.empty(2, len(mean), dtype=torch.float32, device=x.device)
            partial = ctx.reduce(partial, own)
            gradients = own[1] * inverse, own[0]
            grad_weight = grad_bias = None
        grad_x = torch.empty_like(x)
        outputs = (grad_weight, grad_bias)
        _run(rows, "backward_rows", lengths, partial, grad_y, x, grad_x, count, *channel, *outputs, ctx.clip)
        return grad_x, *gradients, None, None, None, None, None, None


def batch_norm_reference(
    x: Tensor, weight: Tensor, bias: Tensor, valid: Tensor, *, eps: float, clip: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise each channel over the valid positions (Deep Speech 2, section 3.2).

    Args:
        x: (..., C); values at padding are ignored.
        weight, bias: (C,).
        valid: (...) bool, True for valid positions.
        eps: added to the variance.
        clip: apply clipped ReLU up to this value; None: no nonlinearity.

    Returns:
        y like x, 0 at padding; mean and variance (C,).
    """
    rows = x[valid]
    mean, var = rows.mean(0), rows.var(0, correction=0)
    normal = (rows - mean) / torch.sqrt(var + eps) * weight + bias
    if clip is not None:
        normal = normal.clamp(0.0, clip)
    y = torch.zeros_like(x)
    y[valid] = normal
    return y, mean, var
