"""Tiles of the cluster design, whose blocks hand the state to each other through distributed shared memory."""

from ds2_ops.recurrent.plan.model import Work
from ds2_ops.recurrent.plan.problem import (
    FINISHERS,
    MMA_ROWS,
    MMA_SAMPLES,
    MMA_WORDS,
    NUMBERS,
    THREADS,
    WARPS,
    Choice,
    Design,
    DeviceFacts,
    Problem,
    make_choice,
)

WEIGHT_REGISTERS = 180  # of a multiplying thread; the loop needs about 20 more
STEPS_AHEAD = 4  # steps by which inputs are prefetched


def cluster_choices(problem: Problem, device: DeviceFacts, sms: int) -> list[Choice]:
    """Return every tile of the cluster design that can run this problem on ``sms`` multiprocessors."""
    choices = []
    for cluster in (8, 16):
        clusters = min(device.active_clusters.get(cluster, 0), sms // cluster)
        gates = problem.cell.gates
        owned = cluster_units(problem.hidden, problem.dtype, cluster, gates, device.registers)
        if clusters == 0 or owned is None:
            continue
        m_tiles = -(-problem.sums * owned // MMA_ROWS)
        # Row tiles of the first of two parts, which is not the smaller one; a unit's gates stay together.
        heads = range(-(-m_tiles // 2), m_tiles) if gates == 1 else ()
        for groups, head_tiles in ((1, m_tiles), (2, m_tiles), *((1, head) for head in heads)):
            for samples in _sample_counts(problem, clusters, groups):
                choice = _choice(problem, cluster, clusters, owned, groups, head_tiles, samples)
                # With two directions every tile has a cluster of its own, and some clusters wait for others to end.
                fits = choice.launch.grid <= cluster * clusters or clusters == device.active_clusters[cluster]
                if fits and choice.launch.smem_bytes <= device.smem_bytes_per_block:
                    choices.append(choice)
    return choices


def _sample_counts(problem: Problem, clusters: int, groups: int) -> list[int]:
    """Return the possible utterances of a group: spread over all clusters, or more, for fewer clusters or tiles.

    Two directions share the clusters, or all clusters run one and then the other.
    """
    batch, shares = problem.batch, range(clusters // problem.directions or 1, clusters + 1)
    spread, *others = {min(MMA_SAMPLES, -(-batch // (share * groups))): None for share in (shares[-1], shares[0])}
    counts = [spread, *(samples for samples in (2, 4, 8) if spread < samples <= -(-batch // groups))]
    return [*counts, *(samples for samples in others if samples not in counts)]


def cluster_units(
    hidden: int, dtype: str, cluster: int, gates: int = 1, registers: int = DeviceFacts.registers
) -> int | None:
    """Return the hidden units of a block of a cluster; None if registers do not hold their rows in both passes."""
    per_word = NUMBERS[dtype][1]
    # Blocks exchange 16 bytes at a time, and each of 8 warps takes a whole number of matrix instructions.
    step = per_word * max(4, MMA_WORDS * WARPS // cluster)
    owned = -(-hidden // (cluster * step)) * step
    for sums, sent in {(gates, 1), (1, gates)}:
        m_tiles, k_tiles = _tiles(owned, per_word, cluster, sums, sent)
        if 4 * (k_tiles + (gates > 1)) * m_tiles > WEIGHT_REGISTERS * registers // DeviceFacts.registers:
            return None
    return owned


def largest_cluster_hidden(dtype: str, gates: int = 1) -> int:
    """Return the largest hidden size that the cluster design can keep in registers."""
    hidden = 0
    while cluster_units(hidden + 1, dtype, 16, gates) is not None:
        hidden += 1
    return hidden


def _tiles(owned: int, per_word: int, cluster: int, sums: int, sent: int) -> tuple[int, int]:
    """Return the matrix instructions of a warp along the rows of its block, and along its share of K."""
    return -(-sums * owned // MMA_ROWS), cluster * sent * owned // per_word // (MMA_WORDS * WARPS)


def _choice(
    problem: Problem, cluster: int, clusters: int, owned: int, groups: int, head_tiles: int, samples: int
) -> Choice:
    per_word, sums, sent = problem.per_word, problem.sums, problem.sent
    words = owned // per_word
    m_tiles, k_tiles = _tiles(owned, per_word, cluster, sums, sent)
    tiles = problem.directions * -(-problem.batch // (samples * groups))
    parts = 1 if head_tiles == m_tiles else 2
    head_words = words if parts == 1 else head_tiles * MMA_ROWS // per_word
    numbers = [cluster, owned, groups, head_tiles, problem.backward, not problem.split_words]
    numbers += [problem.directions] if problem.directions > 1 else []
    work = Work(
        layout=f"cluster{cluster}",
        tiles=-(-tiles // clusters),
        m_tiles=m_tiles,
        k_tiles=k_tiles,
        words=words,
        head_words=head_words,
        samples=samples,
        groups=groups,
        cluster=cluster,
        blocks=cluster * min(tiles, clusters),
        rounds=-(-samples // (FINISHERS // head_words)),
        state_words=cluster * sent * words,
        **problem.of_work,
    )
    grid = cluster * tiles if problem.directions > 1 else None
    threads, smem_bytes = THREADS + groups * parts * FINISHERS, _smem_bytes(problem, work, parts)
    sizes = {"rows": sums * owned, "threads": threads, "smem_bytes": smem_bytes}
    return make_choice(Design.CLUSTER, problem, numbers, work, grid=grid, **sizes)


def _smem_bytes(problem: Problem, work: Work, parts: int) -> int:
    """Sum two stages of state and partial sums, padded against bank conflicts, inputs, mbarriers, as in cluster.cuh."""
    cluster, words = work.cluster, work.sent * work.words
    # Where it comes out even, two warps share a portion of K, each for a part of the rows, as in cluster_shape.cuh.
    k_split = WARPS // (1 if work.sums == 1 or work.k_tiles % 2 or work.m_tiles % 2 else 2)
    sample_pitch = (4 * words + 31) // 64 * 64 + 32 if cluster == 16 else (4 * words + 63) // 128 * 128 + 64
    state_bytes = cluster * (MMA_SAMPLES * sample_pitch + 64)
    partial_bytes = k_split * MMA_SAMPLES * (MMA_ROWS * work.m_tiles + 4) * 4
    cell, owned = problem.cell, work.head_words * problem.per_word
    if problem.backward and cell.gates > 1 and owned == 2 * MMA_ROWS:  # pushes: received sums, and its own gradients
        state_bytes = cluster * MMA_SAMPLES * owned * 4
        partial_bytes = MMA_SAMPLES * ((4 * words + 63) // 128 * 128 + 64)
    rounds = -(-MMA_SAMPLES // (FINISHERS // work.head_words))
    slots, states = 2 if problem.backward else 1, 0
    if cell.gates > 1:
        slots, states = 1 + cell.saved, problem.per_word
    input_bytes = (1 + states + STEPS_AHEAD * slots) * rounds * FINISHERS * 4  # 1: lengths
    return work.groups * (2 * (state_bytes + partial_bytes) + parts * (input_bytes + 2 * WARPS * 8))
