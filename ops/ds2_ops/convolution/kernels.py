"""The launches of the convolution and their tiles."""

from __future__ import annotations

import functools

from ds2_ops.jit.launch import Launch, Source, names, parameters, translation_unit

CHANNELS = 32
BIN_FRAMES = 64  # of a tile of `sum_weights_of_bins`, which holds its bins in a ring buffer
_PREFETCHED = 6  # bins of the ring buffer that are being loaded
_SMEM_BYTES = 232448  # of a block on Hopper
_MAX_STAGES = 8  # their barriers lie at the start of shared memory
_MIN_FRAMES, _MAX_FRAMES = 64, 176  # of a warp group: accumulators must fit into registers
_BLOCKS = 132  # one for each multiprocessor of an H200
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


def splits(pairs: int, items: int) -> int:
    """Return how many blocks share the items of a pair of taps."""
    return max(1, min(_BLOCKS // pairs, items))


def correlate(pairs: int, utterances: int, frames: int, taps: int, group: int | None = None) -> Launch:
    """Make the launch over all pairs of bins, with `group` frames of a warp group."""
    group = group or frames_of_group(frames)
    rows = _padded(2 * group + taps - 1)
    stages, smem_bytes = _stages(64 * rows + taps * CHANNELS * 2 * CHANNELS * 2)
    tiles = -(-frames // (2 * group))
    source = _source("correlate", "Correlation", group, taps, stages)
    return Launch(source, 384, grid=pairs * tiles * utterances, smem_bytes=smem_bytes)


def sum_weights(pairs: int, shares: int, taps: int, tile: int) -> Launch:
    """Make the launch over all pairs of taps, each divided among `shares` blocks, with tiles of `tile` frames."""
    stages, smem_bytes = _stages(64 * (2 * _padded(tile + taps - 1) + _padded(tile)))
    source = _source("sum_weights", "WeightSums", tile, taps, stages)
    return Launch(source, 256, grid=pairs * shares, smem_bytes=smem_bytes)


def sum_weights_of_bins(pairs: int, shares: int) -> Launch:
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
        f"""    extern __shared__ __align__(128) unsigned char shared[];
    ds2::{function}<{size}, {taps}, {stages}>(ds2::{struct}{{{names(members)}}}, shared);
""",
        ahead=product,
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
