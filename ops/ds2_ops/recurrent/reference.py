"""The equations as they stand in the papers, one time step after the other, for any dtype and device.

Every line is ordinary differentiable PyTorch, so gradcheck and torch.nn check this file, and this file checks the ops.
Shape letters: T frames, B batch, H hidden.
"""

import torch
from torch import Tensor

from ds2_ops.lengths import valid_frames
from ds2_ops.recurrent.cells import CELLS


def recurrence_reference(
    x: Tensor,
    weight_hh: Tensor,
    h0: Tensor | None = None,
    lengths: Tensor | None = None,
    *,
    nonlinearity: str = "clipped_relu",
    clip: float = 20.0,
) -> tuple[Tensor, Tensor]:
    """Run h_t = f(x_t + W_hh h_(t-1)) as a loop over time, computed in the dtype of ``x``.

    Persistent RNNs (2016), section 3, equation 2, without the input product. Arguments, shapes and returns are those of
    :func:`ds2_ops.recurrence`.
    """
    frames, batch, hidden = x.shape
    state = x.new_zeros(batch, hidden) if h0 is None else h0
    if lengths is None:
        lengths = torch.full((batch,), frames)
    valid = valid_frames(lengths.to(x.device), frames)[:, :, None]
    x = torch.where(valid, x, 0.0)  # before the arithmetic: 0 * NaN would reach the gradients
    cell, outputs = CELLS[nonlinearity], []
    for t in range(frames):
        new = cell.forward(x[t] + state @ weight_hh.T, clip)
        outputs.append(torch.where(valid[t], new, 0.0))
        state = torch.where(valid[t], new, state)
    return (torch.stack(outputs) if outputs else x.clone()), state.clone()
