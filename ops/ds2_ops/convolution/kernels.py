"""The launches of the convolution, and the tiles they are cut into."""

from __future__ import annotations

import functools

from ds2_ops.jit.launch import Launch
from ds2_ops.jit.source import Source, names, parameters, translation_unit

CHANNELS = 32
STAGES = 3
_LEAST_FRAMES, _MOST_FRAMES = 64, 176  # of a warp group: accumulators that fit into registers
_BLOCKS = 132  # multiprocessors of an H200: one block each
_CORRELATION = parameters(
    """const unsigned short* x, const unsigned short* weights, unsigned short* y, int bins_in, int bins_out, int frames,
    int rows, int step, int first, int pairs, int tiles"""
)
_WEIGHT_SUMS = parameters(
    """const unsigned short* x, const unsigned short* grad_y, float* partial, int utterances, int bins_in, int bins_out,
    int frames, int stride, int first, int pairs, int splits, int tiles"""
)


def frames_of_group(frames: int) -> int:
    """Frames N of a warp group, two groups a block: a multiple of 16 that leaves little of the last tile empty."""
    return min(range(_MOST_FRAMES, _LEAST_FRAMES - 1, -16), key=lambda n: -(-frames // (2 * n)) * 2 * n)


def splits(pairs: int, items: int) -> int:
    """Blocks that share the items of a pair of taps."""
    return max(1, min(_BLOCKS // pairs, items))


def correlate(pairs: int, utterances: int, frames: int, taps: int, group: int | None = None) -> Launch:
    """The launch over all pairs of bins; `group` frames of a warp group."""
    group = group or frames_of_group(frames)
    rows = _padded(2 * group + taps - 1)
    stage = 64 * rows + taps * CHANNELS * 2 * CHANNELS * 2
    tiles = -(-frames // (2 * group))
    source = _source("correlate", "Correlation", group, taps)
    return Launch(source, 384, grid=pairs * tiles * utterances, smem_bytes=128 + STAGES * stage)


def sum_weights(pairs: int, shares: int, taps: int, tile: int) -> Launch:
    """The launch over all pairs of taps, in so many shares, with tiles of so many frames."""
    stage = 64 * (2 * _padded(tile + taps - 1) + _padded(tile))
    return Launch(
        _source("sum_weights", "WeightSums", tile, taps), 256, pairs * shares, smem_bytes=128 + STAGES * stage
    )


def _padded(rows: int) -> int:
    """Rows of a window: `padded_rows` of window.cuh."""
    return rows + (10 - rows % 8) % 8


@functools.cache
def _source(function: str, struct: str, size: int, taps: int) -> Source:
    members = _CORRELATION if function == "correlate" else _WEIGHT_SUMS
    product = _product(size, transposed=False) if function == "correlate" else _product(CHANNELS, transposed=True)
    return translation_unit(
        "convolution/window.cuh",
        members,
        f"""    extern __shared__ __align__(128) unsigned char shared[];
    ds2::{function}<{size}, {taps}, {STAGES}>(ds2::{struct}{{{names(members)}}}, shared);
""",
        ahead=product,
        launch_bounds="384, 1" if function == "correlate" else "256, 1",
    )


def _product(columns: int, *, transposed: bool) -> str:
    """The instance of Product for so many columns: PTX names each register."""
    count = columns // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    instruction = (
        "{.reg .pred accumulate; setp.eq.u32 accumulate, 0, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 {{{sums}}}, %{count}, %{count + 1}, accumulate, "
        f"1, 1, {int(transposed)}, {int(transposed)};}}"
    )
    outputs = ", ".join(f'"+f"(c[{i}])' for i in range(count))
    return f'DS2_PRODUCT({columns}, {str(transposed).lower()}, "{instruction}", {outputs})\n'
