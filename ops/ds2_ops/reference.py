"""The equations as they stand in the papers, one time step after the other, for any dtype and device.

Every line is ordinary differentiable PyTorch, so gradcheck and torch.nn check this file, and this file checks the ops.
Shape letters: T frames, B batch, H hidden.
"""

import torch
from torch import Tensor


def valid_frames(lengths: Tensor, frames: int) -> Tensor:
    """Mark the frames that belong to an utterance.

    Args:
        lengths: (B,) integer tensor, frames per utterance.
        frames: T, the padded number of frames.

    Returns:
        (T, B) bool tensor on the device of ``lengths``, True where t < length.
    """
    return torch.arange(frames, device=lengths.device)[:, None] < lengths


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
    outputs = []
    for t in range(frames):
        new = _activate(x[t] + state @ weight_hh.T, nonlinearity, clip)
        outputs.append(torch.where(valid[t], new, 0.0))
        state = torch.where(valid[t], new, state)
    return (torch.stack(outputs) if outputs else x.clone()), state.clone()


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


def _activate(pre: Tensor, nonlinearity: str, clip: float) -> Tensor:
    if nonlinearity == "tanh":
        return torch.tanh(pre)
    if nonlinearity == "relu":
        return torch.relu(pre)
    return torch.clamp(pre, 0.0, clip)
