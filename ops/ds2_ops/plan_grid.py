"""Plans of the whole-chip designs, for hidden sizes that one cluster cannot hold. Needs no GPU.

Shape letters: B batch, H hidden.
"""

from ds2_ops.plan import (
    CELLS,
    FINISHERS,
    MMA_ROWS,
    MMA_SAMPLES,
    MMA_WORDS,
    NUMBERS,
    THREADS,
    WARPS,
    DeviceFacts,
    Launch,
    Problem,
)

SLOTS = 16  # of the exchange
PAIR_WORDS = 16  # words of K in two matrix instructions
MOST_WAVE = 6  # 16-byte loads that a lane has under way together
REGISTERS = 208  # of a multiplying thread
OTHER_REGISTERS = 28  # of these, neither weights nor sums nor chunks of the state
PASSING_REGISTERS = 16  # and more where weights or chunks come in turns
CLUSTERS = (2, 4)  # blocks that split K between them
MOST_GROUPS = (8, 4, 2, 1)  # of up to 8 utterances that take turns
INPUTS_AHEAD = 8  # turns
WIDE_CLUSTERS = (8, 6, 5)  # more blocks, less for each to read and multiply
WIDE_WORDS = 64  # of a cluster
WIDE_SAMPLES = 32  # utterances of a group at most, in one warp-group instruction
WIDE_MOST_GROUPS = 2
WIDE_MOST_K_TILES = 32  # matrix instructions along K, one block
WIDE_PARTS = 4  # of K, one for each polling warp
WIDE_PIECE_TILES = 2  # matrix instructions whose state it hands on at once
PARCEL_BYTES = 512  # of sums: 8 words of 8 utterances

# The signature of the cluster design's kernel and the exchange, whose words are all EMPTY.
_ENTRY = """
extern "C" __global__ void __launch_bounds__(Shape::ALL_THREADS, 1) ds2_kernel(
    const void* input, const void* output_y, const void* matrix, const void* state, const int* lengths, void* result,
    void* last_state, int frames, int batch, int hidden, int samples, int whole_words, int wide_rows, float clip,
    unsigned* exchange) {
    ds2::FUNCTION<Shape>({input, output_y, matrix, state, lengths, result, last_state, frames, batch, hidden, samples,
                          whole_words, wide_rows, clip}, exchange);
}
"""


def grid_launches(problem: Problem, device: DeviceFacts, sms: int) -> list[Launch]:
    """Every tile of the whole-chip designs that can run this problem on ``sms`` multiprocessors, one block on each."""
    found = []
    for cluster in CLUSTERS:
        clusters = min(device.active_clusters.get(cluster, 0), sms // cluster)
        for most_groups in MOST_GROUPS if clusters else ():
            launch = _narrow(problem, cluster, clusters, most_groups)
            if launch is not None and launch.smem_bytes <= device.smem_bytes_per_block:
                found.append(launch)
                break  # fewer groups are never faster
    for cluster in WIDE_CLUSTERS:
        launch = _wide(problem, cluster, min(device.active_clusters.get(cluster, 0), sms // cluster))
        if launch is not None and launch.smem_bytes <= device.smem_bytes_per_block:
            found.append(launch)
            break
    return found


def largest_grid_hidden(dtype: str, device: DeviceFacts, sms: int) -> int:
    """The largest hidden size that the whole-chip designs can keep on ``sms`` multiprocessors."""

    def fits(hidden: int) -> bool:
        return bool(grid_launches(Problem(1, hidden, dtype, "relu", True), device, sms))

    hidden = 64 * sms  # more than registers and shared memory hold
    while hidden > 0 and not fits(hidden):
        hidden -= 64
    while fits(hidden + 1):
        hidden += 1
    return hidden


def _state_words(problem: Problem) -> int:
    """Words of one utterance's state, in whole units of 16 bytes."""
    return -(-problem.hidden // (4 * NUMBERS[problem.dtype][1])) * 4


def _turns(batch: int, most_samples: int, most_groups: int) -> tuple[int, int, int]:
    """Utterances of a group, groups of a tile, tiles: as few groups as can be, all of one size but the last."""
    all_groups = -(-batch // most_samples)
    tiles = -(-all_groups // most_groups)
    return -(-batch // all_groups), -(-all_groups // tiles), tiles


def _narrow(problem: Problem, cluster: int, clusters: int, most_groups: int) -> Launch | None:
    """grid.cuh; None where some warp would have no part of K or a thread more than one word to finish."""
    number, per_word = NUMBERS[problem.dtype]
    words = _state_words(problem)
    splits = cluster * WARPS
    if words <= (splits - 1) * PAIR_WORDS:
        return None
    block_words = -(-words // (clusters * cluster))
    if block_words > FINISHERS:
        return None
    m_tiles = -(-block_words * cluster * per_word // MMA_ROWS)
    whole_units = -(-block_words // 4) * 4  # then fewer lines of the exchange have two writers
    if whole_units * cluster * per_word <= m_tiles * MMA_ROWS:
        block_words = whole_units
    k_pairs = -(-words // (splits * PAIR_WORDS))
    smem_pairs = k_pairs - _register_pairs(m_tiles, k_pairs)
    samples, groups, tiles = _turns(problem.batch, min(MMA_SAMPLES, FINISHERS // block_words), most_groups)
    # Two buffers of partial sums, two of received ones for each group, utterances' frames, inputs, mbarriers, weights:
    # as in grid.cuh.
    partial_bytes = WARPS * m_tiles * MMA_ROWS * MMA_SAMPLES * 4
    received_bytes = cluster * block_words * per_word * MMA_SAMPLES * 4
    own_bytes = (most_groups + INPUTS_AHEAD * (2 if problem.backward else 1)) * FINISHERS * 4
    # Fitted to H 1160 to 2816, B 1 to 64 (ops/NOTES.md), within 10 %: one group is a chain of latencies, products of
    # its last words and its share of the state; others hide a part of that.
    read_bytes = words * samples * 4 / cluster
    products = m_tiles * k_pairs
    if groups == 1:
        tile_us = (1.24 if cluster == 2 else 1.13) + 0.026 * products + 2.66e-5 * read_bytes
    else:
        tile_us = 0.2 + groups * (0.49 + 0.02 * products + 2.8e-5 * read_bytes)
    return _launch(
        problem,
        header="grid.cuh",
        function="grid_recurrence",
        shape=f"GridShape<ds2::{number}, ds2::{CELLS[problem.nonlinearity]}, {cluster}, {block_words}, {k_pairs}, "
        f"{smem_pairs}, {most_groups}",
        grid=-(-words // (block_words * cluster)) * cluster,
        cluster=cluster,
        threads=THREADS + 2 * FINISHERS,  # the others add
        smem_bytes=2 * partial_bytes
        + 2 * most_groups * (received_bytes + 8)
        + own_bytes
        + THREADS * smem_pairs * m_tiles * 32,
        rows=block_words * per_word,
        samples=samples,
        groups=groups,
        tiles=tiles,
        tile_words=groups * words * samples,
        tile_us=tile_us,
    )


def _register_pairs(m_tiles: int, k_pairs: int) -> int:
    """Pairs of matrix instructions along K whose weights a multiplying thread can keep in registers."""
    waves = -(-k_pairs // MOST_WAVE)
    spare = REGISTERS - OTHER_REGISTERS - 4 * -(-k_pairs // waves) - 4 * m_tiles  # chunks of the state, sums
    pair = 8 * m_tiles
    if waves > 1 or k_pairs * pair > spare:
        spare -= PASSING_REGISTERS
    return min(k_pairs, spare // pair)


def _wide(problem: Problem, cluster: int, clusters: int) -> Launch | None:
    """grid_wide.cuh, for 16-bit numbers; None where weights or clusters are too many or some block has no part of K."""
    number, per_word = NUMBERS[problem.dtype]
    words = _state_words(problem)
    k_tiles = -(-words // (cluster * MMA_WORDS))
    used = -(-words // WIDE_WORDS)
    if per_word != 2 or used > clusters or k_tiles > WIDE_MOST_K_TILES or words <= (cluster - 1) * k_tiles * MMA_WORDS:
        return None
    samples, groups, tiles = _turns(problem.batch, WIDE_SAMPLES, WIDE_MOST_GROUPS)
    # Two buffers of the state, two of received sums for each group, inputs, utterances' frames of every finishing warp,
    # mbarriers: as in grid_wide.cuh.
    parcels = -(-WARPS * WIDE_SAMPLES // 8 // cluster)
    finishing_warps = FINISHERS // 32
    state_bytes = k_tiles * MMA_WORDS * WIDE_SAMPLES * 4
    input_bytes = finishing_warps * -(-parcels // finishing_warps) * 8 * 8 * 4
    own_bytes = INPUTS_AHEAD * (2 if problem.backward else 1) * input_bytes
    frames_bytes = finishing_warps * WIDE_MOST_GROUPS * WIDE_SAMPLES * 4
    pieces = -(k_tiles // -WIDE_PARTS // WIDE_PIECE_TILES)
    return _launch(
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


def _launch(
    problem: Problem,
    *,
    header: str,
    function: str,
    shape: str,
    grid: int,
    cluster: int,
    threads: int,
    smem_bytes: int,
    rows: int,
    samples: int,
    groups: int,
    tiles: int,
    tile_words: int,
    tile_us: float,
) -> Launch:
    source = (
        f'#include "{header}"\n'
        f"using Shape = ds2::{shape}, {'true' if problem.backward else 'false'}>;\n"
        f'static_assert(Shape::SMEM_BYTES == {smem_bytes}, "plan_grid.py and {header} disagree on shared memory");'
        f"{_ENTRY.replace('FUNCTION', function)}"
    )
    return Launch(
        design="grid",
        source=source,
        grid=grid,
        cluster=cluster,
        threads=threads,
        smem_bytes=smem_bytes,
        rows=rows,
        samples=samples,
        groups=groups,
        step_cycles=tiles * tile_us * 1980,
        exchange_words=SLOTS * tile_words,
    )
