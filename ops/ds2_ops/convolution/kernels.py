"""The launches of the convolution, and the tiles they are cut into."""

from __future__ import annotations

import functools

from ds2_ops.jit.launch import Launch
from ds2_ops.jit.source import Source, names, parameters, translation_unit

CHANNELS = 32
BIN_FRAMES = 64  # of a tile where the bins lie in a ring
_AHEAD = 6  # bins of the ring that are on their way
_SMEM_BYTES = 232448  # of a block on Hopper
_MOST_STAGES = 8  # whose barriers lie at the head of shared memory
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
    stages, smem_bytes = _stages(64 * rows + taps * CHANNELS * 2 * CHANNELS * 2)
    tiles = -(-frames // (2 * group))
    source = _source("correlate", "Correlation", group, taps, stages)
    return Launch(source, 384, grid=pairs * tiles * utterances, smem_bytes=smem_bytes)


def sum_weights(pairs: int, shares: int, taps: int, tile: int) -> Launch:
    """The launch over all pairs of taps, in so many shares, with tiles of so many frames."""
    stages, smem_bytes = _stages(64 * (2 * _padded(tile + taps - 1) + _padded(tile)))
    source = _source("sum_weights", "WeightSums", tile, taps, stages)
    return Launch(source, 256, grid=pairs * shares, smem_bytes=smem_bytes)


def sum_weights_of_bins(pairs: int, shares: int) -> Launch:
    """The launch over tiles of `BIN_FRAMES` frames, in so many shares, for all pairs of taps at once."""
    slots = 2 * pairs - 2 + _AHEAD
    head = -(-slots * 16 // 128) * 128
    source = _source("sum_weights_of_bins", "WeightSums", BIN_FRAMES, pairs, _AHEAD)
    return Launch(source, 256, grid=shares, smem_bytes=head + (slots + 1 + _AHEAD) * 64 * _padded(BIN_FRAMES))


def _stages(stage_bytes: int) -> tuple[int, int]:
    """Stages that fit, and bytes of shared memory."""
    stages = min(_MOST_STAGES, (_SMEM_BYTES - 128) // stage_bytes)
    return stages, 128 + stages * stage_bytes


def _padded(rows: int) -> int:
    """Rows of a window: `padded_rows` of window.cuh."""
    return rows + (10 - rows % 8) % 8


@functools.cache
def _source(function: str, struct: str, size: int, taps: int, stages: int) -> Source:
    members = _CORRELATION if function == "correlate" else _WEIGHT_SUMS
    product = _product(size, transposed=False) if function == "correlate" else _product(CHANNELS, transposed=True)
    return translation_unit(
        "convolution/window.cuh",
        members,
        f"""    extern __shared__ __align__(128) unsigned char shared[];
    ds2::{function}<{size}, {taps}, {stages}>(ds2::{struct}{{{names(members)}}}, shared);
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
