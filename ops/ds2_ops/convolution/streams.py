"""The convolution on blocks of streams, for inference: cached frames of the previous block, then those of this block.

The streams of a block lie end to end as one utterance of the kernel.

Shape letters: B streams, F bins, T new frames, R cached frames, C channels, P slots, K x J taps over bins and frames,
S x n strides over bins and frames.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ds2_ops.convolution import op
from ds2_ops.convolution.op import CHANNELS
from ds2_ops.jit.launch import Launch, multiprocessors, names, parameters, run, translation_unit, why_not_early

_GROUPS = (16, 32, 64, 112, 176)  # frames of a warp group; each is a kernel to build
_CHUNK, _THREADS = 8, 128  # numbers of a load; threads of a block
_SPAN = "const long long* heard, const long long* ends, int frames, int delay"
_INPUT = f"const uint4* x, int of_bin, int of_stream, int of_frame, const uint4* bias, float clip, {_SPAN}"
_TABLE = "const long long* places"
_KERNELS = {  # parameters of each, and the first arguments of its call
    "join": (
        f"{_INPUT}, uint4* table, {_TABLE}, uint4* out, int batch, int bins, int carried, int needed",
        "{x, of_bin, of_stream, of_frame, bias, clip, {heard, ends, frames, delay}}",
    ),
    "flatten": (
        f"{_INPUT}, unsigned short* out, int batch, int bins, int chunks",
        "{x, of_bin, of_stream, of_frame, bias, clip, {heard, ends, frames, delay}}",
    ),
    "windows": (
        f"const float* x, {_SPAN}, unsigned short* table, {_TABLE}, uint4* out, int batch, int bins, int carried, "
        "int count, int stride",
        "x, {heard, ends, frames, delay}",
    ),
}


@dataclass(frozen=True)
class ConvInput:
    """The next block of streams: the output of a layer, whose bias, clip and mask are applied when it is read.

    Attributes:
        x: (B, F, T, C).
        dtype: of the result.
        bias, clip: (C,) added to x before it is clipped to 0 .. `clip`; None: neither.
        blocks, ends: (B,) int64: previous blocks of each stream, and its number of frames. Frames outside of the stream
            and the cache before its first block are read as 0. None: all frames are valid.
        delay: frames by which x is late.
    """

    x: Tensor
    dtype: torch.dtype
    bias: Tensor | None = None
    clip: float = 0.0
    blocks: Tensor | None = None
    ends: Tensor | None = None
    delay: int = 0

    def first(self, channels: int) -> ConvInput:
        """Return its first channels."""
        if channels == self.x.shape[3]:
            return self
        return replace(self, x=self.x[..., :channels], bias=None if self.bias is None else self.bias[:channels])

    def values(self) -> Tensor:
        """Return (B, F, T, C) with bias, clip and mask applied."""
        x = self.x.to(self.dtype)
        if self.bias is not None:
            x = functional.hardtanh(x + self.bias, 0.0, self.clip)
        if self.blocks is not None and self.ends is not None:
            frames = x.shape[2]
            at = (self.blocks * frames - self.delay)[:, None] + torch.arange(frames, device=x.device)
            inside = (at >= 0) & (at < self.ends[:, None])
            x = torch.where(inside[:, None, :, None], x, 0.0)
        return x


@torch.no_grad()
def join(block: ConvInput, table: Tensor, slots: Tensor, needed: int) -> Tensor:
    """Return the first `needed` of the cached and the new frames; cache the last R for the next block.

    Args:
        block: (B, F, T, C).
        table: (P, F, R, C) contiguous, of the dtype of `block`; updated.
        slots: (B,) int64, all different: the slot of each stream.
        needed: frames, at most R + T.

    Returns:
        (B, F, needed, C); the kernel lays it out in memory as (F, B, T, C).
    """
    batch, bins, frames, channels = block.x.shape
    cached = table.shape[2]
    if channels != CHANNELS or why_not_block(block) is not None:
        cache = table.index_select(0, slots)
        if block.blocks is not None:
            cache = torch.where((block.blocks > 0).view(-1, 1, 1, 1), cache, 0.0)
        whole = torch.cat([cache, block.values()], 2)
        table.index_copy_(0, slots, whole[:, :, frames:])
        return whole[:, :, :needed]
    out = table.new_empty(bins, batch, needed, channels)
    sizes = (batch, bins, cached, needed)
    _run("join", 32 * bins * batch, [*_arguments(block), table, slots, out, *sizes], block)
    return out.transpose(0, 1)


@torch.no_grad()
def flatten(block: ConvInput) -> Tensor:
    """Return the block as (T, B, C F), the input of recurrent layers."""
    batch, bins, frames, channels = block.x.shape
    if why_not_block(block) is not None:
        return block.values().permute(2, 0, 3, 1).reshape(frames, batch, channels * bins)
    out = torch.empty(frames, batch, channels * bins, dtype=block.dtype, device=block.x.device)
    sizes = (batch, bins, channels // _CHUNK)
    _run("flatten", out.numel() // _CHUNK, [*_arguments(block), out, *sizes], block)
    return out


@torch.no_grad()
def join_windows(block: ConvInput, table: Tensor, slots: Tensor, stride: int, count: int) -> Tensor:
    """Join features of one channel as `join`, and return their first windows as `op.folded_windows` does.

    Args:
        block: (B, F, T, 1) float32.
        table, slots: as for `join`.
        stride: frames from one window to the next.
        count: number of windows.

    Returns:
        (ceil(F / 2), B, count, 32).
    """
    batch, bins, _, _ = block.x.shape
    if why_not_features(block) is not None:
        rows = join(block, table, slots, table.shape[2] + block.x.shape[2])
        return op.folded_windows(rows[..., 0], stride, count).flatten(3).transpose(0, 1)
    pairs = -(-bins // 2)
    out = table.new_empty(pairs, batch, count, 32)
    sizes = (batch, bins, table.shape[2], count, stride)
    _run("windows", 32 * pairs * batch, [block.x.contiguous(), *_span(block), table, slots, out, *sizes], block)
    return out


def why_not_block(block: ConvInput) -> str | None:
    """Say why the kernels cannot read the output of a layer of many channels; None if they can."""
    x = block.x
    if reason := _why_no_gpu(block):
        return reason
    if x.dtype != torch.bfloat16 or block.bias is None or x.stride(3) != 1 or x.numel() >= 1 << 31:
        return f"x is {x.dtype}, or has no bias: the kernels read the output of a convolution in bfloat16"
    unaligned = any(size % _CHUNK for size in (x.shape[3], *x.stride()[:3])) or x.data_ptr() % 16
    return f"{x.shape[3]} channels are not aligned in chunks of {_CHUNK}" if unaligned else None


def why_not_features(block: ConvInput) -> str | None:
    """Say why the kernel cannot read features; None if it can."""
    if reason := _why_no_gpu(block):
        return reason
    features = block.x.dtype == torch.float32 and block.x.shape[3] == 1 and block.bias is None
    return (
        None if features else f"x {tuple(block.x.shape)} is {block.x.dtype}: the kernel takes features of one channel"
    )


def _why_no_gpu(block: ConvInput) -> str | None:
    x = block.x
    if not x.is_cuda or block.dtype != torch.bfloat16 or x.numel() == 0:
        return f"the result is {block.dtype} on {x.device}, the kernels write bfloat16 on a CUDA GPU"
    return why_not_early(x.device)


def _span(block: ConvInput) -> list[Any]:
    return [block.blocks, None if block.blocks is None else block.ends, block.x.shape[2], block.delay]


def _arguments(block: ConvInput) -> list[Any]:
    x = block.x
    of_stream, of_bin, of_frame = (stride // _CHUNK for stride in x.stride()[:3])
    return [x, of_bin, of_stream, of_frame, block.bias, block.clip, *_span(block)]


def _run(name: str, threads: int, arguments: Sequence[Any], block: ConvInput) -> None:
    def what() -> str:
        return f"{name} of a block (B, F, T, C) = {tuple(block.x.shape)}"

    run(block_launch(name, -(-threads // _THREADS)), arguments, what, block.x.device)


@functools.lru_cache(maxsize=256)
def block_launch(name: str, blocks: int) -> Launch:
    """Make the launch of a kernel of csrc/convolution/carried.cuh."""
    declarations, first = _KERNELS[name]
    members = parameters(declarations)
    rest = names(members[[member for _, member in members].index("delay") + 1 :])
    source = translation_unit(
        "convolution/carried.cuh",
        members,
        f"    ds2::{name}<{_THREADS}>({first}, {rest});\n",
        launch_bounds=str(_THREADS),
    )
    return Launch(source, _THREADS, grid=blocks, early=True)


def why_not(weight: Tensor, stride: tuple[int, ...]) -> str | None:
    """Say why `StreamConvolution` does not support this weight (32, C, K, J); None if it does."""
    over_frames = stride[1] if weight.shape[1] == 1 else 1
    return op.why_not(weight.new_empty(1, weight.shape[1], 1, 1), _padded_taps(weight), (stride[0], over_frames))


class StreamConvolution:
    """A convolution whose bits depend neither on the batch nor on the length of a block.

    The kernel adds up the products of a frame in the same order in every tile.

    Args:
        weight: (32, C, K, J) bfloat16, for which `why_not` returns None.
        stride: S and n. For 32 channels the kernel also computes the frames between the strides.
    """

    def __init__(self, weight: Tensor, stride: tuple[int, ...]) -> None:
        self.taps, self.strides = weight.shape[3], stride
        weight = _padded_taps(weight)
        kernel = op.folded_weight(weight) if weight.shape[1] == 1 else weight
        self.first, self.step = -(kernel.shape[2] // 2), 2 * (1 if weight.shape[1] == 1 else stride[0])
        self.packed = op.pack(kernel, self.step // 2, backward=False)

    def __call__(self, block: ConvInput, table: Tensor, slots: Tensor, needed: int) -> Tensor:
        """Map the cached and the new frames to all frames whose window lies inside them.

        Args:
            block: (B, F, T, C), with a dtype of bfloat16.
            table, slots, needed: as for `join`.

        Returns:
            (B, ceil(F / S), (needed - J) // n + 1, 32), in memory (F, B, T, C), one frame for each stride n.
        """
        batch, bins, _, channels = block.x.shape
        count = (needed - self.taps) // self.strides[1] + 1
        if channels == 1:  # taps over frames are channels, so windows do not reach into the next stream
            begin, step, length, rows = 0, 1, count, join_windows(block, table, slots, self.strides[1], count)
        else:
            begin, step, length = self.taps // 2, self.strides[1], needed
            rows = join(block, table, slots, needed).transpose(0, 1)
        end_to_end = rows.reshape(1, rows.shape[0], batch * length, CHANNELS)
        y = rows.new_empty(1, -(-bins // self.strides[0]), batch * length, CHANNELS)
        group = _group(-(-y.shape[1] // 2), batch * length, multiprocessors(y.device))
        op.correlate(end_to_end, self.packed, y, step=self.step, first=self.first, group=group)
        return y.view(-1, batch, length, CHANNELS)[:, :, begin : begin + count * step : step].transpose(0, 1)


def _padded_taps(weight: Tensor) -> Tensor:
    """Pad the taps over bins with zeros to 4 n + 1."""
    return functional.pad(weight, (0, 0, 1, 1)) if weight.shape[2] % 4 == 3 else weight


def _group(pairs: int, frames: int, sms: int) -> int:
    """Return the frames of a warp group, two groups a block: the fewest with which all blocks run at once."""
    max_tiles = max(1, sms // pairs)
    return next((group for group in _GROUPS if -(-frames // (2 * group)) <= max_tiles), _GROUPS[-1])
