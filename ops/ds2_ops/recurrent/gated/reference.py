"""The equations of LSTM and GRU as they stand in the papers, one time step after the other, for any dtype and device.

Every line is ordinary differentiable PyTorch, so gradcheck and torch.nn check this file, and this file checks the ops.
Shape letters: T frames, B batch, H hidden, G gates.
"""

import torch
from torch import Tensor

from ds2_ops.lengths import valid_frames
from ds2_ops.recurrent.cells import GATED


def gated_reference(
    cell: str,
    x: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    h0: Tensor | None = None,
    c0: Tensor | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a cell with gates as a loop over time, computed in the dtype of ``x``.

    LSTM: GRNN (Holmes et al. 2019), section 2, without peepholes; GRU: its equations with the reset gate before or
    after the recurrent product. Arguments are those of :func:`ds2_ops.recurrent.gated.op.gated`; c0 and c_n have the
    dtype of ``x`` here.

    Returns:
        y (T, B, H), h_n (B, H), and c_n (B, H), which is empty (0) where the cell carries none.
    """
    frames, batch, _ = x.shape
    hidden = weight_hh.shape[1]
    h = x.new_zeros(batch, hidden) if h0 is None else h0
    c = x.new_zeros(batch, hidden) if c0 is None else c0
    if lengths is None:
        lengths = torch.full((batch,), frames)
    valid = valid_frames(lengths.to(x.device), frames)[:, :, None]
    x = torch.where(valid, x, 0.0)  # before the arithmetic: 0 * NaN would reach the gradients
    outputs = []
    for t in range(frames):
        new_h, new_c = _step(cell, x[t], weight_hh, bias, h, c)
        outputs.append(torch.where(valid[t], new_h, 0.0))
        h, c = torch.where(valid[t], new_h, h), torch.where(valid[t], new_c, c)
    y = torch.stack(outputs) if outputs else x.new_zeros(0, batch, hidden)
    return y, h.clone(), c.clone() if GATED[cell].carries_c else x.new_empty(0)


def _step(cell: str, x: Tensor, weight_hh: Tensor, bias: Tensor | None, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    if cell == "lstm":
        i, f, g, o = (x + h @ weight_hh.T).chunk(4, dim=1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c
    x_r, x_z, x_n = x.chunk(3, dim=1)
    w_r, w_z, w_n = weight_hh.chunk(3)
    r, z = torch.sigmoid(x_r + h @ w_r.T), torch.sigmoid(x_z + h @ w_z.T)
    shift = 0.0 if bias is None else bias
    n = torch.tanh(x_n + (r * (h @ w_n.T + shift) if cell == "gru_after" else (r * h) @ w_n.T + shift))
    return (1 - z) * n + z * h, c
