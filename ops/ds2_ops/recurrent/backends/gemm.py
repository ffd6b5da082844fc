"""The recurrence as one or two matrix products a time step: the CPU path, the path for any GPU, and the baseline.

It has no autograd and does not synchronise with the host, so a CUDA graph can record it. Where tensors are 16-bit,
everything but the products is float32. Shape letters: T frames, B batch, H hidden, G gates, S saved values.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ds2_ops.checks import valid_frames, without_padding
from ds2_ops.recurrent.backends.reference import BackwardInputs, Gradients, Inputs, Outputs, time_loop
from ds2_ops.recurrent.cells import CELLS, Cell, Options


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype of c and of a cell's sums: float32, or float64 where x is."""
    return torch.promote_types(x.dtype, torch.float32)


def forward(inputs: Inputs, options: Options, save: bool = False) -> Outputs:
    """Run the forward time loop; arguments and returns are those of `persistent.forward`, in one direction.

    c0 and c_n are float64 where x is.
    """
    x, weight_hh = inputs[:2]
    cell = CELLS[options.cell]
    if cell.gates == 1:
        return *_forward_in_place(inputs, options), None, None
    if _in_place(x, cell) and not _has_tangents(*inputs[:5]):
        run = _lstm_forward if cell.carries_c else _gru_forward
        return run(inputs, save)
    saved = x.new_empty(*x.shape[:2], cell.saved, weight_hh.shape[1]) if save else None
    y, h_n, c_n = time_loop(cell, inputs, options.clip, wide_dtype(x), saved)
    return y, h_n, c_n if cell.carries_c else None, saved


def _forward_in_place(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
    """The time loop of a cell of one gate: two torch calls a step."""
    x, weight_hh, _, h0, _, lengths = inputs
    frames, batch, hidden = x.shape
    activate_ = CELLS[options.cell].activate_
    assert activate_ is not None
    first = _state_before(h0, x, hidden)
    y = _aligned(frames, batch, hidden, x).copy_(x)
    weight_t = weight_hh.t()
    previous = first
    for state in y.unbind(0):
        state.addmm_(previous, weight_t)
        activate_(state, options.clip)
        previous = state
    return _ended(y, previous, first, lengths)


def backward_data(inputs: BackwardInputs, options: Options) -> Gradients:
    """Run the time loop backwards; arguments and returns are those of `persistent.backward_data`, in one direction."""
    saved = inputs[4]
    if saved is None:
        grad_x, grad_h0 = _backward_from_output(inputs, options)
        return grad_x, None, grad_h0, None
    if _in_place(inputs[0], cell := CELLS[options.cell]):
        run = _lstm_backward if cell.carries_c else _gru_backward
        return run(inputs, saved)
    return _backward_from_saved(inputs, saved, options)


def _backward_from_output(inputs: BackwardInputs, options: Options) -> tuple[Tensor, Tensor]:
    """dpre_t = (dy_t + [t = length - 1] dh_n + W^T dpre_(t+1)) f'(y_t): two torch calls a step, both in place."""
    grad_y, grad_h_n, _, y, _, weight_hh, lengths = inputs
    backward_ = CELLS[options.cell].backward_
    assert backward_ is not None
    # grad_x starts at 0 at padding, and the loop, which meets the padding first, keeps it there whatever f' is.
    grad_x, grad_h0 = _grad_of_states(grad_y, grad_h_n, lengths)
    following: Tensor | None = None
    for grad, state in zip(reversed(grad_x.unbind(0)), reversed(y.unbind(0)), strict=True):
        if following is not None:
            grad.addmm_(following, weight_hh)
        backward_(grad, state, options.clip)
        following = grad
    if following is not None:
        grad_h0.addmm_(following, weight_hh)
    return grad_x.contiguous(), grad_h0.contiguous()


def _grad_of_states(grad_y: Tensor, grad_h_n: Tensor | None, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradient of each state but for what comes from the next step: (T, B, H), 0 at padding, and that of h0."""
    frames, batch, hidden = grad_y.shape
    grad = _aligned(frames, batch, hidden, grad_y).copy_(grad_y)
    grad_h0 = _aligned(1, batch, hidden, grad_y)[0].zero_()
    if lengths is not None:
        grad.masked_fill_(~valid_frames(lengths, frames), 0.0)
    if grad_h_n is not None:
        if not frames:
            grad_h0.copy_(grad_h_n)
        elif lengths is None:
            grad[-1].add_(grad_h_n)
        else:
            empty = (lengths == 0)[:, None]
            grad[_last_frame(lengths)] += torch.where(empty, 0.0, grad_h_n)
            grad_h0.copy_(torch.where(empty, grad_h_n, 0.0))
    return grad, grad_h0


def _backward_from_saved(inputs: BackwardInputs, saved: Tensor, options: Options) -> Gradients:
    grad_y, grad_h_n, grad_c_n, _, _, weight_hh, lengths = inputs
    frames, batch, hidden = grad_y.shape
    cell, wide = CELLS[options.cell], wide_dtype(grad_y)
    backward = cell.backward
    assert backward is not None
    grad_x = grad_y.new_empty(frames, batch, cell.gates * hidden)
    grad_last = grad_y.new_empty(frames, batch, hidden) if cell.last_apart else None
    zeros = grad_y.new_zeros(batch, hidden, dtype=wide)
    dh = zeros if grad_h_n is None else grad_h_n.to(wide)  # of the state after a frame, without the gradient of its y
    dc = zeros if grad_c_n is None else grad_c_n
    valid = None if lengths is None else valid_frames(lengths, frames)
    for t in range(frames - 1, -1, -1):
        grad = grad_y[t].to(wide)
        if valid is not None:
            grad = torch.where(valid[t], grad, 0.0)
        gates, last, new_dh, new_dc = backward(dh + grad, dc, saved[t], weight_hh, wide)
        if valid is not None:
            gates = torch.where(valid[t], gates, 0.0)
            last = torch.where(valid[t], last, 0.0) if cell.last_apart else last
            new_dh, new_dc = torch.where(valid[t], new_dh, dh), torch.where(valid[t], new_dc, dc)
        grad_x[t] = gates
        if grad_last is not None:
            grad_last[t] = last
        dh, dc = new_dh, new_dc
    return grad_x, grad_last, dh.to(grad_y.dtype, copy=True), dc.clone() if cell.carries_c else None


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


def _in_place(x: Tensor, cell: Cell) -> bool:
    """Whether the loops below run a cell with gates: on a CPU, where small tensors cost their calls and allocations.

    They give the results of the cell's `forward` and `backward` up to rounding, in fewer calls a step, all in place:
    rows of a product are independent, so a step need not look at lengths, and what a backward step does not need from
    the step before is computed over all frames. Only these loops read what they saved.
    """
    return x.device.type == "cpu" and x.dtype == wide_dtype(x) and cell.name in ("lstm", "gru_after")


def _has_tangents(*inputs: Tensor | None) -> bool:
    """Whether forward-mode derivatives are wanted, which operations with a given output do not have."""
    unpack: Any = forward_ad.unpack_dual
    return any(unpack(one).tangent is not None for one in inputs if one is not None)


def _lstm_forward(inputs: Inputs, save: bool) -> Outputs:
    """The steps of `cells.CELLS["lstm"]`; saves i, f, g, o, and c before each step."""
    x, weight_hh, _, h0, c0, lengths = inputs
    x, frames, batch, hidden = without_padding(x, lengths), *x.shape[:2], weight_hh.shape[1]
    memory, y = _aligned(frames if save else 1, batch, 5 * hidden, x), _aligned(frames, batch, hidden, x)
    c = _aligned(frames + 1, batch, hidden, x)
    first = h = _state_before(h0, x, hidden)
    c[0].zero_() if c0 is None else c[0].copy_(c0)
    weight_t, (old_c, *new_cs) = weight_hh.t(), c.unbind(0)
    parts = _parts(memory, frames, hidden, (0, 4), (0, 2), (0, 1), (1, 2), (2, 3), (3, 4))
    for frame, (gates, i_and_f, i, f, g, o), new_c, new_h in zip(x.unbind(0), parts, new_cs, y.unbind(0), strict=True):
        torch.addmm(frame, h, weight_t, out=gates)
        i_and_f.sigmoid_()
        g.tanh_()
        o.sigmoid_()
        torch.mul(f, old_c, out=new_c).addcmul_(i, g)
        h = torch.tanh(new_c, out=new_h).mul_(o)
        old_c = new_c
    saved = _saved(memory, c[:-1]) if save else None
    c_n = c[-1].clone() if lengths is None else c[lengths.long(), torch.arange(batch, device=c.device)]
    return *_ended(y, h, first, lengths), c_n, saved


def _lstm_backward(inputs: BackwardInputs, saved: Tensor) -> Gradients:
    grad_y, grad_h_n, grad_c_n, _, _, weight_hh, lengths = inputs
    frames, batch, hidden = grad_y.shape
    dhs, grad_h0 = _grad_of_states(grad_y, grad_h_n, lengths)
    i, f, g, o, c = saved.unbind(2)
    tanh_c = (f * c).addcmul_(i, g).tanh_()
    grad_x = _aligned(frames, batch, 4 * hidden, grad_y)
    of_i, of_f, of_g, of_o = grad_x.chunk(4, 2)
    torch.mul(_sigmoid_slope(i), g, out=of_i)
    torch.mul(_sigmoid_slope(f), c, out=of_f)
    torch.mul(_tanh_slope(g), i, out=of_g)
    torch.mul(_sigmoid_slope(o), tanh_c, out=of_o)
    slopes = _tanh_slope(tanh_c).mul_(o)
    dc = torch.zeros_like(grad_h0, memory_format=torch.contiguous_format)
    weight_hh = _by_columns(weight_hh)
    ends = {} if grad_c_n is None else _rows_by_end(frames, lengths)
    steps = zip(*(part.unbind(0) for part in (dhs, grad_x, slopes, f)), strict=True)
    following: Tensor | None = None
    for t, (dh, grad, slope, forget) in reversed(list(enumerate(steps, 1))):
        if following is not None:
            dh.addmm_(following, weight_hh)
        if t in ends and grad_c_n is not None:
            dc[ends[t]] = grad_c_n[ends[t]]
        dc.addcmul_(dh, slope)
        grad[:, : 3 * hidden].view(batch, 3, hidden).mul_(dc[:, None])
        grad[:, 3 * hidden :].mul_(dh)
        dc.mul_(forget)
        following = grad
    if following is not None:
        grad_h0.addmm_(following, weight_hh)
    if 0 in ends and grad_c_n is not None:
        dc[ends[0]] = grad_c_n[ends[0]]
    return grad_x.contiguous(), None, grad_h0.contiguous(), dc


def _gru_forward(inputs: Inputs, save: bool) -> Outputs:
    """The steps of `cells.CELLS["gru_after"]`; saves r, z, W_n h + b, n, and h before each step."""
    x, weight_hh, bias_hn, h0, _, lengths = inputs
    x, frames, batch, hidden = without_padding(x, lengths), *x.shape[:2], weight_hh.shape[1]
    memory, y = _aligned(frames if save else 1, batch, 5 * hidden, x), _aligned(frames, batch, hidden, x)
    first = h = _state_before(h0, x, hidden)
    bias = x.new_zeros(3 * hidden)
    if bias_hn is not None:
        bias[2 * hidden :] = bias_hn
    weight_t, frames_of = weight_hh.t(), (x[:, :, : 2 * hidden].unbind(0), x[:, :, 2 * hidden :].unbind(0))
    parts = _parts(memory, frames, hidden, (0, 3), (0, 2), (0, 1), (1, 2), (2, 3), (3, 4))
    for of_r_and_z, of_n, (products, r_and_z, r, z, product, n), new_h in zip(
        *frames_of, parts, y.unbind(0), strict=True
    ):
        torch.addmm(bias, h, weight_t, out=products)
        r_and_z.add_(of_r_and_z).sigmoid_()
        torch.addcmul(of_n, r, product, out=n).tanh_()
        h = torch.lerp(n, h, z, out=new_h)
    saved = _saved(memory, torch.cat([first[None], y])[:-1]) if save else None
    return *_ended(y, h, first, lengths), None, saved


def _gru_backward(inputs: BackwardInputs, saved: Tensor) -> Gradients:
    grad_y, grad_h_n, _, _, _, weight_hh, lengths = inputs
    frames, batch, hidden = grad_y.shape
    dhs, grad_h0 = _grad_of_states(grad_y, grad_h_n, lengths)
    r, z, product, n, h = saved.unbind(2)
    grads = _aligned(frames, batch, 3 * hidden, grad_y)  # of the recurrent products; each is dh times a factor
    of_r, of_z, of_product = grads.chunk(3, 2)
    slope = _tanh_slope(n).mul_(1 - z)
    torch.mul(slope, r, out=of_product)
    torch.mul(_sigmoid_slope(r).mul_(product), slope, out=of_r)
    torch.mul(_sigmoid_slope(z), h - n, out=of_z)
    weight_hh = _by_columns(weight_hh)
    steps = zip(*(part.unbind(0) for part in (dhs, grads, z)), strict=True)
    following: tuple[Tensor, ...] | None = None
    for dh, grad, update in reversed(list(steps)):
        if following is not None:
            dh.addcmul_(*following[:2]).addmm_(following[2], weight_hh)
        grad.view(batch, 3, hidden).mul_(dh[:, None])
        following = dh, update, grad
    if following is not None:
        grad_h0.addcmul_(*following[:2]).addmm_(following[2], weight_hh)
    grad_last = of_product.clone(memory_format=torch.contiguous_format)  # of one row too: it is overwritten next
    torch.mul(dhs, slope, out=of_product)
    return grads.contiguous(), grad_last, grad_h0.contiguous(), None


def _by_columns(matrix: Tensor) -> Tensor:
    """The matrix, stored by columns: libraries add up a vector's product with one of rows at half the precision."""
    return matrix.t().contiguous().t()


def _sigmoid_slope(y: Tensor) -> Tensor:
    """The derivative of the logistic function, from its value."""
    return (1 - y).mul_(y)


def _tanh_slope(y: Tensor) -> Tensor:
    """The derivative of tanh, from its value."""
    return torch.addcmul(y.new_ones(()), y, y, value=-1)


def _state_before(state: Tensor | None, x: Tensor, hidden: int) -> Tensor:
    """The first state (B, H), aligned as those of all steps."""
    first = _aligned(1, x.shape[1], hidden, x)[0]
    return first.zero_() if state is None else first.copy_(state)


def _parts(memory: Tensor, frames: int, hidden: int, *spans: tuple[int, int]) -> list[tuple[Tensor, ...]]:
    """For each step the views (B, n H) of spans of its values; `memory` is of every step, or one that all use."""
    views = [memory[:, :, first * hidden : end * hidden].unbind(0) for first, end in spans]
    return list(zip(*views, strict=True)) * (1 if len(memory) == frames else frames)


def _saved(memory: Tensor, before: Tensor) -> Tensor:
    """(T, B, S, H) of `memory`, with the states (T, B, H) before each step as the last of each."""
    saved = memory.view(*before.shape[:2], 5, before.shape[2])
    saved[:, :, -1] = before
    return saved.contiguous()


def _ended(y: Tensor, last: Tensor, first: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """y with 0 at padding, and the state after each utterance's last frame.

    Args:
        y: (T, B, H) of a loop that did not look at lengths. Rows of a product are independent: what it computed at
            padding reached no valid frame, and is erased now.
        last, first: (B, H) after the last frame and before the first.
        lengths: (B,), or None.
    """
    h_n = last.clone(memory_format=torch.contiguous_format)
    if lengths is not None and len(y):
        h_n = torch.where((lengths == 0)[:, None], first, y[_last_frame(lengths)])
        y.masked_fill_(~valid_frames(lengths, len(y)), 0.0)
    return y.contiguous(), h_n


def _rows_by_end(frames: int, lengths: Tensor | None) -> Mapping[int, Tensor | slice]:
    """The utterances of each length."""
    if lengths is None:
        return {frames: slice(None)}
    return {end: (lengths == end).nonzero()[:, 0] for end in set(lengths.tolist())}
