"""Tiles of the units design, for small layers: warps own hidden units with all of K, on one block or a cluster."""

from ds2_ops.recurrent.cells import Cell
from ds2_ops.recurrent.plan.model import Work
from ds2_ops.recurrent.plan.problem import MMA_WORDS, Choice, Design, DeviceFacts, Problem, make_choice

MAX_WARPS, MAX_REGISTERS = 32, 255  # of a block, of a thread
PAIR_WORDS = 2 * MMA_WORDS  # of K that a lane loads at once


def units_choices(problem: Problem, device: DeviceFacts, sms: int) -> list[Choice]:
    """Return every tile of this design for this problem on ``sms`` multiprocessors; none for two directions."""
    fitting: list[Choice] = []
    if problem.directions > 1:
        return fitting
    # Clusters of 16 have constants for cells without gates only: no cell with gates that was timed fits into them.
    for cluster in (1, 2, 4, 8, 16) if problem.cell.gates == 1 else (1, 2, 4, 8):
        clusters = sms if cluster == 1 else min(device.active_clusters.get(cluster, 0), sms // cluster)
        if clusters == 0:
            continue
        spread = -(-problem.batch // clusters)
        samples = {min(spread, 8), *(s for s in (2, 4, 8) if spread < s <= problem.batch)}
        choices = (_choice(problem, device, cluster, clusters, count) for count in samples)
        fitting += [choice for choice in choices if choice is not None]
    return fitting


def _choice(problem: Problem, device: DeviceFacts, cluster: int, clusters: int, samples: int) -> Choice | None:
    cell, per_word, sums, sent = problem.cell, problem.per_word, problem.sums, problem.sent
    warp_units = 16 if sums == 1 else 8
    step = warp_units if cluster == 1 else PAIR_WORDS * per_word
    owned = -(-problem.hidden // (cluster * step)) * step
    warps = owned // warp_units
    words = -(-owned // per_word // PAIR_WORDS) * PAIR_WORDS
    columns = 1 if samples <= 4 else 2
    k_tiles = cluster * words * sent // MMA_WORDS
    warps_of_sub_core = -(-warps // 4)  # of four, each with a quarter of the registers
    max_registers = min(MAX_REGISTERS, device.registers // (128 * warps_of_sub_core) // 8 * 8)
    # A lane's two units, if it has two, may share a word.
    lane_words = 2 if warp_units == 16 and (per_word == 1 or problem.split_words) else 1
    if warps > MAX_WARPS or _registers(cell, problem.backward, k_tiles, columns, lane_words) > max_registers:
        return None
    if samples == 1 and sums > 1 and _registers(cell, False, k_tiles, 0, lane_words) <= max_registers:
        columns = 0  # one utterance: four lanes share a unit
    smem_bytes = _smem_bytes(problem, cluster, warps, words, columns, lane_words)
    if smem_bytes > device.smem_bytes_per_block:
        return None
    tiles = -(-problem.batch // samples)
    work = Work(
        layout=f"units{cluster}",
        tiles=-(-tiles // clusters),
        m_tiles=1 if sums == 1 else -(-sums // 2),
        k_tiles=k_tiles,
        words=words,
        head_words=words,
        samples=samples,
        groups=1,
        cluster=cluster,
        blocks=cluster * min(tiles, clusters),
        rounds=warps_of_sub_core,
        state_words=cluster * sent * words,
        **problem.of_work,
    )
    numbers = (cluster, warps, columns, problem.backward, not problem.split_words)
    threads = 32 * warps
    return make_choice(Design.UNITS, problem, numbers, work, rows=sums * owned, threads=threads, smem_bytes=smem_bytes)


def _registers(cell: Cell, backward: bool, k_tiles: int, columns: int, lane_words: int) -> int:
    """Return the registers of a thread for weights and the loop without spills, fitted to all compiled tiles."""
    weights = 4 * k_tiles * (1 if backward else -(-cell.gates // 2))
    wide, shared = max(columns - 1, 0), 16 if columns == 0 else 0
    if cell.gates == 1:
        return weights + 64 + wide * (8 + 40 * (lane_words - 1))
    if backward:
        return weights + (60 + 72 * wide if lane_words == 1 else 96 + 84 * wide)
    return weights + 64 - 4 * (cell.gates == 4) + 12 * (cell.phases - 1) + 24 * wide + shared


def _smem_bytes(problem: Problem, cluster: int, warps: int, words: int, columns: int, lane_words: int) -> int:
    """Sum two states, prefetched inputs and two mbarriers, as in units.cuh."""
    cell = problem.cell
    vectors = cell.gates - (cell.phases - 1) if problem.backward else 1
    state_bytes = cluster * (4 * columns or 1) * ((4 * vectors * words + 63) // 128 * 128 + 64)
    read_back = 2 if cell.gates == 1 else 1 + cell.saved
    inputs = read_back if problem.backward else cell.gates if columns else 1
    return 2 * state_bytes + 8 * lane_words * inputs * 32 * warps * 4 + 16
