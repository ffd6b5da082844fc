"""Lengths of the utterances of a padded batch: checks, masks, and reversal in time.

Shape letters: T frames, B batch.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ds2_ops.checks import check_shape


def check_lengths(lengths: Tensor, batch: int) -> None:
    """Raise unless ``lengths`` is an integer tensor of shape (B,)."""
    check_shape("lengths", lengths, (batch,), "(B,)")
    if lengths.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"lengths is {lengths.dtype}, allowed are torch.int32 and torch.int64")


def lengths_on(lengths: Tensor | None, frames: int, device: torch.device) -> Tensor | None:
    """Copy lengths to ``device`` as int32; raise ValueError where one on the CPU lies outside 0..T.

    Lengths on a GPU are not checked: the host would wait for the device. Lengths are not checked either while
    torch.compile traces the reference: the check would break its graph.
    """
    if lengths is None:
        return None
    if lengths.device.type == "cpu" and not torch.compiler.is_compiling():
        for row, length in enumerate(lengths.tolist()):
            if not 0 <= length <= frames:
                raise ValueError(f"lengths[{row}] is {length}, allowed are 0 to T = {frames} frames")
    return lengths.to(device=device, dtype=torch.int32, non_blocking=True)


def valid_frames(lengths: Tensor, frames: int) -> Tensor:
    """Mark the frames that belong to an utterance.

    Args:
        lengths: (B,) integer tensor, frames per utterance.
        frames: T, the padded number of frames.

    Returns:
        (T, B) bool tensor on the device of ``lengths``, True where t < length.
    """
    return torch.arange(frames, device=lengths.device)[:, None] < lengths


def reverse_time(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Reverse each utterance of (T, B, ...) in time within its own length; padding does not move.

    Differentiable. Its gradient is the same reversal, without the sums that autograd needs for an arbitrary index.
    """
    time = torch.arange(x.shape[0], device=x.device)[:, None]
    if lengths is None:
        order = (x.shape[0] - 1 - time).expand(-1, x.shape[1])
    else:
        ends = lengths.to(x.device, torch.int64)
        order = torch.where(time < ends, ends - 1 - time, time)
    return _reorder(x, order)


def _reorder(x: Tensor, order: Tensor) -> Tensor:
    apply: Callable[[Tensor, Tensor], Tensor] = _Reorder.apply
    return apply(x, order)


class _Reorder(torch.autograd.Function):
    """Reorder the frames of x (T, B, ...) by an order (T, B) that is its own inverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return x[order, torch.arange(x.shape[1], device=x.device)]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return _reorder(grad, order), None
