"""The equation of batch norm, differentiable by autograd: what the kernels are checked by."""

import torch
from torch import Tensor


def batch_norm_reference(
    x: Tensor, weight: Tensor, bias: Tensor, valid: Tensor, *, eps: float, clip: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise each channel over the positions that count (Deep Speech 2, section 3.2).

    Args:
        x: (..., C); what it holds where it does not count is ignored.
        weight, bias: (C,).
        valid: (...) bool, which positions count.
        eps: added to the variance.
        clip: then also clipped ReLU up to this; None: no nonlinearity.

    Returns:
        y like x, 0 where x does not count, mean and variance (C,).
    """
    counted = x[valid]
    mean, var = counted.mean(0), counted.var(0, correction=0)
    normal = (counted - mean) / torch.sqrt(var + eps) * weight + bias
    if clip is not None:
        normal = normal.clamp(0.0, clip)
    y = torch.zeros_like(x)
    y[valid] = normal
    return y, mean, var
