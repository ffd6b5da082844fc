"""The recurrence as one matrix product a time step: the CPU path, the path for any GPU, and the honest baseline.

Two torch calls a step, both in place, no autograd, no host synchronisation: CUDA-graph capturable.
Shape letters: T frames, B batch, H hidden.
"""

import torch
from torch import Tensor

from ds2_ops.recurrent.cells import CELLS
from ds2_ops.recurrent.options import Options

_ROW_BYTES = 64  # BLAS libraries choose kernels by alignment; equal alignment of every h_t keeps a split of T bit-exact


def forward(
    x: Tensor, weight_hh: Tensor, h0: Tensor | None, lengths: Tensor | None, options: Options
) -> tuple[Tensor, Tensor]:
    """Run the forward time loop.

    Args:
        x: (T, B, H) pre-activations, contiguous.
        weight_hh: (H, H) of the same dtype and device.
        h0: (B, H) first state, or None for zeros.
        lengths: (B,) int32 on the device of ``x``, or None when all utterances have T frames.
        options: the nonlinearity and its clip.

    Returns:
        y (T, B, H), 0 at padding, and h_n (B, H), the state after each utterance's last frame.
    """
    frames, batch, hidden = x.shape
    cell = CELLS[options.nonlinearity]
    first = _aligned(1, batch, hidden, x)[0]
    first.zero_() if h0 is None else first.copy_(h0)
    y = _aligned(frames, batch, hidden, x).copy_(x)
    weight_t = weight_hh.t()
    previous = first
    for state in y.unbind(0):
        state.addmm_(previous, weight_t)
        cell.forward_(state, options.clip)
        previous = state
    h_n = previous.clone(memory_format=torch.contiguous_format)
    if lengths is not None and frames:
        # Rows of a product are independent: what the loop made of padding never met a valid frame, and is erased here.
        h_n = torch.where((lengths == 0)[:, None], first, y[_last_frame(lengths)])
        y.masked_fill_(_padding(lengths, frames), 0.0)
    return y.contiguous(), h_n


def backward_data(
    grad_y: Tensor, grad_h_n: Tensor | None, y: Tensor, weight_hh: Tensor, lengths: Tensor | None, options: Options
) -> tuple[Tensor, Tensor]:
    """Run the time loop backwards: dpre_t = (dy_t + [t = length - 1] dh_n + W^T dpre_(t+1)) * f'(y_t).

    Args:
        grad_y: (T, B, H); its padding is ignored, whatever it holds.
        grad_h_n: (B, H), or None for zeros.
        y: (T, B, H), output of :func:`forward`, from which alone the nonlinearities' slopes come.
        weight_hh, lengths, options: as given to :func:`forward`.

    Returns:
        grad_x (T, B, H), 0 at padding, and grad_h0 (B, H).
    """
    frames, batch, hidden = y.shape
    cell = CELLS[options.nonlinearity]
    grad_x = _aligned(frames, batch, hidden, y).copy_(grad_y)
    grad_h0 = _aligned(1, batch, hidden, y)[0].zero_()
    if lengths is not None:
        # grad_x starts at 0 at padding, and the loop, which meets the padding first, keeps it there whatever f' is.
        grad_x.masked_fill_(_padding(lengths, frames), 0.0)
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
        cell.backward_(grad, state, options.clip)
        following = grad
    if following is not None:
        grad_h0.addmm_(following, weight_hh)
    return grad_x.contiguous(), grad_h0.contiguous()


def _padding(lengths: Tensor, frames: int) -> Tensor:
    return (torch.arange(frames, device=lengths.device)[:, None] >= lengths)[:, :, None]


def _last_frame(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Index of each utterance's last frame in a (T, B, H) tensor; frame 0 stands in for an empty utterance."""
    return (lengths - 1).clamp_min(0).long(), torch.arange(lengths.shape[0], device=lengths.device)


def _aligned(frames: int, batch: int, hidden: int, like: Tensor) -> Tensor:
    """Empty (T, B, H) whose steps are contiguous and start at multiples of 64 bytes."""
    step = batch * hidden
    multiple = _ROW_BYTES // like.element_size()
    storage = like.new_empty(frames, -(-step // multiple) * multiple)
    return storage[:, :step].view(frames, batch, hidden)
