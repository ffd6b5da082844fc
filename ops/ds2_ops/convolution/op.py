"""The convolution as an operator: launches and their tiles, autograd, the layouts of the weights, and its conditions.

Shape letters: B utterances, C = 32 channels, F bins, T frames, K x J taps over bins and frames, S stride over bins.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ds2_ops.checks import refuse_second_derivative, under_autocast
from ds2_ops.jit.launch import Launch, Source, device_index, multiprocessors, names, parameters, run, translation_unit
from ds2_ops.jit.runtime import capability

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
    return None if capability(device_index(x.device)) == (9, 0) else "the kernels need a Hopper GPU"


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


def _convolved(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    y: Tensor = _Convolve.apply(x, weight, stride)  # type: ignore[no-untyped-call]
    return y


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
    if launch.grid:
        tiles = launch.grid // (pairs * batch)
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
    row, tap, chunk, m, e = torch.meshgrid(*(torch.arange(n) for n in shape), indexing="ij")
    inner, half, outer = chunk * 8 + e, m // CHANNELS, m % CHANNELS
    if backward:  # bins of the output lie two apart: even and odd bins of the input have taps of their own
        tap_of_bins, tap, o, i = taps_bins - 1 - 2 * row + half, taps - 1 - tap, inner, outer
    else:
        tap_of_bins, o, i = row - stride * half, outer, inner
    at = ((o * CHANNELS + i) * taps_bins + tap_of_bins) * taps + tap
    inside = (tap_of_bins >= 0) & (tap_of_bins < taps_bins)
    return torch.where(inside, at, CHANNELS * CHANNELS * taps_bins * taps).to(device)
