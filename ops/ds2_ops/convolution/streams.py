"""The convolution on a block of streams, which lie end to end as one utterance; for inference.

Shape letters: B streams, C = 32 channels or 1, F bins, T frames, K x J taps over bins and frames, S stride over bins.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from ds2_ops.convolution import op
from ds2_ops.convolution.carried import ConvInput, joined, windows
from ds2_ops.convolution.kernels import CHANNELS

_GROUPS = (16, 32, 64, 112, 176)  # frames of a warp group: each is a kernel to build
_BLOCKS = 132  # multiprocessors of an H200: one block each


def why_not(weight: Tensor, stride: tuple[int, ...]) -> str | None:
    """Say why `StreamConvolution` cannot take this weight (32, C, K, J); None if it can."""
    over_frames = stride[1] if weight.shape[1] == 1 else 1
    return op.why_not(weight.new_empty(1, weight.shape[1], 1, 1), _whole(weight), (stride[0], over_frames))


class StreamConvolution:
    """A convolution whose bits depend neither on the batch nor on the length of a block.

    The kernel adds up a frame's products in one order; so it does for any tile.

    Args:
        weight: (32, C, K, J) bfloat16, for which `why_not` finds no reason.
        stride: S and n, over bins and frames. Of 32 channels the kernel computes the frames between too.
    """

    def __init__(self, weight: Tensor, stride: tuple[int, ...]) -> None:
        self.taps, self.strides = weight.shape[3], stride
        weight = _whole(weight)
        kernel = op.folded_weight(weight) if weight.shape[1] == 1 else weight
        self.first, self.step = -(kernel.shape[2] // 2), 2 * (1 if weight.shape[1] == 1 else stride[0])
        self.packed = op.pack(kernel, self.step // 2, backward=False)

    def __call__(self, block: ConvInput, table: Tensor, slots: Tensor, needed: int) -> Tensor:
        """Map the cached and the new frames to the frames for which the whole kernel lies in both.

        Args:
            block: (B, F, T, C), bfloat16 to be.
            table, slots, needed: as of `ds2_ops.convolution.carried.joined`.

        Returns:
            (B, ceil(F / S), (needed - J) // n + 1, 32) with its memory in the order (F, B, T, C), frames n apart.
        """
        batch, bins, _, channels = block.x.shape
        after = (needed - self.taps) // self.strides[1] + 1
        if channels == 1:  # taps over frames are channels, so frames of different streams do not meet
            begin, step, length, rows = 0, 1, after, windows(block, table, slots, self.strides[1], after)
        else:
            begin, step, length = self.taps // 2, self.strides[1], needed
            rows = joined(block, table, slots, needed).transpose(0, 1)
        ends_together = rows.reshape(1, rows.shape[0], batch * length, CHANNELS)
        y = rows.new_empty(1, -(-bins // self.strides[0]), batch * length, CHANNELS)
        group = _group(-(-y.shape[1] // 2), batch * length)
        op.correlate(ends_together, self.packed, y, step=self.step, first=self.first, group=group)
        return y.view(-1, batch, length, CHANNELS)[:, :, begin : begin + after * step : step].transpose(0, 1)


def _whole(weight: Tensor) -> Tensor:
    """Taps over bins as the kernel has them, 4 n + 1, the others 0."""
    return functional.pad(weight, (0, 0, 1, 1)) if weight.shape[2] % 4 == 3 else weight


def _group(pairs: int, frames: int) -> int:
    """Frames of a warp group, two groups a block: the fewest with which all blocks run at once."""
    tiles = max(1, _BLOCKS // pairs)
    return next((group for group in _GROUPS if -(-frames // (2 * group)) <= tiles), _GROUPS[-1])
