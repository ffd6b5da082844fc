"""The recurrence as one or two matrix products a time step: the CPU path, the path for any GPU, and the baseline.

No autograd, no host synchronisation: CUDA-graph capturable. Everything but the
products is float32 where tensors are 16-bit. Shape letters: T frames, B batch, H hidden, G gates, S saved values.
"""

import torch
from torch import Tensor

from ds2_ops.recurrent.backends.reference import time_loop
from ds2_ops.recurrent.cells import CELLS, Options


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype of c and of a cell's sums: float32, or float64 where x is."""
    return torch.promote_types(x.dtype, torch.float32)


def forward(
    x: Tensor,
    weight_hh: Tensor,
    bias_hn: Tensor | None,
    h0: Tensor | None,
    c0: Tensor | None,
    lengths: Tensor | None,
    options: Options,
    save: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Run the forward time loop.

    Args:
        x: (T, B, G H) pre-activations, contiguous.
        weight_hh: (G H, H) of the same dtype and device.
        bias_hn: (H,) of the last gate's recurrent product, or None.
        h0: (B, H) first state, or None for zeros.
        c0: (B, H) in float32 (float64 where x is), or None for zeros.
        lengths: (B,) int32 on the device of ``x``, or None when all utterances have T frames.
        options: the cell and its clip.
        save: whether a backward pass will follow.

    Returns:
        y (T, B, H), 0 at padding; h_n (B, H), the state after each utterance's last frame; c_n (B, H) as c0, or None
        where the cell has none; what backward needs of a cell with gates (T, B, S, H), or None.
    """
    cell = CELLS[options.cell]
    frames, batch, _ = x.shape
    if cell.gates == 1:
        y, h_n = _forward_in_place(x, weight_hh, h0, lengths, options)
        return y, h_n, None, None
    valid = None if lengths is None else _valid(lengths, frames)
    saved = x.new_empty(frames, batch, cell.saved, weight_hh.shape[1]) if save else None
    wide = wide_dtype(x)
    y, h_n, c_n = time_loop(cell, x, weight_hh, bias_hn, h0, c0, valid, options.clip, wide, saved)
    return y, h_n, c_n if cell.carries_c else None, saved


def _forward_in_place(
    x: Tensor, weight_hh: Tensor, h0: Tensor | None, lengths: Tensor | None, options: Options
) -> tuple[Tensor, Tensor]:
    """The time loop of a cell of one gate: two torch calls a step."""
    frames, batch, hidden = x.shape
    activate_ = CELLS[options.cell].activate_
    assert activate_ is not None
    first = _aligned(1, batch, hidden, x)[0]
    first.zero_() if h0 is None else first.copy_(h0)
    y = _aligned(frames, batch, hidden, x).copy_(x)
    weight_t = weight_hh.t()
    previous = first
    for state in y.unbind(0):
        state.addmm_(previous, weight_t)
        activate_(state, options.clip)
        previous = state
    h_n = previous.clone(memory_format=torch.contiguous_format)
    if lengths is not None and frames:
        # Rows of a product are independent: results at padding reached no valid frame, and are erased now.
        h_n = torch.where((lengths == 0)[:, None], first, y[_last_frame(lengths)])
        y.masked_fill_(~_valid(lengths, frames), 0.0)
    return y.contiguous(), h_n


def backward_data(
    grad_y: Tensor,
    grad_h_n: Tensor | None,
    grad_c_n: Tensor | None,
    y: Tensor,
    saved: Tensor | None,
    weight_hh: Tensor,
    lengths: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Run the time loop backwards.

    Args:
        grad_y: (T, B, H); its padding is ignored, whatever it holds.
        grad_h_n: (B, H), or None for zeros.
        grad_c_n: (B, H) as c0, or None for zeros.
        y, saved: as :func:`forward` returned them.
        weight_hh, lengths, options: the arguments of :func:`forward`.

    Returns:
        grad_x (T, B, G H), 0 at padding; the gradient of the last gate's recurrent product (T, B, H), or None where it
        is that of x; grad_h0 (B, H); grad_c0 (B, H) as c0, or None where the cell has none.
    """
    if saved is None:
        grad_x, grad_h0 = _backward_from_output(grad_y, grad_h_n, y, weight_hh, lengths, options)
        return grad_x, None, grad_h0, None
    return _backward_from_saved(grad_y, grad_h_n, grad_c_n, saved, weight_hh, lengths, options)


def _backward_from_output(
    grad_y: Tensor, grad_h_n: Tensor | None, y: Tensor, weight_hh: Tensor, lengths: Tensor | None, options: Options
) -> tuple[Tensor, Tensor]:
    """dpre_t = (dy_t + [t = length - 1] dh_n + W^T dpre_(t+1)) f'(y_t): two torch calls a step, both in place."""
    frames, batch, hidden = y.shape
    backward_ = CELLS[options.cell].backward_
    assert backward_ is not None
    grad_x = _aligned(frames, batch, hidden, y).copy_(grad_y)
    grad_h0 = _aligned(1, batch, hidden, y)[0].zero_()
    if lengths is not None:
        # grad_x starts at 0 at padding, and the loop, which meets the padding first, keeps it there whatever f' is.
        grad_x.masked_fill_(~_valid(lengths, frames), 0.0)
    if grad_h_n is not None:
        if not frames:
            grad_h0.copy_(grad_h_n)
        elif lengths is None:
            grad_x[-1].add_(grad_h_n)
        else:
            empty = (lengths == 0)[:, None]
            grad_x[_last_frame(lengths)] += torch.where(empty, 0.0, grad_h_n)
            grad_h0.copy_(torch.where(empty, grad_h_n, 0.0))
    following: Tensor | None = None
    for grad, state in zip(reversed(grad_x.unbind(0)), reversed(y.unbind(0)), strict=True):
        if following is not None:
            grad.addmm_(following, weight_hh)
        backward_(grad, state, options.clip)
        following = grad
    if following is not None:
        grad_h0.addmm_(following, weight_hh)
    return grad_x.contiguous(), grad_h0.contiguous()


def _backward_from_saved(
    grad_y: Tensor,
    grad_h_n: Tensor | None,
    grad_c_n: Tensor | None,
    saved: Tensor,
    weight_hh: Tensor,
    lengths: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    frames, batch, hidden = grad_y.shape
    cell, wide = CELLS[options.cell], wide_dtype(grad_y)
    backward = cell.backward
    assert backward is not None
    grad_x = grad_y.new_empty(frames, batch, cell.gates * hidden)
    grad_last = grad_y.new_empty(frames, batch, hidden) if cell.last_apart else None
    zeros = grad_y.new_zeros(batch, hidden, dtype=wide)
    dh = zeros if grad_h_n is None else grad_h_n.to(wide)  # of the state after a frame, without the gradient of its y
    dc = zeros if grad_c_n is None else grad_c_n
    valid = None if lengths is None else _valid(lengths, frames)
    for t in range(frames - 1, -1, -1):
        above = grad_y[t].to(wide)
        if valid is not None:
            above = torch.where(valid[t], above, 0.0)
        gates, last, new_dh, new_dc = backward(dh + above, dc, saved[t], weight_hh, wide)
        if valid is not None:
            gates = torch.where(valid[t], gates, 0.0)
            last = torch.where(valid[t], last, 0.0) if cell.last_apart else last
            new_dh, new_dc = torch.where(valid[t], new_dh, dh), torch.where(valid[t], new_dc, dc)
        grad_x[t] = gates
        if grad_last is not None:
            grad_last[t] = last
        dh, dc = new_dh, new_dc
    return grad_x, grad_last, dh.to(grad_y.dtype), dc.clone() if cell.carries_c else None


def _valid(lengths: Tensor, frames: int) -> Tensor:
    """Mark the frames of each utterance (T, B, 1)."""
    return torch.arange(frames, device=lengths.device)[:, None, None] < lengths[:, None]


def _last_frame(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Index of each utterance's last frame in a (T, B, H) tensor; frame 0 stands in for an empty utterance."""
    return (lengths - 1).clamp_min(0).long(), torch.arange(lengths.shape[0], device=lengths.device)


_ROW_BYTES = 64  # BLAS libraries choose kernels by alignment; equal alignment of every step gives equal sums


def _aligned(frames: int, batch: int, hidden: int, like: Tensor) -> Tensor:
    """Empty (T, B, H) whose steps are contiguous and start at multiples of 64 bytes."""
    step = batch * hidden
    multiple = _ROW_BYTES // like.element_size()
    storage = like.new_empty(frames, -(-step // multiple) * multiple)
    return storage[:, :step].view(frames, batch, hidden)
