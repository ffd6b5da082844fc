"""LSTM and GRU as one or two matrix products a time step: the CPU path, and the path for any GPU.

No autograd, no host synchronisation: CUDA-graph capturable. What a step adds up beside the products is float32 where
tensors are 16-bit. Shape letters: T frames, B batch, H hidden, G gates.

``saved`` (T, B, 5, H) is what backward needs of a frame, the same for every backend: of the LSTM its gates i, f, g, o
and c before the frame; of the GRU r, z, n, then (W h)_n + bias (reset after the product; unused before it), then h
before the frame.
"""

import torch
from torch import Tensor

from ds2_ops.recurrent.cells import GATED


def wide_dtype(x: Tensor) -> torch.dtype:
    """In which a cell's sums and c are kept: float32, or float64 where x (T, B, G H) is."""
    return torch.promote_types(x.dtype, torch.float32)


def forward(
    cell: str,
    x: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None,
    h0: Tensor | None,
    c0: Tensor | None,
    lengths: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the forward time loop.

    Args:
        cell: a name in ``cells.GATED``.
        x: (T, B, G H) pre-activations, contiguous.
        weight_hh: (G H, H) of the same dtype and device.
        bias: (H,) of the last gate's recurrent product, or None.
        h0: (B, H) first state, or None for zeros.
        c0: (B, H), float32 (float64 where x is), or None for zeros.
        lengths: (B,) int32 on the device of ``x``, or None when all utterances have T frames.
        save: whether a backward pass will follow.

    Returns:
        y (T, B, H), 0 at padding; h_n (B, H); c_n (B, H) as c0, empty (0) where the cell has none; saved (T, B, 5, H),
        empty (0) unless asked for.
    """
    frames, batch, _ = x.shape
    hidden = weight_hh.shape[1]
    wide = wide_dtype(x)
    carries_c = GATED[cell].carries_c
    h = x.new_zeros(batch, hidden) if h0 is None else h0
    c = x.new_zeros(batch, hidden if carries_c else 0, dtype=wide) if c0 is None else c0
    y = x.new_empty(frames, batch, hidden)
    saved = x.new_empty((frames, batch, GATED[cell].saved, hidden) if save else 0)
    valid = None if lengths is None else torch.arange(frames, device=x.device)[:, None, None] < lengths[:, None]
    for t in range(frames):
        given = x[t] if valid is None else torch.where(valid[t], x[t], 0.0)  # what is saved of padding stays finite
        new_h, new_c, kept = _step(cell, given, weight_hh, bias, h, c, wide)
        if save:
            torch.stack([k.to(x.dtype) for k in kept], dim=1, out=saved[t])
        if valid is not None:
            y[t] = torch.where(valid[t], new_h, 0.0)
            new_h = torch.where(valid[t], new_h, h)
            new_c = torch.where(valid[t], new_c, c) if carries_c else c
        else:
            y[t] = new_h
        h, c = new_h, new_c
    return y, h.clone(memory_format=torch.contiguous_format), c.clone() if carries_c else c.new_empty(0), saved


def _step(
    cell: str, x: Tensor, weight_hh: Tensor, bias: Tensor | None, h: Tensor, c: Tensor, wide: torch.dtype
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return new h, new c, and what backward needs; products in the dtype of x, the rest wider."""
    hidden = h.shape[1]
    if cell == "lstm":
        pre = torch.addmm(x, h, weight_hh.t()).to(wide)
        i, f, g, o = pre[:, :hidden], pre[:, hidden : 2 * hidden], pre[:, 2 * hidden : 3 * hidden], pre[:, 3 * hidden :]
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        new_c = torch.addcmul(f * c, i, g)
        return (o * new_c.tanh()).to(x.dtype), new_c, (i, f, g, o, c)
    two = 2 * hidden
    wide_h = h.to(wide)
    r, z = torch.addmm(x[:, :two], h, weight_hh[:two].t()).to(wide).sigmoid().chunk(2, dim=1)
    if cell == "gru_after":
        q = (h @ weight_hh[two:].t()).to(wide)
        q = q if bias is None else q + bias
        n = torch.addcmul(x[:, two:].to(wide), r, q).tanh()
    else:
        q = r
        shift = x[:, two:] if bias is None else x[:, two:] + bias
        n = torch.addmm(shift, (r * wide_h).to(x.dtype), weight_hh[two:].t()).to(wide).tanh()
    return torch.lerp(n, wide_h, z).to(x.dtype), c, (r, z, n, q, h)


def backward_data(
    cell: str,
    grad_y: Tensor,
    grad_h_n: Tensor | None,
    grad_c_n: Tensor | None,
    saved: Tensor,
    weight_hh: Tensor,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the time loop backwards.

    Args:
        cell, weight_hh, lengths: as given to :func:`forward`.
        grad_y: (T, B, H); its padding is ignored, whatever it holds.
        grad_h_n: (B, H), or None for zeros.
        grad_c_n: (B, H) as c0, or None for zeros.
        saved: from :func:`forward`.

    Returns:
        grad_x (T, B, G H), 0 at padding; the gradient of the last gate's recurrent product (T, B, H), empty (0) where
        it is that of x; grad_h0 (B, H); grad_c0 (B, H) as c0, empty (0) where the cell has none.
    """
    frames, batch, hidden = grad_y.shape
    row = GATED[cell]
    wide = wide_dtype(grad_y)
    grad_x = grad_y.new_empty(frames, batch, row.gates * hidden)
    grad_last = grad_y.new_empty((frames, batch, hidden) if row.last_apart else 0)
    zeros = grad_y.new_zeros(batch, hidden, dtype=wide)
    # of the state after frame t, but for what y_t itself is given
    dh = zeros if grad_h_n is None else grad_h_n.to(wide)
    dc = zeros if grad_c_n is None else grad_c_n
    valid = None if lengths is None else torch.arange(frames, device=grad_y.device)[:, None, None] < lengths[:, None]
    for t in range(frames - 1, -1, -1):
        given = grad_y[t].to(wide)
        if valid is not None:
            given = torch.where(valid[t], given, 0.0)
        gates, last, new_dh, new_dc = _step_back(cell, dh + given, dc, saved[t], weight_hh, wide)
        if valid is not None:
            gates = torch.where(valid[t], gates, 0.0)
            last = torch.where(valid[t], last, 0.0) if row.last_apart else last
            new_dh, new_dc = torch.where(valid[t], new_dh, dh), torch.where(valid[t], new_dc, dc)
        grad_x[t] = gates
        if row.last_apart:
            grad_last[t] = last
        dh, dc = new_dh, new_dc
    return grad_x, grad_last, dh.to(grad_y.dtype), dc.clone() if row.carries_c else dc.new_empty(0)


def _step_back(
    cell: str, dh: Tensor, dc: Tensor, saved: Tensor, weight_hh: Tensor, wide: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x_t and of the last gate's product, in the tensors' dtype, then dh and dc before it."""
    dtype, hidden = saved.dtype, saved.shape[2]
    if cell == "lstm":
        i, f, g, o, c = saved.to(wide).unbind(1)
        tanh_c = torch.addcmul(f * c, i, g).tanh()
        dc = dc + dh * o * (1 - tanh_c * tanh_c)
        gates = [dc * g * i * (1 - i), dc * c * f * (1 - f), dc * i * (1 - g * g), dh * tanh_c * o * (1 - o)]
        grad = torch.cat(gates, dim=1).to(dtype)
        return grad, grad, (grad @ weight_hh).to(wide), dc * f
    r, z, n, q, h = saved.to(wide).unbind(1)
    two = 2 * hidden
    d_n, d_z = dh * (1 - z) * (1 - n * n), dh * (h - n) * z * (1 - z)
    if cell == "gru_after":
        grad = torch.cat([d_n * q * r * (1 - r), d_z, d_n], dim=1).to(dtype)
        last = (d_n * r).to(dtype)
        back = (torch.cat([grad[:, :two], last], dim=1) @ weight_hh).to(wide)
    else:
        last = d_n.to(dtype)
        reset = (last @ weight_hh[two:]).to(wide)  # of r h
        grad = torch.cat([reset * h * r * (1 - r), d_z, d_n], dim=1).to(dtype)
        back = (grad[:, :two] @ weight_hh[:two]).to(wide) + reset * r
    return grad, last, back + dh * z, dc
