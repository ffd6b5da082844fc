"""Tiles of the wide whole-chip design: groups of up to 32 utterances of 16-bit numbers."""

from ds2_ops.jit.launch import Launch
from ds2_ops.recurrent.cells import ALL
from ds2_ops.recurrent.plan.entry import kernel
from ds2_ops.recurrent.plan.grid import INPUTS_AHEAD, SLOTS, state_words, turns
from ds2_ops.recurrent.plan.problem import (
    FINISHERS,
    MMA_ROWS,
    MMA_WORDS,
    NUMBERS,
    THREADS,
    WARPS,
    Choice,
    DeviceFacts,
    Problem,
)
from ds2_ops.recurrent.plan.work import Work

CLUSTERS = (8, 6, 5, 4)  # more blocks, less for each to read and multiply
WORDS = 64  # of a cluster
SAMPLES = 32  # utterances of a group at most, in one warp-group instruction
MOST_GROUPS = 2
MOST_K_TILES = 32  # matrix instructions along K, one block
PARTS = 4  # of K, one for each polling warp
PIECE_TILES = 2  # matrix instructions whose state it hands on at once
PARCEL_BYTES = 512  # of sums: 8 words of 8 utterances


def wide_choices(problem: Problem, device: DeviceFacts, sms: int) -> list[Choice]:
    """Every tile of this design that can run this problem on ``sms`` multiprocessors, one block on each."""
    found: list[Choice] = []
    for cluster in CLUSTERS:
        clusters = min(device.active_clusters.get(cluster, 0), sms // cluster)
        for most_samples in (SAMPLES, SAMPLES // 2, SAMPLES // 4):
            choice = _choice(
                problem, cluster, clusters, most_samples, MOST_K_TILES * device.registers // DeviceFacts.registers
            )
            if choice is None or choice.launch.smem_bytes > device.smem_bytes_per_block:
                break
            if not found or choice.work != found[-1].work:  # smaller groups, in more turns
                found.append(choice)
    return found


def _choice(problem: Problem, cluster: int, clusters: int, most_samples: int, most_k_tiles: int) -> Choice | None:
    """None where weights or clusters are too many or some block has no part of K."""
    number, per_word = NUMBERS[problem.dtype]
    cell = ALL[problem.nonlinearity]
    words = state_words(problem)
    k_tiles = -(-words // (cluster * MMA_WORDS))
    used = -(-words // WORDS)
    if (
        cell.gates > 1
        or per_word != 2
        or used > clusters
        or k_tiles > most_k_tiles
        or words <= (cluster - 1) * k_tiles * MMA_WORDS
    ):
        return None
    samples, groups, tiles = turns(problem.batch, most_samples, MOST_GROUPS)
    smem_bytes = _smem_bytes(problem.backward, cluster, k_tiles)
    shape = f"WideShape<ds2::{number}, ds2::{cell.cuda}, {cluster}, {k_tiles}, {str(problem.backward).lower()}>"
    return Choice(
        design="grid",
        launch=Launch(
            kernel("grid_wide.cuh", "wide_recurrence", shape, cell, smem_bytes, threads=2 * THREADS, exchange=True),
            threads=2 * THREADS,
            grid=used * cluster,
            cluster=cluster,
            smem_bytes=smem_bytes,
            cooperative=True,
        ),
        rows=-(-WORDS * per_word // cluster),
        samples=samples,
        groups=groups,
        exchange_words=SLOTS * groups * words * SAMPLES,
        work=Work(
            layout=f"wide{cluster}",
            backward=problem.backward,
            split_words=problem.hidden % per_word != 0,
            tiles=tiles,
            m_tiles=WORDS * per_word // MMA_ROWS,
            k_tiles=k_tiles,
            words=-(-WORDS // cluster),
            head_words=-(-WORDS // cluster),
            samples=samples,
            groups=groups,
            cluster=cluster,
            blocks=used * cluster,
            rounds=1,
            state_words=k_tiles * MMA_WORDS,
        ),
    )


def _smem_bytes(backward: bool, cluster: int, k_tiles: int) -> int:
    """Two buffers of the state, two of received sums for each group, inputs, utterances' frames, mbarriers.

    As in grid_wide.cuh; every finishing warp has inputs and frames of its own.
    """
    parcels = -(-WARPS * SAMPLES // 8 // cluster)
    finishing_warps = FINISHERS // 32
    state_bytes = k_tiles * MMA_WORDS * SAMPLES * 4
    received_bytes = parcels * cluster * PARCEL_BYTES
    input_bytes = finishing_warps * -(-parcels // finishing_warps) * 8 * 8 * 4
    own_bytes = INPUTS_AHEAD * (2 if backward else 1) * input_bytes
    frames_bytes = finishing_warps * MOST_GROUPS * SAMPLES * 4
    pieces = -(k_tiles // -PARTS // PIECE_TILES)
    barriers = 2 * MOST_GROUPS + 2 * pieces + 2
    return 2 * state_bytes + 2 * MOST_GROUPS * received_bytes + own_bytes + frames_bytes + 8 * barriers
