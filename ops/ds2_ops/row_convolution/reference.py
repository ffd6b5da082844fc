"""The equation of the row convolution, differentiable by autograd: the reference of the tests."""

import torch
from torch import Tensor

from ds2_ops.lengths import valid_frames


def lookahead_reference(x: Tensor, weight: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Sum each feature over the current and the next tau frames: r_t = sum_j w_j * h_(t+j).

    Deep Speech 2 (2015), row convolution. Arguments, shapes and returns are those of :func:`ds2_ops.lookahead`.
    """
    frames, batch, _ = x.shape
    if lengths is None:
        lengths = torch.full((batch,), frames)
    valid = valid_frames(lengths.to(x.device), frames)[:, :, None]
    taps = weight.shape[1]
    padded = torch.cat([torch.where(valid, x, 0.0), x.new_zeros(taps - 1, *x.shape[1:])])
    y = torch.stack([padded[j : j + frames] * weight[:, j] for j in range(taps)]).sum(0)
    return torch.where(valid, y, 0.0)
