"""The equations as they stand in the papers, one time step after the other, for any dtype and device.

Every line is ordinary differentiable PyTorch: gradcheck and torch.nn check it, and it checks the other backends.
Shape letters: T frames, B batch, H hidden, G gates, S saved values.
"""

import torch
from torch import Tensor

from ds2_ops.checks import valid_frames
from ds2_ops.recurrent.cells import CELLS, Cell

# x, weight_hh, bias_hn, h0, c0 and lengths; y, h_n, c_n and what is saved for the backward pass
Inputs = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
Outputs = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
# gradients of y, h_n and c_n, then y, saved, weight_hh and lengths; gradients of x, the last product, h0 and c0
BackwardInputs = tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None, Tensor, Tensor | None]
Gradients = tuple[Tensor, Tensor | None, Tensor, Tensor | None]


def recurrence_reference(
    x: Tensor,
    weight_hh: Tensor,
    h0: Tensor | None = None,
    lengths: Tensor | None = None,
    *,
    cell: str = "clipped_relu",
    bias_hn: Tensor | None = None,
    c0: Tensor | None = None,
    clip: float = 20.0,
) -> tuple[Tensor, ...]:
    """Run a cell as a loop over time, computed in the dtype of ``x``.

    Arguments and returns are those of :func:`ds2_ops.recurrence` in one direction, c0 and c_n in the dtype of ``x``.
    """
    row, lengths = CELLS[cell], torch.full(x.shape[1:2], len(x), device=x.device) if lengths is None else lengths
    y, h_n, c_n = time_loop(row, (x, weight_hh, bias_hn, h0, c0, lengths.to(x.device)), clip, x.dtype)
    return (y, h_n, c_n) if row.carries_c else (y, h_n)


def time_loop(
    cell: Cell, inputs: Inputs, clip: float, wide: torch.dtype, saved: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the forward steps of a cell.

    Args:
        cell: its equations.
        inputs: as :func:`ds2_ops.recurrence` in one direction, c0 in `wide`, lengths on the device of x.
        clip: as there.
        wide: dtype of all that is not a product.
        saved: (T, B, S, H), where the values of each step are written, or None.

    Returns:
        y (T, B, H), 0 at padding, and the states (B, H) after each utterance's last frame.
    """
    x, weight_hh, bias_hn, h0, c0, lengths = inputs
    valid = None if lengths is None else valid_frames(lengths, len(x))
    batch, hidden = x.shape[1], weight_hh.shape[1]
    # Copies: BLAS libraries choose kernels by alignment, and a split in T must add up as the whole does.
    h = x.new_zeros(batch, hidden) if h0 is None else h0.clone(memory_format=torch.contiguous_format)
    no_c = x.new_zeros(batch, hidden if cell.carries_c else 0, dtype=wide)
    c = no_c if c0 is None else c0.to(wide, copy=True)
    if valid is not None:
        x = torch.where(valid, x, 0.0)  # before the arithmetic: 0 * NaN would reach the gradients
    weight_t = weight_hh.t()
    states = []
    for t, frame in enumerate(x.unbind(0)):
        if cell.forward is not None:
            new_h, new_c, values = cell.forward(frame, weight_t, bias_hn, h, c, wide)
        else:
            assert cell.activate_ is not None
            new_h, new_c = cell.activate_(frame.addmm(h, weight_t), clip), c
        if saved is not None:
            torch.stack([value.to(x.dtype) for value in values], dim=1, out=saved[t])
        states.append(new_h)
        if valid is not None:
            new_h = torch.where(valid[t], new_h, h)
            new_c = torch.where(valid[t], new_c, c) if cell.carries_c else c
        h, c = new_h, new_c
    y = torch.stack(states) if states else x.new_zeros(0, batch, hidden)
    return (y if valid is None else torch.where(valid, y, 0.0)), h, c
