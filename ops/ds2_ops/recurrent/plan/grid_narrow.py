"""Tiles of the narrow whole-chip design: groups of up to 8 utterances, any number type."""

from ds2_ops.recurrent.cells import CELLS
from ds2_ops.recurrent.plan.grid import INPUTS_AHEAD, grid_launch, state_words, turns
from ds2_ops.recurrent.plan.problem import (
    FINISHERS,
    MMA_ROWS,
    MMA_SAMPLES,
    NUMBERS,
    THREADS,
    WARPS,
    DeviceFacts,
    Launch,
    Problem,
)

PAIR_WORDS = 16  # words of K in two matrix instructions
MOST_WAVE = 6  # 16-byte loads that a lane has under way together
REGISTERS = 208  # of a multiplying thread
OTHER_REGISTERS = 28  # of these, neither weights nor sums nor chunks of the state
PASSING_REGISTERS = 16  # and more where weights or chunks come in turns
CLUSTERS = (2, 4)  # blocks that split K between them
MOST_GROUPS = (8, 4, 2, 1)  # of up to 8 utterances that take turns


def narrow_launches(problem: Problem, device: DeviceFacts, sms: int) -> list[Launch]:
    """Every tile of this design that can run this problem on ``sms`` multiprocessors, one block on each."""
    found = []
    for cluster in CLUSTERS:
        clusters = min(device.active_clusters.get(cluster, 0), sms // cluster)
        for most_groups in MOST_GROUPS if clusters else ():
            launch = _narrow(problem, cluster, clusters, most_groups)
            if launch is not None and launch.smem_bytes <= device.smem_bytes_per_block:
                found.append(launch)
                break  # fewer groups are never faster
    return found


def _narrow(problem: Problem, cluster: int, clusters: int, most_groups: int) -> Launch | None:
    """grid_narrow.cuh; None where some warp would have no part of K or a thread more than one word to finish."""
    number, per_word = NUMBERS[problem.dtype]
    words = state_words(problem)
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
    samples, groups, tiles = turns(problem.batch, min(MMA_SAMPLES, FINISHERS // block_words), most_groups)
    # Two buffers of partial sums, two of received ones for each group, utterances' frames, inputs, mbarriers, weights:
    # as in grid_narrow.cuh.
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
    return grid_launch(
        problem,
        header="grid_narrow.cuh",
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
