"""Inputs of the recurrence on any backend."""

import torch
from torch import Tensor

from support.op_cases import CPU, away_from_kinks, draw

CLIP = 1.5


def problem(
    shape: tuple[int, int, int],
    device: torch.device,
    dtype: torch.dtype,
    with_h0: bool = True,
    nonlinearity: str = "clipped_relu",
) -> tuple[list[Tensor | None], list[Tensor]]:
    """Inputs x, weight_hh, h0 whose states neither die nor explode, and gradients of y and h_n."""
    _, batch, hidden = shape
    weight_hh = draw(2, hidden, hidden, device=device, dtype=dtype, scale=0.9 * hidden**-0.5)
    h0 = draw(3, batch, hidden, device=device, dtype=dtype) if with_h0 else None
    x = away_from_kinks(draw(1, *shape, device=CPU, dtype=torch.float64), weight_hh, h0, nonlinearity, CLIP)
    grad_y = draw(4, *shape, device=device, dtype=dtype)
    return [x.to(device, dtype), weight_hh, h0], [grad_y, draw(5, batch, hidden, device=device, dtype=dtype)]
