"""The row convolution as shifted multiply-adds over blocks of time: the CPU path, and the fallback of any device.

Products are summed in float32 (float64 for float64) in the order of the taps, whatever block a frame falls into, so a
stream gives the same bits as the whole. Shape letters: T frames, B batch, H hidden, K = tau + 1 taps.
"""

import torch
from torch import Tensor

from ds2_ops.lengths import valid_frames

# A block of frames, its sum and its taps stay in a CPU's last-level cache; a GPU wants few and large launches.
_BLOCK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 22}


def forward(x: Tensor, weight: Tensor, lengths: Tensor | None) -> Tensor:
    """Sum w_j * x_(t+j) over the taps j.

    Args:
        x: (T, B, H), contiguous.
        weight: (H, K) of the same dtype and device.
        lengths: (B,) int32 on the device of ``x``, or None.

    Returns:
        y (T, B, H), 0 at padding.
    """
    x = _masked(x, lengths)
    y = torch.empty_like(x)
    taps = _accumulated(weight.t().contiguous())
    for start, stop in _blocks(x):
        source = _accumulated(x[start : stop + len(taps) - 1])
        total = source[: stop - start] * taps[0]
        for j in range(1, min(len(taps), len(source))):
            ahead = source[j : j + stop - start]
            total[: len(ahead)].addcmul_(ahead, taps[j])
        y[start:stop] = total
    return y


def backward(grad_y: Tensor, x: Tensor, weight: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute grad_x_t = sum_j w_j * grad_y_(t-j) and grad_w_j = sum_(t,b) grad_y_t * x_(t+j).

    Args:
        grad_y: (T, B, H); its padding is ignored, whatever it holds.
        x, weight, lengths: as given to :func:`forward`.

    Returns:
        grad_x (T, B, H), 0 at padding, and grad_weight (H, K).
    """
    grad_y, x = _masked(grad_y, lengths), _masked(x, lengths)
    grad_x = torch.empty_like(x)
    taps = _accumulated(weight.t().contiguous())
    blocks = _blocks(x)
    # One running product per tap, as large as a block: half the memory traffic of a product and a sum for each block.
    running = x.new_zeros(len(taps), *x[: blocks[0][1] if blocks else 0].shape, dtype=taps.dtype)
    for start, stop in blocks:
        first = max(0, start - len(taps) + 1)
        gradient, source = _accumulated(grad_y[first:stop]), _accumulated(x[start:stop])
        total = torch.zeros_like(source)
        for j in range(min(len(taps), stop)):
            missing = max(0, j - start)  # frames of this block that have no frame j before them
            behind = gradient[start - first - j + missing : stop - first - j]
            total[missing:].addcmul_(behind, taps[j])
            running[j, missing : stop - start].addcmul_(behind, source[missing:])
        grad_x[start:stop] = total
    return _masked(grad_x, lengths), running.sum((1, 2)).t().contiguous().to(weight.dtype)


def _masked(x: Tensor, lengths: Tensor | None) -> Tensor:
    return x if lengths is None else torch.where(valid_frames(lengths, x.shape[0])[:, :, None], x, 0.0)


def _blocks(x: Tensor) -> list[tuple[int, int]]:
    frames, batch, hidden = x.shape
    block = max(1, _BLOCK_ELEMENTS.get(x.device.type, 1 << 22) // max(1, batch * hidden))
    return [(start, min(start + block, frames)) for start in range(0, frames, block)]


def _accumulated(x: Tensor) -> Tensor:
    return x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
