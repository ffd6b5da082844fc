"""The kernels' entry, the same for every design: struct Pass of csrc/recurrent/pass.cuh, spread out."""

from collections.abc import Sequence

from ds2_ops.jit.build import LAUNCH_REGISTERS
from ds2_ops.jit.source import Source, names, parameters, translation_unit
from ds2_ops.recurrent.cells import CELLS, Cell
from ds2_ops.recurrent.plan.problem import ELEMENT_BYTES, Choice, Problem

REGISTER_FILE = 65536  # of a multiprocessor, in 32 bits

_PASS = parameters(
    """const void* input, const void* output_y, const void* matrix, const void* state, const int* lengths,
    void* result, void* last_state, int frames, int batch, int hidden, int samples, int whole_words, int wide_rows,
    float clip"""
)
_ARRAYS = 7  # of these, first
_GATES = parameters("void* saved, const void* bias, const float* carry, float* last_carry, void* result_last")
_EXCHANGE = parameters("unsigned* exchange, int exchange_words")  # of the whole-chip designs


def kernel(
    header: str,
    function: str,
    shape: str,
    cell: Cell,
    smem_bytes: int,
    *,
    threads: int,
    slots: int,
    hands_registers: bool = True,
) -> Source:
    """Write the kernel that is `function<shape>` of a header of csrc/recurrent, and hold it to what was planned.

    If its warps hand each other registers, they are counted from what a block of so many threads has when it starts:
    were it compiled to fewer, some would wait for ever for theirs. `build` holds the compiler to that.
    """
    counted = f"constexpr int {LAUNCH_REGISTERS} = {REGISTER_FILE // threads // 8 * 8};\n" if hands_registers else ""
    disagree = f'static_assert(Shape::SLOTS == {slots}, "the planner and {header} disagree on the exchange");\n'
    members = _PASS if cell.gates == 1 else (*_PASS, *_GATES)
    arguments = f"{{{names(members)}}}"
    return translation_unit(
        f"recurrent/{header}",
        (*members, *_EXCHANGE) if slots else members,
        f"    ds2::{function}<Shape>({arguments}{', exchange, exchange_words' if slots else ''});\n",
        ahead=f"using Shape = ds2::{shape};\n"
        f'static_assert(Shape::SMEM_BYTES == {smem_bytes}, "the planner and {header} disagree on shared memory");\n'
        f'static_assert(Shape::ALL_THREADS == {threads}, "the planner and {header} disagree on threads");\n'
        f"{counted}{disagree if slots else ''}"
        f'static_assert(Shape::Cell::GATES == {cell.gates}, "cells.py and cells.cuh disagree on {cell.name}");\n',
        launch_bounds="Shape::ALL_THREADS, 1",
    )


def pass_arguments(
    choice: Choice, problem: Problem, frames: int, addresses: Sequence[int], clip: float, exchange: int
) -> list[float]:
    """Write the arguments of a launch, by the names of struct Pass of csrc/recurrent/pass.cuh.

    Args:
        choice: the kernel.
        problem: what it runs.
        frames: T.
        addresses: of the arrays from input to last_state, then of those of cells with gates, 0 for none; multiples of
            4.
        clip: of clipped_relu.
        exchange: address of ``choice.exchange_words`` words, whatever they hold, where the kernel takes them.
    """
    row_bytes = problem.hidden * ELEMENT_BYTES[problem.dtype]
    wide_rows = (row_bytes | common(addresses)) % 16 == 0
    sizes = (frames, problem.batch, problem.hidden, choice.samples)
    arguments = [*addresses[:_ARRAYS], *sizes, row_bytes % 4 == 0, wide_rows, clip, *addresses[_ARRAYS:]]
    return [*arguments, exchange, choice.exchange_words] if choice.exchange_words else arguments


def common(addresses: Sequence[int]) -> int:
    """A number that is a multiple of a power of two where all arrays of rows, so not the lengths, start at such."""
    given, output_y, matrix, state, _, result, last_state, *of_gates = addresses
    bits = given | output_y | matrix | state | result | last_state
    for address in of_gates:
        bits |= address
    return bits


def array_bytes(problem: Problem, frames: int) -> list[int]:
    """Sizes of the arrays whose addresses `pass_arguments` takes, 0 for those that a pass can do without."""
    cell, size = CELLS[problem.nonlinearity], ELEMENT_BYTES[problem.dtype]
    state = problem.directions * problem.batch * problem.hidden * size
    rows, matrix = frames * state, problem.directions * problem.hidden**2 * size * cell.gates
    of_gates = rows * cell.gates
    output_y = rows if problem.backward and cell.gates == 1 else 0
    ends = (rows, of_gates) if problem.backward else (of_gates, rows)
    sizes = [ends[0], output_y, matrix, 0, 0, ends[1], state]
    if cell.gates == 1:
        return sizes
    carry = problem.directions * problem.batch * problem.hidden * 4 if cell.carries_c else 0
    result_last = rows if problem.backward and cell.last_apart else 0
    return [*sizes, rows * cell.saved, 0, carry, carry, result_last]
