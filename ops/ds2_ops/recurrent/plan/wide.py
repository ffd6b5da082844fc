"""Tiles of the wide whole-chip design: groups of up to 32 utterances of 16-bit numbers."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from ds2_ops.recurrent.plan.model import Work
from ds2_ops.recurrent.plan.problem import (
    FINISHERS,
    INPUTS_AHEAD,
    MMA_WORDS,
    SLOTS,
    Choice,
    Design,
    DeviceFacts,
    Problem,
    make_choice,
    state_words,
    turns,
)

SAMPLES = 32  # most utterances of a group, in one warp-group instruction
MAX_GROUPS = 2
PARTS = 4  # of K, one for each polling warp
PIECE_TILES = 2  # matrix instructions whose state a polling warp hands on at once
FINISHING_WARPS = FINISHERS // 32
MAX_SMEM_TILES, SMEM_TILE_BYTES = 4, 2048  # of a warp group: matrix instructions with weights in shared memory
PARCEL_BYTES = 512  # of each sum: 8 words of 8 utterances


@dataclass(frozen=True)
class _Space:
    """Limits of tiles: blocks of a cluster; multiplying warp groups -> instructions along K; parcels of a warp."""

    clusters: tuple[int, ...]
    max_k_tiles: Mapping[int, int]
    warp_parcels: int


PLAIN = _Space((8, 6, 5, 4), {2: 32}, 2)  # with more blocks, each reads and multiplies less
# There are more rows, or a larger K, and finishing warps need more registers: too many for a GRU on clusters of 8.
GATES = _Space((16, 9, 6, 5, 4, 3, 2), {2: 28, 3: 16}, 1)


def wide_choices(problem: Problem, device: DeviceFacts, sms: int) -> list[Choice]:
    """Return every tile of this design that can run this problem on ``sms`` multiprocessors, one block on each."""
    whole: list[Choice] = []
    halves: list[Choice] = []
    limits = PLAIN if problem.cell.gates == 1 else GATES
    for warp_groups, cluster in itertools.product(limits.max_k_tiles, limits.clusters):
        clusters = min(device.active_clusters.get(cluster, 0), sms // cluster)
        for max_samples in (SAMPLES, SAMPLES // 2, SAMPLES // 4):
            choice = _choice(problem, device, limits, warp_groups, cluster, clusters, max_samples)
            if choice is None:
                break
            if not whole or choice.work != whole[-1].work:  # smaller groups, in more turns
                whole.append(choice)
        if limits is GATES and warp_groups == 2 and problem.batch > SAMPLES:
            choice = _choice(problem, device, limits, warp_groups, cluster, clusters, SAMPLES, streams=2)
            halves += [choice] if choice is not None else []
    # On the whole chip, weights lie in shared memory only where no tile of this design holds them in registers.
    in_registers = [choice for choice in whole if not choice.work.smem_k_tiles]
    return (in_registers or whole) + halves


def _choice(
    problem: Problem,
    device: DeviceFacts,
    limits: _Space,
    warp_groups: int,
    cluster: int,
    clusters: int,
    max_samples: int,
    streams: int = 1,
) -> Choice | None:
    """Return a tile; None where weights, clusters or shared memory do not suffice, or a block has no part of K.

    Args:
        streams: parts of the chip; each keeps all weights and runs its own groups, one at a time.
    """
    cell, per_word, sums, sent = problem.cell, problem.per_word, problem.sums, problem.sent
    words = state_words(problem)
    k_tiles = -(-sent * words // (cluster * MMA_WORDS))
    warps = 4 * warp_groups
    cluster_words = warps // sums * 8
    used = -(-words // cluster_words)
    parcels = -(-(warps // sums) * SAMPLES // 8 // cluster)  # that a block finishes, at most
    warp_parcels = -(-parcels // FINISHING_WARPS)
    smem_tiles = max(0, k_tiles - limits.max_k_tiles[2]) if limits is GATES and warp_groups == 2 else 0
    if (
        per_word != 2
        or streams * used > clusters
        or k_tiles - smem_tiles > limits.max_k_tiles[warp_groups] * device.registers // DeviceFacts.registers
        or smem_tiles > MAX_SMEM_TILES
        or warp_parcels > limits.warp_parcels
        or sent * words <= (cluster - 1) * k_tiles * MMA_WORDS
        # These would spill: four gates with split words; the gradients of three gates with a large part of K.
        or (warp_groups == 3 and cell.gates == 4 and problem.split_words)
        or (warp_groups == 3 and cell.gates == 3 and problem.backward and k_tiles > 13)
    ):
        return None
    max_groups = MAX_GROUPS if streams == 1 else 1
    samples, groups, tiles = turns(problem.batch, max_samples, max_groups)
    tiles = -(-tiles // streams)
    smem_bytes = _smem_bytes(problem, warps, cluster, k_tiles, max_groups, parcels)
    smem_bytes += warp_groups * smem_tiles * SMEM_TILE_BYTES
    if smem_bytes > device.smem_bytes_per_block:
        return None
    threads = 32 * warps + 2 * FINISHERS  # the others poll
    numbers = (cluster, warp_groups, k_tiles, problem.backward, *([streams] if streams > 1 else []))
    work = Work(
        layout=f"{'streams' if streams > 1 else 'wide' if warp_groups == 2 else 'wider'}{cluster}",
        tiles=tiles,
        m_tiles=warps,
        k_tiles=k_tiles,
        words=-(-cluster_words // cluster),
        head_words=-(-cluster_words // cluster),
        samples=samples,
        groups=groups,
        cluster=cluster,
        blocks=streams * used * cluster,
        rounds=1,
        state_words=k_tiles * MMA_WORDS,
        smem_k_tiles=smem_tiles,
        **problem.of_work,
    )
    return make_choice(
        Design.WIDE,
        problem,
        numbers,
        work,
        rows=-(-cluster_words * sums * per_word // cluster),
        threads=threads,
        smem_bytes=smem_bytes,
        slots=SLOTS,
        exchange_words=streams * SLOTS * groups * sent * words * SAMPLES,
    )


def _smem_bytes(problem: Problem, warps: int, cluster: int, k_tiles: int, max_groups: int, parcels: int) -> int:
    """Sum two buffers of the state, two of received sums for each group, inputs and outputs, carries and barriers.

    As in grid_wide_shape.cuh; every finishing warp has its own memory.
    """
    cell, sums = problem.cell, problem.sums
    warp_parcels = -(-parcels // FINISHING_WARPS)
    state_bytes = k_tiles * MMA_WORDS * SAMPLES * 4
    received_bytes = parcels * cluster * sums * PARCEL_BYTES
    arrays, ahead, carry_bytes = 2 if problem.backward else 1, INPUTS_AHEAD, 0
    if cell.gates > 1:  # forward writes, and backward reads, y or its gradient and what was saved
        arrays, ahead, carry_bytes = 1 + cell.saved, INPUTS_AHEAD // 2, warp_parcels * 4 * FINISHERS * 4
    own_bytes = ahead * arrays * FINISHING_WARPS * warp_parcels * 8 * 8 * 4
    frames_bytes = FINISHING_WARPS * max_groups * SAMPLES * 4
    pieces = -(k_tiles // -PARTS // PIECE_TILES)
    barriers = 2 * max_groups + 2 * pieces + 2
    buffers = 2 * state_bytes + 2 * max_groups * received_bytes
    ready_bytes = warp_parcels * 2 * 4 * FINISHERS * 16 if cell.gates > 1 and problem.backward and warps == 12 else 0
    return buffers + own_bytes + frames_bytes + max_groups * carry_bytes + ready_bytes + 8 * barriers
