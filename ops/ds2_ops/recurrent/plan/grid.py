"""What the two whole-chip designs share, for hidden sizes that one cluster cannot hold."""

from ds2_ops.recurrent.plan.problem import NUMBERS, Launch, Problem

SLOTS = 16  # of the exchange
INPUTS_AHEAD = 8  # turns

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


def state_words(problem: Problem) -> int:
    """Words of one utterance's state, in whole units of 16 bytes."""
    return -(-problem.hidden // (4 * NUMBERS[problem.dtype][1])) * 4


def turns(batch: int, most_samples: int, most_groups: int) -> tuple[int, int, int]:
    """Utterances of a group, groups of a tile, tiles: as few groups as can be, all of one size but the last."""
    all_groups = -(-batch // most_samples)
    tiles = -(-all_groups // most_groups)
    return -(-batch // all_groups), -(-all_groups // tiles), tiles


def grid_launch(
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
    """A launch whose blocks all run at once, around its kernel's `function<shape>` in `header`."""
    source = (
        f'#include "recurrent/{header}"\n'
        f"using Shape = ds2::{shape}, {'true' if problem.backward else 'false'}>;\n"
        f'static_assert(Shape::SMEM_BYTES == {smem_bytes}, "the planner and {header} disagree on shared memory");'
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
