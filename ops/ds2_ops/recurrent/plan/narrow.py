"""Tiles of the narrow whole-chip design: groups of up to 8 utterances, any number type.

Without clusters it is the portable design, for any GPU of compute capability 8.0 or later.
"""

from ds2_ops.recurrent.plan.model import Work
from ds2_ops.recurrent.plan.problem import (
    FINISHERS,
    GATED_SLOTS,
    INPUTS_AHEAD,
    MMA_ROWS,
    MMA_SAMPLES,
    SLOTS,
    THREADS,
    WARPS,
    Choice,
    Design,
    DeviceFacts,
    Problem,
    make_choice,
    state_words,
    turns,
)

PAIR_WORDS = 16  # words of K in two matrix instructions
MAX_WAVE = 6  # 16-byte loads of a lane in flight
REGISTERS = 208  # of a multiplying thread, in clusters; portable kernels have as many for every thread
OTHER_REGISTERS = 28  # of these, for neither weights nor sums nor chunks of the state
PASSING_REGISTERS = 16  # additional ones where weights or chunks come in turns
BLACKWELL_REGISTERS = 40  # that the compiler takes more for compute capability 10.0 and 12.0
MAX_ROW_TILES = 11  # the sums of more would spill
CLUSTERS = (2, 4, 6, 8)  # blocks that divide K
TEAMS, MORE_TEAMS = (1, 2, 4), (8,)  # and without clusters; of cells with gates
EXCHANGE_SHARE = 0.5  # of L2 that the exchange may fill, beside the inputs and outputs that stream through it
MAX_GROUPS = (8, 4, 2, 1)  # of up to 8 utterances that take turns


def narrow_choices(problem: Problem, device: DeviceFacts, sms: int) -> list[Choice]:
    """Return every tile of this design that can run this problem on ``sms`` multiprocessors, one block on each."""
    fitting: list[Choice] = []
    for cluster in CLUSTERS:
        clusters = min(device.active_clusters.get(cluster, 0), sms // cluster)
        fitting += _of_clusters(problem, device, cluster, clusters, False)
    return fitting


def portable_choices(problem: Problem, device: DeviceFacts, sms: int) -> list[Choice]:
    """Return every tile without clusters that can run this problem on ``sms`` multiprocessors, one block on each."""
    if problem.directions > 1:
        return []
    teams = TEAMS if problem.cell.gates == 1 else TEAMS + MORE_TEAMS
    return [choice for team in teams for choice in _of_clusters(problem, device, team, sms // team, True)]


def _of_clusters(problem: Problem, device: DeviceFacts, cluster: int, clusters: int, portable: bool) -> list[Choice]:
    """Return the tiles whose K is divided by ``cluster`` blocks."""
    fitting: list[Choice] = []
    words = state_words(problem)
    # Of several blocks each warp needs a part of K.
    if clusters > 0 and (cluster == 1 or problem.sent * words > (cluster * WARPS - 1) * PAIR_WORDS):
        for block_words in _block_words(words, cluster, clusters, problem.sums * problem.per_word):
            for max_groups in MAX_GROUPS:
                choices = [
                    _choice(problem, device, words, cluster, block_words, max_groups, max_samples, portable)
                    for max_samples in _sample_limits(problem.batch, block_words)
                ]
                if choices[0] is not None and _fits(choices[0], device):
                    fitting += [choice for choice in choices if choice is not None]
                    break  # a kernel for fewer groups is never faster
    return fitting


def _fits(choice: Choice, device: DeviceFacts) -> bool:
    small = choice.design is Design.NARROW or 4 * choice.exchange_words <= device.l2_bytes * EXCHANGE_SHARE
    return small and choice.launch.smem_bytes <= device.smem_bytes_per_block


def _block_words(words: int, cluster: int, clusters: int, rows_per_word: int) -> list[int]:
    """Return the words of each utterance's h that a block may own, with the clusters that exist.

    These are its share; whole units of 16 bytes at the same cost, so that fewer lines of the exchange have two writers;
    or words that fill one or two more row tiles, so that fewer blocks take part.
    """
    share = -(-words // (clusters * cluster))
    m_tiles = -(-share * cluster * rows_per_word // MMA_ROWS)
    whole_units = -(-share // 4) * 4
    fuller = {(m_tiles + more) * MMA_ROWS // (cluster * rows_per_word) for more in range(3)}
    options = {share, *fuller} | (
        {whole_units} if whole_units * cluster * rows_per_word <= m_tiles * MMA_ROWS else set()
    )
    return sorted(option for option in options if share <= option <= min(FINISHERS, words))


def _sample_limits(batch: int, block_words: int) -> list[int]:
    """Return the limits for the utterances of a group: the maximum, and half and a quarter of it, in more turns."""
    largest = min(MMA_SAMPLES, FINISHERS // block_words)
    return [largest, *(limit for limit in (largest // 2, largest // 4) if 0 < limit < batch)]


def _choice(
    problem: Problem,
    device: DeviceFacts,
    words: int,
    cluster: int,
    block_words: int,
    max_groups: int,
    max_samples: int,
    portable: bool,
) -> Choice | None:
    """Return a tile; None where the registers hold no weights, or too many sums."""
    cell, per_word, sums, sent = problem.cell, problem.per_word, problem.sums, problem.sent
    m_tiles = -(-block_words * cluster * sums * per_word // MMA_ROWS)
    k_pairs = -(-sent * words // (cluster * WARPS * PAIR_WORDS))
    all_threads = THREADS + (1 if cluster == 1 else 2) * FINISHERS  # of several blocks some threads only add
    if portable:
        registers = device.registers // all_threads // 8 * 8
        registers -= BLACKWELL_REGISTERS if device.capability >= (10, 0) else 0
        # For the sums of a team, and addresses; and for what a second phase does.
        registers -= 16 if cluster > 1 and cell.gates > 1 and (per_word == 1 or cell.phases > 1) else 0
    else:
        registers = REGISTERS * device.registers // DeviceFacts.registers
        registers -= 0 if cell.gates == 1 else 16 if per_word > 1 else 20  # for the finishing warps, and addresses
    register_pairs = _register_pairs(m_tiles, k_pairs, registers)
    if register_pairs < 1 or (cell.gates == 1 and m_tiles > MAX_ROW_TILES):
        return None
    smem_pairs = k_pairs - register_pairs
    slots = SLOTS if cell.gates == 1 or portable else GATED_SLOTS
    samples, groups, tiles = turns(problem.batch, max_samples, max_groups)
    smem_bytes = _smem_bytes(problem, 1 if portable else cluster, block_words, m_tiles, smem_pairs, max_groups)
    team = portable and cluster > 1
    numbers = [cluster, block_words, k_pairs, smem_pairs, max_groups, problem.backward]
    numbers += [True] if team else []
    blocks = -(-words // (block_words * cluster)) * cluster
    team_words = 2 * groups * blocks * cluster * sums * block_words * per_word * 2 * _pairs(samples)
    work = Work(
        layout=f"{'portable' if portable else 'narrow'}{cluster}",
        tiles=tiles,
        m_tiles=m_tiles,
        k_tiles=2 * k_pairs,
        words=block_words,
        head_words=block_words,
        samples=samples,
        groups=groups,
        cluster=cluster,
        blocks=blocks,
        rounds=-(-m_tiles * MMA_ROWS * _pairs(samples) // FINISHERS),
        state_words=-(-sent * words // cluster),
        smem_k_tiles=2 * smem_pairs,
        **problem.of_work,
    )
    return make_choice(
        Design.PORTABLE if portable else Design.NARROW,
        problem,
        numbers,
        work,
        rows=sums * block_words * per_word,
        threads=all_threads,
        smem_bytes=smem_bytes,
        slots=slots,
        exchange_words=slots * groups * sent * words * samples + (team_words if team else 0),
    )


def _pairs(samples: int) -> int:
    """Return for how many pairs of utterances there are sums."""
    return 4 if samples > 4 else 2 if samples > 2 else 1


def _smem_bytes(
    problem: Problem, cluster: int, block_words: int, m_tiles: int, smem_pairs: int, max_groups: int
) -> int:
    """Sum two buffers of partial sums, two of received sums for each group, lengths, what is carried, inputs, weights.

    As in grid_narrow.cuh.
    """
    partial_bytes = WARPS * m_tiles * MMA_ROWS * MMA_SAMPLES * 4
    cell, per_word = problem.cell, problem.per_word
    received_bytes = cluster * problem.sums * block_words * per_word * MMA_SAMPLES * 4
    buffers = 2 * max_groups * (received_bytes + 8) if cluster > 1 else 0  # 8: an mbarrier
    inputs, states = 2 if problem.backward else 1, 0
    if cell.gates > 1:
        inputs, states = 1 + cell.saved if problem.backward else cell.gates, per_word
    if cell.phases > 1:  # what the first phase of a step keeps for the second
        states += 1 if problem.backward else 2 * per_word
    own_bytes = (max_groups * (1 + states) + INPUTS_AHEAD * inputs) * FINISHERS * 4
    weight_bytes = THREADS * smem_pairs * m_tiles * 32
    return 2 * partial_bytes + buffers + own_bytes + weight_bytes


def _register_pairs(m_tiles: int, k_pairs: int, registers: int) -> int:
    """Return for how many pairs of matrix instructions along K a multiplying thread keeps the weights in registers."""
    waves = -(-k_pairs // MAX_WAVE)
    spare = registers - OTHER_REGISTERS - 4 * -(-k_pairs // waves) - 4 * m_tiles  # chunks of the state, sums
    pair = 8 * m_tiles
    if waves > 1 or k_pairs * pair > spare:
        spare -= PASSING_REGISTERS
    return min(k_pairs, spare // pair)
