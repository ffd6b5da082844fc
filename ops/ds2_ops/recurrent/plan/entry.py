"""The kernels' entry, the same for every design: struct Pass of csrc/recurrent/pass.cuh, spread out."""

from ds2_ops.jit.source import Source, names, parameters, translation_unit
from ds2_ops.recurrent.cells import Cell, GatedCell

_PASS = parameters(
    """const void* input, const void* output_y, const void* matrix, const void* state, const int* lengths,
    void* result, void* last_state, int frames, int batch, int hidden, int samples, int whole_words, int wide_rows,
    float clip"""
)
_GATES = parameters("void* saved, const void* bias, const float* carry, float* last_carry, void* result_last")
_EXCHANGE = parameters("unsigned* exchange")  # of the whole-chip designs, whose words are all EMPTY


def kernel(
    header: str, function: str, shape: str, cell: Cell | GatedCell, smem_bytes: int, *, exchange: bool
) -> Source:
    """Write the kernel that is `function<shape>` of a header of csrc/recurrent, and hold it to what was planned."""
    members = _PASS if cell.gates == 1 else (*_PASS, *_GATES)
    arguments = f"{{{names(members)}}}"
    return translation_unit(
        f"recurrent/{header}",
        (*members, *_EXCHANGE) if exchange else members,
        f"    ds2::{function}<Shape>({arguments}{', exchange' if exchange else ''});\n",
        ahead=f"using Shape = ds2::{shape};\n"
        f'static_assert(Shape::SMEM_BYTES == {smem_bytes}, "the planner and {header} disagree on shared memory");\n'
        f'static_assert(Shape::Cell::GATES == {cell.gates}, "cells.py and cells.cuh disagree on {cell.name}");\n',
        launch_bounds="Shape::ALL_THREADS, 1",
    )
