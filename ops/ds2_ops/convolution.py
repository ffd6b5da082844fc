"""Convolution over bins and frames of a spectrogram, 32 channels to 32, stride 2 over bins; on Hopper's matrix unit.

First launches and their tiles, autograd, the layouts of the weights, and where it can run. Then the same on blocks of
streams, for inference: cached frames of the previous block, then those of this block. The streams of a block lie end to
end as one utterance of the kernel.

Shape letters: B utterances or streams, C = 32 channels, F bins, T frames, in a block the new ones, R cached frames, P
slots, K x J taps over bins and frames, S x n strides over bins and frames.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ds2_ops.checks import refuse_second_derivative, under_autocast
from ds2_ops.jit.launch import (
    Launch,
    Source,
    device_index,
    multiprocessors,
    names,
    parameters,
    run,
    translation_unit,
    why_not_early,
)
from ds2_ops.jit.runtime import capability, why_no_kernel

CHANNELS = 32
BIN_FRAMES = 64  # of a tile of `sum_weights_of_bins`, which holds its bins in a ring buffer
_PREFETCHED = 6  # bins of the ring buffer that are being loaded
_SMEM_BYTES = 232448  # of a block on Hopper
_MAX_STAGES = 8  # their barriers lie at the start of shared memory
_MIN_FRAMES, _MAX_FRAMES = 64, 176  # of a warp group: accumulators must fit into registers
_CORRELATION = parameters(
    """const unsigned short* x, const unsigned short* weights, unsigned short* y, int bins_in, int bins_out, int frames,
    int rows, int step, int first, int pairs, int tiles"""
)
_WEIGHT_SUMS = parameters(
    """const unsigned short* x, const unsigned short* grad_y, float* partial, int utterances, int bins_in, int bins_out,
    int frames, int stride, int first, int pairs, int splits, int tiles"""
)


def frames_of_group(frames: int) -> int:
    """Return the frames of a warp group, two groups a block: the multiple of 16 that pads the last tile least."""
    return min(range(_MAX_FRAMES, _MIN_FRAMES - 1, -16), key=lambda n: -(-frames // (2 * n)) * 2 * n)


def _splits(pairs: int, items: int, sms: int) -> int:
    """Return how many blocks share the items of a pair of taps: one block for each multiprocessor."""
    return max(1, min(sms // pairs, items))


def correlation_launch(pairs: int, utterances: int, frames: int, taps: int, group: int | None = None) -> Launch:
    """Make the launch over all pairs of bins, with `group` frames of a warp group."""
    group = group or frames_of_group(frames)
    rows = _padded(2 * group + taps - 1)
    stages, smem_bytes = _stages(64 * rows + taps * CHANNELS * 2 * CHANNELS * 2)
    tiles = -(-frames // (2 * group))
    source = _source("correlate", "Correlation", group, taps, stages)
    return Launch(source, 384, grid=pairs * tiles * utterances, smem_bytes=smem_bytes)


def weight_sums_launch(pairs: int, shares: int, taps: int, tile: int) -> Launch:
    """Make the launch over all pairs of taps, each divided among `shares` blocks, with tiles of `tile` frames."""
    stages, smem_bytes = _stages(64 * (2 * _padded(tile + taps - 1) + _padded(tile)))
    source = _source("sum_weights", "WeightSums", tile, taps, stages)
    return Launch(source, 256, grid=pairs * shares, smem_bytes=smem_bytes)


def bin_sums_launch(pairs: int, shares: int) -> Launch:
    """Make the launch over tiles of `BIN_FRAMES` frames, divided among `shares` blocks, for all pairs of taps."""
    slots = 2 * pairs - 2 + _PREFETCHED
    head = -(-slots * 16 // 128) * 128
    source = _source("sum_weights_of_bins", "WeightSums", BIN_FRAMES, pairs, _PREFETCHED)
    return Launch(source, 256, grid=shares, smem_bytes=head + (slots + 1 + _PREFETCHED) * 64 * _padded(BIN_FRAMES))


def _stages(stage_bytes: int) -> tuple[int, int]:
    """Return the stages that fit, and their bytes of shared memory."""
    stages = min(_MAX_STAGES, (_SMEM_BYTES - 128) // stage_bytes)
    return stages, 128 + stages * stage_bytes


def _padded(rows: int) -> int:
    """Return `padded_rows` of window.cuh: the rows of a window in shared memory."""
    return rows + (10 - rows % 8) % 8


@functools.cache
def _source(function: str, struct: str, size: int, taps: int, stages: int) -> Source:
    members = _CORRELATION if function == "correlate" else _WEIGHT_SUMS
    product = _product(size, transposed=False) if function == "correlate" else _product(CHANNELS, transposed=True)
    return translation_unit(
        "convolution/window.cuh",
        members,
        f"    ds2::{function}<{size}, {taps}, {stages}>(ds2::{struct}{{{names(members)}}}, shared);\n",
        ahead=product,
        alignment=128,
        launch_bounds="384, 1" if function == "correlate" else "256, 1",
    )


def _product(columns: int, *, transposed: bool) -> str:
    """Write the instance of Product for a number of columns: PTX names each register."""
    count = columns // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    instruction = (
        "{.reg .pred accumulate; setp.eq.u32 accumulate, 0, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 {{{sums}}}, %{count}, %{count + 1}, accumulate, "
        f"1, 1, {int(transposed)}, {int(transposed)};}}"
    )
    outputs = ", ".join(f'"+f"(c[{i}])' for i in range(count))
    return f'DS2_PRODUCT({columns}, {str(transposed).lower()}, "{instruction}", {outputs})\n'


_MAX_TAPS = 11  # over frames: the accumulators of their gradients must fit into registers
_FOLDED = CHANNELS // 2  # taps over frames that become channels, for two bins


def why_not(x: Tensor, weight: Tensor, stride: tuple[int, ...]) -> str | None:
    """Say why `convolve` does not support x (B, C, F, T) and weight (32, C, K, J); None if it does."""
    if x.device.type != "cuda":
        return f"the data is on {x.device}, the kernels need a CUDA GPU"
    dtypes = {x.dtype, weight.dtype}
    if torch.is_autocast_enabled("cuda"):
        dtypes = {torch.get_autocast_dtype("cuda")}
    if dtypes != {torch.bfloat16}:
        return f"data and weights are {', '.join(sorted(map(str, dtypes)))}, the kernels multiply bfloat16"
    outputs, inputs, bins, frames = weight.shape
    many_channels = inputs == CHANNELS and stride == (2, 1) and frames <= _MAX_TAPS
    one_channel = inputs == 1 and stride[0] == 2 and frames <= _FOLDED and not x.requires_grad
    if outputs != CHANNELS or bins % 4 != 1 or frames % 2 != 1 or not (many_channels or one_channel):
        return (
            f"the weight is {tuple(weight.shape)} with stride {stride}, allowed are "
            f"(32, 32, 4 n + 1, up to {_MAX_TAPS}) with stride (2, 1), and "
            f"(32, 1, 4 n + 1, up to {_FOLDED}) with stride (2, n) for data without gradient"
        )
    if capability(device_index(x.device)) != (9, 0):
        return "the kernels need a Hopper GPU"
    return why_no_kernel(device_index(x.device))


def convolve(x: Tensor, weight: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Convolve with zeros around, y[f, t] = sum over k, j of weight[k, j] x[S f + k - K // 2, n t + j - J // 2].

    Sums in float32. Runs on torch's current stream, can be captured in a CUDA graph, gives the same bits on every run.
    Requires that `why_not` returns None.

    Args:
        x: (B, C, F, T) bfloat16, or another dtype under autocast; C is 32 or 1. It is not copied if its memory has the
            order (B, F, T, C).
        weight: (32, C, K, J), outputs first.
        stride: S and n, over bins and frames.

    Returns:
        (B, 32, ceil(F / S), ceil(T / n)) with its memory in the order (B, F, T, C). Differentiable in ``weight``, and
        in ``x`` if it has 32 channels.
    """
    x, weight = under_autocast(x, weight)  # type: ignore[assignment]
    if weight.shape[1] == 1:
        x, weight = fold(x, weight, stride[1])
        return _convolved(x, weight, 1)
    return _convolved(x, weight, stride[0])


def fold(x: Tensor, weight: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """Turn one channel into 32: pairs of bins and up to 16 taps over frames become channels, without taps over frames.

    Args:
        x: (B, 1, F, T).
        weight: (32, 1, K, J), K = 4 n + 1, so that a pair of taps lies in the centre.
        stride: over frames; it is 2 over bins, and 1 over the pairs.

    Returns:
        (B, 32, ceil(F / 2), ceil(T / stride)) with its memory in the order (B, F, T, C), and (32, 32, (K + 1) / 2, 1).
    """
    windows = folded_windows(x[:, 0], stride, -(-x.shape[3] // stride), weight.shape[3] // 2)
    return windows.flatten(3).permute(0, 3, 1, 2), folded_weight(weight)


def folded_windows(x: Tensor, stride: int, windows: int, before: int = 0) -> Tensor:
    """Cut (B, F, T) into windows from frame -before, a stride apart: (B, ceil(F / 2), windows, 2, 16), zero-padded."""
    after = (windows - 1) * stride + _FOLDED - before - x.shape[2]
    padded = functional.pad(x, (before, after, 0, x.shape[1] % 2))
    folded: Tensor = padded.unflatten(1, (-1, 2)).unfold(3, _FOLDED, stride)  # type: ignore[no-untyped-call]
    return folded.transpose(2, 3)


def folded_weight(weight: Tensor) -> Tensor:
    """Rearrange (32, 1, K, J) to (32, 32, (K + 1) / 2, 1), the weight for `folded_windows`."""
    padded = functional.pad(weight[:, 0], (0, _FOLDED - weight.shape[3], 0, 1))
    kernel: Tensor = padded.unflatten(1, (-1, 2))  # type: ignore[no-untyped-call]
    return kernel.permute(0, 2, 3, 1).flatten(1, 2)[..., None]


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int) -> Tensor:
        x = x.permute(0, 2, 3, 1).contiguous()
        ctx.save_for_backward(x, weight)
        ctx.stride = stride
        packed = pack(weight, stride, backward=False)
        y = x.new_empty(x.shape[0], -(-x.shape[1] // stride), *x.shape[2:])
        correlate(x, packed, y, step=2 * stride, first=-(weight.shape[2] // 2))
        return y.permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        refuse_second_derivative("convolve")
        x, weight = ctx.saved_tensors
        grad_y = grad_y.permute(0, 2, 3, 1).contiguous()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            if ctx.stride != 2:
                raise RuntimeError("the gradient of the data needs a stride of 2 over bins")
            rows = torch.empty_like(x)
            correlate(grad_y, pack(weight, 2, backward=True), rows, step=1, first=-(weight.shape[2] // 4))
            grad_x = rows.permute(0, 3, 1, 2)
        if ctx.needs_input_grad[1]:
            grad_weight = _weight_gradient(x, grad_y, weight, ctx.stride)
        return grad_x, grad_weight, None


_convolved: Callable[[Tensor, Tensor, int], Tensor] = _Convolve.apply


def correlate(x: Tensor, packed: Tensor, y: Tensor, *, step: int, first: int, group: int | None = None) -> None:
    """Write the products of windows of x with `packed` into y, for both bins of each pair; asynchronous.

    Args:
        x: (B, F, T, 32) bfloat16, contiguous.
        packed: from `pack`.
        y: (B, F', T, 32) bfloat16, contiguous; overwritten.
        step: bins of x from the window of one pair to that of the next.
        first: bin of x at which the first pair's window begins; bins outside of x are 0.
        group: frames of a warp group; None: the fastest.
    """
    batch, bins_in, frames, _ = x.shape
    bins_out, (rows, taps) = y.shape[1], packed.shape[:2]
    pairs = -(-bins_out // 2)
    launch = correlation_launch(pairs, batch, frames, taps, group)
    tiles = launch.grid // max(1, pairs * batch)
    shape = (bins_in, bins_out, frames, rows, step, first, pairs, tiles)
    run(launch, [x, packed, y, *shape], lambda: f"convolution of {tuple(x.shape)}, {rows} rows", x.device)


def _weight_gradient(x: Tensor, grad_y: Tensor, weight: Tensor, stride: int, tile: int | None = None) -> Tensor:
    batch, bins_in, frames, _ = x.shape
    taps_bins, taps = weight.shape[2:]
    pairs, bins_out, one_tap = (taps_bins + 1) // 2, grad_y.shape[1], taps == stride == 1
    tile = BIN_FRAMES if one_tap else tile or 2 * frames_of_group(frames)
    tiles = -(-frames // tile)
    if one_tap:
        shares = _splits(1, batch * tiles, multiprocessors(x.device))
        launch = bin_sums_launch(pairs, shares)
    else:
        shares = _splits(pairs, batch * bins_out * tiles, multiprocessors(x.device))
        launch = weight_sums_launch(pairs, shares, taps, tile)
    partial = torch.empty(shares, pairs, taps, 2, CHANNELS, CHANNELS, dtype=torch.float32, device=x.device)
    shape = (batch, bins_in, bins_out, frames, stride, -(taps_bins // 2), pairs, shares, tiles)
    run(launch, [x, grad_y, partial, *shape], lambda: f"weight gradient of {tuple(x.shape)}", x.device)
    summed = partial.sum(0).permute(0, 2, 1, 3, 4).flatten(0, 1)[:taps_bins]  # (K, J, in, out)
    return summed.permute(3, 2, 0, 1).to(weight.dtype, memory_format=torch.contiguous_format)


def pack(weight: Tensor, stride: int, *, backward: bool) -> Tensor:
    """Arrange the weights in the layout of shared memory: row i of a window times the taps of both bins of a pair.

    Args:
        weight: (32, 32, K, J).
        stride: over bins.
        backward: whether for the gradient of the data.

    Returns:
        (rows, J, 4, 64, 8) of the weight's dtype.
    """
    index = _index(weight.shape[2], weight.shape[3], stride, backward, weight.device)
    flat = torch.cat([weight.reshape(-1), weight.new_zeros(1)])
    return flat[index]


@functools.cache
@torch.inference_mode(False)  # a tensor made in inference mode could not be used outside of it later
def _index(taps_bins: int, taps: int, stride: int, backward: bool, device: torch.device) -> Tensor:
    """Return the position of each packed number in a flat (32, 32, K, J); one past its end for zeros."""
    rows = taps_bins // 2 + 1 if backward else taps_bins + stride
    shape = (rows, taps, 4, 2 * CHANNELS, 8)
    row, tap, chunk, m, e = torch.meshgrid(*(torch.arange(n, device="cpu") for n in shape), indexing="ij")
    inner, half, outer = chunk * 8 + e, m // CHANNELS, m % CHANNELS
    if backward:  # bins of the output lie two apart: even and odd bins of the input have taps of their own
        tap_of_bins, tap, o, i = taps_bins - 1 - 2 * row + half, taps - 1 - tap, inner, outer
    else:
        tap_of_bins, o, i = row - stride * half, outer, inner
    at = ((o * CHANNELS + i) * taps_bins + tap_of_bins) * taps + tap
    inside = (tap_of_bins >= 0) & (tap_of_bins < taps_bins)
    return torch.where(inside, at, CHANNELS * CHANNELS * taps_bins * taps).to(device)


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
    """Join features of one channel as `join`, and return their first windows as `folded_windows` does.

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
        return folded_windows(rows[..., 0], stride, count).flatten(3).transpose(0, 1)
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
    launch, shape = block_launch(name, -(-threads // _THREADS)), tuple(block.x.shape)
    run(launch, arguments, lambda: f"{name} of a block (B, F, T, C) = {shape}", block.x.device)


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


def why_not_on_streams(weight: Tensor, stride: tuple[int, ...]) -> str | None:
    """Say why `StreamConvolution` does not support this weight (32, C, K, J); None if it does."""
    over_frames = stride[1] if weight.shape[1] == 1 else 1
    return why_not(weight.new_empty(1, weight.shape[1], 1, 1), _padded_taps(weight), (stride[0], over_frames))


class StreamConvolution:
    """A convolution whose bits depend neither on the batch nor on the length of a block.

    The kernel adds up the products of a frame in the same order in every tile.

    Args:
        weight: (32, C, K, J) bfloat16, for which `why_not_on_streams` returns None.
        stride: S and n. For 32 channels the kernel also computes the frames between the strides.
    """

    def __init__(self, weight: Tensor, stride: tuple[int, ...]) -> None:
        self.taps, self.strides = weight.shape[3], stride
        weight = _padded_taps(weight)
        kernel = folded_weight(weight) if weight.shape[1] == 1 else weight
        self.first, self.step = -(kernel.shape[2] // 2), 2 * (1 if weight.shape[1] == 1 else stride[0])
        self.packed = pack(kernel, self.step // 2, backward=False)

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
        correlate(end_to_end, self.packed, y, step=self.step, first=self.first, group=group)
        return y.view(-1, batch, length, CHANNELS)[:, :, begin : begin + count * step : step].transpose(0, 1)


def _padded_taps(weight: Tensor) -> Tensor:
    """Pad the taps over bins with zeros to 4 n + 1."""
    return functional.pad(weight, (0, 0, 1, 1)) if weight.shape[2] % 4 == 3 else weight


def _group(pairs: int, frames: int, sms: int) -> int:
    """Return the frames of a warp group, two groups a block: the fewest with which all blocks run at once."""
    max_tiles = max(1, sms // pairs)
    return next((group for group in _GROUPS if -(-frames // (2 * group)) <= max_tiles), _GROUPS[-1])
