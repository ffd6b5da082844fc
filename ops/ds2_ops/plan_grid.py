"""Plans of the whole-chip designs, for hidden sizes that one cluster cannot hold. Needs no GPU.

Shape letters: B batch, H hidden.
"""

from ds2_ops.plan import CELLS, MMA_ROWS, MMA_SAMPLES, NUMBERS, THREADS, WARPS, DeviceFacts, Launch, Problem

SLOTS = 4  # of the exchange
PAIR_WORDS = 16  # words of K in two matrix instructions
MOST_M_TILES = 2
WEIGHT_PAIRS = 20  # instruction pairs x tiles of 16 rows with weights in registers: 160 of a thread's 255
MIXED_WEIGHT_PAIRS = 18  # where others lie in shared memory, on their way through registers
WIDE_CLUSTER = 4  # blocks that split K between them
WIDE_SAMPLES = 64  # utterances in one warp-group instruction
WIDE_MOST_ROWS = 128  # of a cluster
GROUPS = 2  # warp groups of a block

# The signature of the cluster design's kernel and the exchange, SLOTS states that are all EMPTY.
_ENTRY = """
extern "C" __global__ void __launch_bounds__(ds2::THREADS, 1) ds2_kernel(
    const void* input, const void* output_y, const void* matrix, const void* state, const int* lengths, void* result,
    void* last_state, int frames, int batch, int hidden, int samples, int whole_words, int wide_matrix, float clip,
    unsigned* exchange) {
    ds2::FUNCTION<Shape>({input, output_y, matrix, state, lengths, result, last_state, frames, batch, hidden, samples,
                          whole_words, wide_matrix, clip}, exchange);
}
"""


def grid_launches(problem: Problem, device: DeviceFacts, sms: int) -> list[Launch]:
    """Every whole-chip design that can run this problem on ``sms`` multiprocessors, one block on each."""
    found = [_narrow(problem, sms), _wide(problem, device, sms)]
    return [launch for launch in found if launch is not None and launch.smem_bytes <= device.smem_bytes_per_block]


def largest_grid_hidden(dtype: str, device: DeviceFacts, sms: int) -> int:
    """The largest hidden size that the whole-chip designs can keep on ``sms`` multiprocessors."""
    hidden = MOST_M_TILES * MMA_ROWS * sms
    while hidden > 0 and not grid_launches(Problem(1, hidden, dtype, "relu", False), device, sms):
        hidden -= 1
    return hidden


def _state_words(problem: Problem) -> int:
    """Words of one utterance's state, in whole units of 16 bytes."""
    return -(-problem.hidden // (4 * NUMBERS[problem.dtype][1])) * 4


def _narrow(problem: Problem, sms: int) -> Launch | None:
    """Up to 8 utterances at a time, every block reading the whole state: grid.cuh."""
    number, per_word = NUMBERS[problem.dtype]
    words = _state_words(problem)
    block_words = -(-words // sms)
    m_tiles = -(-block_words * per_word // MMA_ROWS)
    if m_tiles > MOST_M_TILES:
        return None
    k_pairs = -(-words // (PAIR_WORDS * WARPS))
    in_registers = k_pairs if k_pairs * m_tiles <= WEIGHT_PAIRS else MIXED_WEIGHT_PAIRS // m_tiles
    samples = min(problem.batch, MMA_SAMPLES)
    partial_bytes = WARPS * MMA_SAMPLES * (MMA_ROWS * m_tiles + 4) * 4
    step_us = 0.55 + 0.00045 * problem.hidden + words * samples * 4 / 60_000  # fitted to H 1760 and 2560, B 1 to 8
    return _launch(
        problem,
        header="grid.cuh",
        function="grid_recurrence",
        shape=f"GridShape<ds2::{number}, ds2::{CELLS[problem.nonlinearity]}, {m_tiles}, {k_pairs}, {in_registers}",
        grid=-(-words // block_words),
        cluster=1,
        smem_bytes=2 * partial_bytes + THREADS * (k_pairs - in_registers) * m_tiles * 32,
        rows=block_words * per_word,
        samples=samples,
        exchange_words=SLOTS * words * samples,
        step_us=step_us,
    )


def _wide(problem: Problem, device: DeviceFacts, sms: int) -> Launch | None:
    """Up to 64 utterances at a time, K split over clusters: grid_wide.cuh."""
    number, per_word = NUMBERS[problem.dtype]
    clusters = min(device.active_clusters.get(WIDE_CLUSTER, 0), sms // WIDE_CLUSTER)
    if per_word != 2 or clusters == 0:
        return None
    words = _state_words(problem)
    rows = -(-2 * words // (clusters * MMA_ROWS)) * MMA_ROWS
    if rows > WIDE_MOST_ROWS:
        return None
    k_pairs = -(-words // (WIDE_CLUSTER * GROUPS * PAIR_WORDS))
    samples = min(problem.batch, WIDE_SAMPLES)
    weight_bytes = GROUPS * 2 * k_pairs * rows * 32
    local_bytes = rows // 8 * 128 * 16
    receive_bytes = WIDE_CLUSTER * rows // 8 * 32 * 16
    return _launch(
        problem,
        header="grid_wide.cuh",
        function="wide_recurrence",
        shape=f"WideShape<ds2::{number}, ds2::{CELLS[problem.nonlinearity]}, {WIDE_CLUSTER}, {rows}, {k_pairs}",
        grid=-(-2 * words // rows) * WIDE_CLUSTER,
        cluster=WIDE_CLUSTER,
        smem_bytes=weight_bytes + local_bytes + 2 * receive_bytes + 16,
        rows=rows // WIDE_CLUSTER,
        samples=samples,
        exchange_words=SLOTS * words * 4 * -(-samples // 4),
        step_us=0.1 + 0.0015 * problem.hidden + 1e-5 * problem.hidden * samples,  # fitted to H 1760 and 2560, B 4 to 64
    )


def _launch(
    problem: Problem,
    *,
    header: str,
    function: str,
    shape: str,
    grid: int,
    cluster: int,
    smem_bytes: int,
    rows: int,
    samples: int,
    exchange_words: int,
    step_us: float,
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
        threads=THREADS,
        smem_bytes=smem_bytes,
        rows=rows,
        samples=samples,
        groups=1,
        step_cycles=-(-problem.batch // samples) * step_us * 1980,
        exchange_words=exchange_words,
    )
