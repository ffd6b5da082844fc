"""Tiles of the wide whole-chip design: groups of up to 32 utterances of 16-bit numbers."""

from ds2_ops.recurrent.cells import CELLS
from ds2_ops.recurrent.plan.grid import INPUTS_AHEAD, grid_launch, state_words, turns
from ds2_ops.recurrent.plan.problem import FINISHERS, MMA_WORDS, NUMBERS, THREADS, WARPS, DeviceFacts, Launch, Problem

WIDE_CLUSTERS = (8, 6, 5)  # more blocks, less for each to read and multiply
WIDE_WORDS = 64  # of a cluster
WIDE_SAMPLES = 32  # utterances of a group at most, in one warp-group instruction
WIDE_MOST_GROUPS = 2
WIDE_MOST_K_TILES = 32  # matrix instructions along K, one block
WIDE_PARTS = 4  # of K, one for each polling warp
WIDE_PIECE_TILES = 2  # matrix instructions whose state it hands on at once
PARCEL_BYTES = 512  # of sums: 8 words of 8 utterances


def wide_launches(problem: Problem, device: DeviceFacts, sms: int) -> list[Launch]:
    """The tile of this design that can run this problem on ``sms`` multiprocessors, one block on each, if any can."""
    for cluster in WIDE_CLUSTERS:
        launch = _wide(problem, cluster, min(device.active_clusters.get(cluster, 0), sms // cluster))
        if launch is not None and launch.smem_bytes <= device.smem_bytes_per_block:
            return [launch]
    return []


def _wide(problem: Problem, cluster: int, clusters: int) -> Launch | None:
    """grid_wide.cuh, for 16-bit numbers; None where weights or clusters are too many or some block has no part of K."""
    number, per_word = NUMBERS[problem.dtype]
    words = state_words(problem)
    k_tiles = -(-words // (cluster * MMA_WORDS))
    used = -(-words // WIDE_WORDS)
    if per_word != 2 or used > clusters or k_tiles > WIDE_MOST_K_TILES or words <= (cluster - 1) * k_tiles * MMA_WORDS:
        return None
    samples, groups, tiles = turns(problem.batch, WIDE_SAMPLES, WIDE_MOST_GROUPS)
    # Two buffers of the state, two of received sums for each group, inputs, utterances' frames of every finishing warp,
    # mbarriers: as in grid_wide.cuh.
    parcels = -(-WARPS * WIDE_SAMPLES // 8 // cluster)
    finishing_warps = FINISHERS // 32
    state_bytes = k_tiles * MMA_WORDS * WIDE_SAMPLES * 4
    input_bytes = finishing_warps * -(-parcels // finishing_warps) * 8 * 8 * 4
    own_bytes = INPUTS_AHEAD * (2 if problem.backward else 1) * input_bytes
    frames_bytes = finishing_warps * WIDE_MOST_GROUPS * WIDE_SAMPLES * 4
    pieces = -(k_tiles // -WIDE_PARTS // WIDE_PIECE_TILES)
    return grid_launch(
        problem,
        header="grid_wide.cuh",
        function="wide_recurrence",
        shape=f"WideShape<ds2::{number}, ds2::{CELLS[problem.nonlinearity]}, {cluster}, {k_tiles}",
        grid=used * cluster,
        cluster=cluster,
        threads=2 * THREADS,
        smem_bytes=2 * state_bytes
        + 2 * WIDE_MOST_GROUPS * parcels * cluster * PARCEL_BYTES
        + own_bytes
        + frames_bytes
        + 8 * (2 * WIDE_MOST_GROUPS + 2 * pieces + 2),
        rows=-(-WIDE_WORDS * per_word // cluster),
        samples=samples,
        groups=groups,
        tiles=tiles,
        tile_words=groups * words * WIDE_SAMPLES,
        # Fitted to H 1760 to 2560, B 32 and 64 (ops/NOTES.md): a chain of latencies; a second group fits into it.
        tile_us=1.85 + 0.033 * k_tiles + (0.5 if groups == 2 else 0),
    )
