"""Tiles of the narrow whole-chip design: groups of up to 8 utterances, any number type."""

from ds2_ops.jit.launch import Launch
from ds2_ops.recurrent.cells import ALL, Cell, GatedCell
from ds2_ops.recurrent.plan.entry import kernel
from ds2_ops.recurrent.plan.grid import CYCLES_A_US, INPUTS_AHEAD, SLOTS, state_words, turns
from ds2_ops.recurrent.plan.problem import (
    FINISHERS,
    MMA_ROWS,
    MMA_SAMPLES,
    NUMBERS,
    THREADS,
    WARPS,
    Choice,
    DeviceFacts,
    Problem,
)

PAIR_WORDS = 16  # words of K in two matrix instructions
MOST_WAVE = 6  # 16-byte loads that a lane has under way together
REGISTERS = 208  # of a multiplying thread
OTHER_REGISTERS = 28  # of these, neither weights nor sums nor chunks of the state
PASSING_REGISTERS = 16  # and more where weights or chunks come in turns
CLUSTERS = (2, 4)  # blocks that split K between them
MOST_GROUPS = (8, 4, 2, 1)  # of up to 8 utterances that take turns


def narrow_choices(problem: Problem, device: DeviceFacts, sms: int) -> list[Choice]:
    """Every tile of this design that can run this problem on ``sms`` multiprocessors, one block on each."""
    found = []
    for cluster in CLUSTERS:
        clusters = min(device.active_clusters.get(cluster, 0), sms // cluster)
        for most_groups in MOST_GROUPS if clusters else ():
            choice = _choice(problem, cluster, clusters, most_groups)
            if choice is not None and choice.launch.smem_bytes <= device.smem_bytes_per_block:
                found.append(choice)
                break  # fewer groups are never faster
    return found


def _choice(problem: Problem, cluster: int, clusters: int, most_groups: int) -> Choice | None:
    """None where some warp would have no part of K or a thread more than one word to finish."""
    number, per_word = NUMBERS[problem.dtype]
    cell = ALL[problem.nonlinearity]
    sums, sent = (1, cell.gates) if problem.backward else (cell.gates, 1)
    words = state_words(problem)  # of h, or of each of the gates
    splits = cluster * WARPS
    block_words = _block_words(words, cluster, clusters, sums * per_word)
    if sent * words <= (splits - 1) * PAIR_WORDS or block_words > FINISHERS:
        return None
    m_tiles = -(-block_words * cluster * sums * per_word // MMA_ROWS)
    k_pairs = -(-sent * words // (splits * PAIR_WORDS))
    smem_pairs = k_pairs - _register_pairs(m_tiles, k_pairs, REGISTERS - (16 if cell.gates > 1 else 0))
    samples, groups, tiles = turns(problem.batch, min(MMA_SAMPLES, FINISHERS // block_words), most_groups)
    smem_bytes = _smem_bytes(problem, cell, cluster, block_words, m_tiles, smem_pairs, most_groups)
    numbers = (cluster, block_words, k_pairs, smem_pairs, most_groups, str(problem.backward).lower())
    shape = f"GridShape<ds2::{number}, ds2::{cell.cuda}, {', '.join(map(str, numbers))}>"
    return Choice(
        design="grid",
        launch=Launch(
            kernel("grid_narrow.cuh", "grid_recurrence", shape, cell, smem_bytes, exchange=True),
            threads=THREADS + 2 * FINISHERS,  # the others add
            grid=-(-words // (block_words * cluster)) * cluster,
            cluster=cluster,
            smem_bytes=smem_bytes,
            cooperative=True,
        ),
        rows=sums * block_words * per_word,
        samples=samples,
        groups=groups,
        step_cycles=tiles
        * _tile_us(cluster, m_tiles * k_pairs, groups, sent * words * samples * 4 / cluster)
        * CYCLES_A_US,
        exchange_words=SLOTS * groups * sent * words * samples,
    )


def _block_words(words: int, cluster: int, clusters: int, rows_per_word: int) -> int:
    """Words of each utterance's state that a block owns: its share, or whole units of 16 bytes at the same price."""
    block_words = -(-words // (clusters * cluster))
    m_tiles = -(-block_words * cluster * rows_per_word // MMA_ROWS)
    whole_units = -(-block_words // 4) * 4  # then fewer lines of the exchange have two writers
    return whole_units if whole_units * cluster * rows_per_word <= m_tiles * MMA_ROWS else block_words


def _smem_bytes(
    problem: Problem,
    cell: Cell | GatedCell,
    cluster: int,
    block_words: int,
    m_tiles: int,
    smem_pairs: int,
    most_groups: int,
) -> int:
    """Two buffers of partial sums, two of received ones for each group, utterances' frames, inputs, mbarriers, weights.

    As in grid_narrow.cuh.
    """
    partial_bytes = WARPS * m_tiles * MMA_ROWS * MMA_SAMPLES * 4
    per_word = NUMBERS[problem.dtype][1]
    received_bytes = cluster * (1 if problem.backward else cell.gates) * block_words * per_word * MMA_SAMPLES * 4
    inputs, carried = 2 if problem.backward else 1, 0
    if cell.gates > 1:
        inputs, carried = 1 + cell.saved if problem.backward else cell.gates, per_word
    own_bytes = (most_groups * (1 + carried) + INPUTS_AHEAD * inputs) * FINISHERS * 4
    weight_bytes = THREADS * smem_pairs * m_tiles * 32
    return 2 * partial_bytes + 2 * most_groups * (received_bytes + 8) + own_bytes + weight_bytes


def _tile_us(cluster: int, products: int, groups: int, read_bytes: float) -> float:
    """Time of one step of a tile, fitted to H 1160 - 2816, B 1 - 64 on an H200 (ops/notes/grid_narrow.md) within 10 %.

    One group is a chain of latencies, products of its last words and its share of the state; others hide a part of it.
    """
    if groups == 1:
        return (1.24 if cluster == 2 else 1.13) + 0.026 * products + 2.66e-5 * read_bytes
    return 0.2 + groups * (0.49 + 0.02 * products + 2.8e-5 * read_bytes)


def _register_pairs(m_tiles: int, k_pairs: int, registers: int) -> int:
    """Pairs of matrix instructions along K whose weights a multiplying thread of so many registers can keep in them."""
    waves = -(-k_pairs // MOST_WAVE)
    spare = registers - OTHER_REGISTERS - 4 * -(-k_pairs // waves) - 4 * m_tiles  # chunks of the state, sums
    pair = 8 * m_tiles
    if waves > 1 or k_pairs * pair > spare:
        spare -= PASSING_REGISTERS
    return min(k_pairs, spare // pair)
