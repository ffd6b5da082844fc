"""Frames that streams carry from block to block, with those of their next block behind them.

Shape letters: B streams, F bins, T new frames, R carried ones, C channels, P places.
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
_GIVEN = f"const uint4* x, int of_bin, int of_stream, int of_frame, const uint4* bias, float clip, {_SPAN}"
_TABLE = "const long long* places"
_KERNELS = {  # what each takes, and its call
    "join": (
        f"{_GIVEN}, uint4* table, {_TABLE}, uint4* out, int batch, int bins, int carried, int needed",
        "{x, of_bin, of_stream, of_frame, bias, clip, {heard, ends, frames, delay}}",
    ),
    "flatten": (
        f"{_GIVEN}, unsigned short* out, int batch, int bins, int chunks",
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
    """The next block of streams as a layer gives it, with what is still to be done to it.

    Attributes:
        x: (B, F, T, C).
        dtype: of what is made of it.
        bias, clip: (C,) to be added, then all is clipped to 0 .. `clip`; None: nothing of both.
        blocks, ends: (B,) int64 blocks that each stream has heard, and its frames; frames outside it count as 0, and
            so does what a stream carries before its first block. None: all streams are amid.
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
def joined(given: ConvInput, table: Tensor, places: Tensor, needed: int) -> Tensor:
    """The first `needed` of the frames that streams carry and those that are given; their last R are carried on.

    Args:
        given: (B, F, T, C).
        table: (P, F, R, C) contiguous, of the dtype of `given`; updated.
        places: (B,) int64, all different: whose row is a stream's.
        needed: frames, at most R + T.

    Returns:
        (B, F, needed, C), of the kernel with its memory in the order (F, B, T, C).
    """
    batch, bins, frames, channels = given.x.shape
    carried = table.shape[2]
    if channels != CHANNELS or why_not(given) is not None:
        old = table.index_select(0, places)
        if given.blocks is not None:
            old = torch.where((given.blocks > 0).view(-1, 1, 1, 1), old, 0.0)
        whole = torch.cat([old, given.values()], 2)
        table.index_copy_(0, places, whole[:, :, frames:])
        return whole[:, :, :needed]
    out = table.new_empty(bins, batch, needed, channels)
    sizes = (batch, bins, carried, needed)
    _run("join", 32 * bins * batch, [*_arguments(given), table, places, out, *sizes], given)
    return out.transpose(0, 1)


@torch.no_grad()
def flattened(given: ConvInput) -> Tensor:
    """(T, B, C F) of (B, F, T, C), as recurrent layers take it."""
    batch, bins, frames, channels = given.x.shape
    if why_not(given) is not None:
        return given.values().permute(2, 0, 3, 1).reshape(frames, batch, channels * bins)
    out = torch.empty(frames, batch, channels * bins, dtype=given.dtype, device=given.x.device)
    sizes = (batch, bins, channels // _CHUNK)
    _run("flatten", out.numel() // _CHUNK, [*_arguments(given), out, *sizes], given)
    return out


@torch.no_grad()
def windows(given: ConvInput, table: Tensor, places: Tensor, stride: int, count: int) -> Tensor:
    """As `joined`, of features of one channel: the first windows, as `ds2_ops.convolution.op.folded_windows` has them.

    Args:
        given: (B, F, T, 1) float32.
        table, places: as of `joined`.
        stride: frames between windows.
        count: of windows.

    Returns:
        (ceil(F / 2), B, count, 32).
    """
    batch, bins, _, _ = given.x.shape
    if why_not_features(given) is not None:
        rows = joined(given, table, places, table.shape[2] + given.x.shape[2])
        return folded_windows(rows[..., 0], stride, count).flatten(3).transpose(0, 1)
    pairs = -(-bins // 2)
    out = table.new_empty(pairs, batch, count, 32)
    sizes = (batch, bins, table.shape[2], count, stride)
    _run("windows", 32 * pairs * batch, [given.x.contiguous(), *_span(given), table, places, out, *sizes], given)
    return out


def why_not(given: ConvInput) -> str | None:
    """Say why kernels do not take what a layer of many channels gives; None if they do."""
    x = given.x
    if reason := _why_no_gpu(given):
        return reason
    if x.dtype != torch.bfloat16 or given.bias is None or x.stride(3) != 1 or x.numel() >= 1 << 31:
        return f"x is {x.dtype}, or has no bias: the kernels take what a convolution in bfloat16 gives"
    odd = any(size % _CHUNK for size in (x.shape[3], *x.stride()[:3])) or x.data_ptr() % 16
    return f"{x.shape[3]} channels do not lie in chunks of {_CHUNK}" if odd else None


def why_not_features(given: ConvInput) -> str | None:
    """Say why the kernel does not take features; None if it does."""
    if reason := _why_no_gpu(given):
        return reason
    plain = given.x.dtype == torch.float32 and given.x.shape[3] == 1 and given.bias is None
    return None if plain else f"x {tuple(given.x.shape)} is {given.x.dtype}: the kernel takes features of one channel"


def _why_no_gpu(given: ConvInput) -> str | None:
    x = given.x
    if not x.is_cuda or given.dtype != torch.bfloat16 or x.numel() == 0:
        return f"what is made of x is {given.dtype} on {x.device}"
    hopper = runtime.capability(device_index(x.device)) >= (9, 0)
    return None if hopper else "a kernel that starts early needs Hopper"


def _span(given: ConvInput) -> list[Any]:
    return [given.blocks, None if given.blocks is None else given.ends, given.x.shape[2], given.delay]


def _arguments(given: ConvInput) -> list[Any]:
    x = given.x
    of_stream, of_bin, of_frame = (stride // _CHUNK for stride in x.stride()[:3])
    return [x, of_bin, of_stream, of_frame, given.bias, given.clip, *_span(given)]


def _run(name: str, threads: int, arguments: Sequence[Any], given: ConvInput) -> None:
    def what() -> str:
        return f"{name} of a block (B, F, T, C) = {tuple(given.x.shape)}"

    run(carried_launch(name, -(-threads // _THREADS)), arguments, what, given.x.device)


@functools.lru_cache(maxsize=256)
def carried_launch(name: str, blocks: int) -> Launch:
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
