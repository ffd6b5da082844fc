"""The equation of batch norm, differentiable by autograd: the reference of the tests."""

import torch
from torch import Tensor


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
