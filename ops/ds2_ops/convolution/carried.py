"""Input of a convolution on blocks of streams: frames cached from the block before, then those of the next block.

Shape letters: B streams, F bins, T new frames, R cached ones, C channels, P slots.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ds2_ops.convolution.kernels import CHANNELS
from ds2_ops.convolution.op import folded_windows
from ds2_ops.jit import runtime
from ds2_ops.jit.launch import Launch, device_index, run
from ds2_ops.jit.source import names, parameters, translation_unit

_CHUNK, _THREADS = 8, 128
_SPAN = "const long long* heard, const long long* ends, int frames, int delay"
_INPUT = f"const uint4* x, int of_bin, int of_stream, int of_frame, const uint4* bias, float clip, {_SPAN}"
_TABLE = "const long long* places"
_KERNELS = {  # what each takes, and its call
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
    """The next block of streams: the output of a layer, with what is still to be done to it.

    Attributes:
        x: (B, F, T, C).
        dtype: of the result.
        bias, clip: (C,) to be added, then all is clipped to 0 .. `clip`; None: nothing of both.
        blocks, ends: (B,) int64 blocks that each stream has had, and its frames; frames outside it count as 0, and
            so does the cache before its first block. None: all frames count.
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
        """Its first channels."""
        if channels == self.x.shape[3]:
            return self
        return replace(self, x=self.x[..., :channels], bias=None if self.bias is None else self.bias[:channels])

    def values(self) -> Tensor:
        """(B, F, T, C) with all of it done."""
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
def joined(block: ConvInput, table: Tensor, slots: Tensor, needed: int) -> Tensor:
    """The first `needed` of the cached and the new frames; the last R are cached for the next block.

    Args:
        block: (B, F, T, C).
        table: (P, F, R, C) contiguous, of the dtype of `block`; updated.
        slots: (B,) int64, all different: the slot of each stream.
        needed: frames, at most R + T.

    Returns:
        (B, F, needed, C), of the kernel with its memory in the order (F, B, T, C).
    """
    batch, bins, frames, channels = block.x.shape
    cached = table.shape[2]
    if channels != CHANNELS or why_not(block) is not None:
        old = table.index_select(0, slots)
        if block.blocks is not None:
            old = torch.where((block.blocks > 0).view(-1, 1, 1, 1), old, 0.0)
        whole = torch.cat([old, block.values()], 2)
        table.index_copy_(0, slots, whole[:, :, frames:])
        return whole[:, :, :needed]
    out = table.new_empty(bins, batch, needed, channels)
    sizes = (batch, bins, cached, needed)
    _run("join", 32 * bins * batch, [*_arguments(block), table, slots, out, *sizes], block)
    return out.transpose(0, 1)


@torch.no_grad()
def flattened(block: ConvInput) -> Tensor:
    """(T, B, C F) of (B, F, T, C), as recurrent layers take it."""
    batch, bins, frames, channels = block.x.shape
    if why_not(block) is not None:
        return block.values().permute(2, 0, 3, 1).reshape(frames, batch, channels * bins)
    out = torch.empty(frames, batch, channels * bins, dtype=block.dtype, device=block.x.device)
    sizes = (batch, bins, channels // _CHUNK)
    _run("flatten", out.numel() // _CHUNK, [*_arguments(block), out, *sizes], block)
    return out


@torch.no_grad()
def windows(block: ConvInput, table: Tensor, slots: Tensor, stride: int, count: int) -> Tensor:
    """As `joined`, of features of one channel: the first windows, as `ds2_ops.convolution.op.folded_windows` has them.

    Args:
        block: (B, F, T, 1) float32.
        table, slots: as of `joined`.
        stride: frames between windows.
        count: of windows.

    Returns:
        (ceil(F / 2), B, count, 32).
    """
    batch, bins, _, _ = block.x.shape
    if why_not_features(block) is not None:
        rows = joined(block, table, slots, table.shape[2] + block.x.shape[2])
        return folded_windows(rows[..., 0], stride, count).flatten(3).transpose(0, 1)
    pairs = -(-bins // 2)
    out = table.new_empty(pairs, batch, count, 32)
    sizes = (batch, bins, table.shape[2], count, stride)
    _run("windows", 32 * pairs * batch, [block.x.contiguous(), *_span(block), table, slots, out, *sizes], block)
    return out


def why_not(block: ConvInput) -> str | None:
    """Say why kernels do not take what a layer of many channels gives; None if they do."""
    x = block.x
    if reason := _why_no_gpu(block):
        return reason
    if x.dtype != torch.bfloat16 or block.bias is None or x.stride(3) != 1 or x.numel() >= 1 << 31:
        return f"x is {x.dtype}, or has no bias: the kernels take what a convolution in bfloat16 gives"
    odd = any(size % _CHUNK for size in (x.shape[3], *x.stride()[:3])) or x.data_ptr() % 16
    return f"{x.shape[3]} channels do not lie in chunks of {_CHUNK}" if odd else None


def why_not_features(block: ConvInput) -> str | None:
    """Say why the kernel does not take features; None if it does."""
    if reason := _why_no_gpu(block):
        return reason
    plain = block.x.dtype == torch.float32 and block.x.shape[3] == 1 and block.bias is None
    return None if plain else f"x {tuple(block.x.shape)} is {block.x.dtype}: the kernel takes features of one channel"


def _why_no_gpu(block: ConvInput) -> str | None:
    x = block.x
    if not x.is_cuda or block.dtype != torch.bfloat16 or x.numel() == 0:
        return f"the result is {block.dtype} on {x.device}"
    hopper = runtime.capability(device_index(x.device)) >= (9, 0)
    return None if hopper else "a kernel that starts early needs Hopper"


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
    """The launch of a kernel of csrc/convolution/carried.cuh by its name."""
    declared, first = _KERNELS[name]
    taken = parameters(declared)
    rest = names(taken[next(at for at, (_, one) in enumerate(taken) if one == "delay") + 1 :])
    source = translation_unit(
        "convolution/carried.cuh",
        taken,
        f"    ds2::{name}<{_THREADS}>({first}, {rest});\n",
        launch_bounds=str(_THREADS),
    )
    return Launch(source, _THREADS, grid=blocks, early=True)
