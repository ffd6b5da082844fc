"""Tiles of the whole-chip designs, without a GPU: they fit, hold what they promise, and compile without spills."""

import pytest
from ds2_ops.recurrent.cells import CELLS, GATED, PLAIN
from ds2_ops.recurrent.plan.choose import choose, largest_grid_hidden
from ds2_ops.recurrent.plan.problem import DoesNotFit, Problem
from hypothesis import given
from hypothesis import strategies as st
from support.compiled import assert_no_spills
from support.persistent_cases import H200, LARGEST_GRID_HIDDEN, grid_choices_of, one_a_kernel


@given(
    hidden=st.integers(1, 4300),
    batch=st.integers(1, 300),
    dtype=st.sampled_from(list(LARGEST_GRID_HIDDEN)),
    sms=st.integers(1, 132),
    cell=st.sampled_from(["relu", *GATED]),
    backward=st.booleans(),
)
def test_every_launch_fits_the_device_and_covers_the_problem(
    hidden: int, batch: int, dtype: str, sms: int, cell: str, backward: bool
) -> None:
    gates = CELLS[cell].gates
    for choice in grid_choices_of(hidden, batch, dtype, sms, cell=cell, backward=backward):
        assert choice.launch.grid <= sms
        assert choice.launch.grid % choice.launch.cluster == 0
        clusters = H200.active_clusters | {1: H200.sms}
        assert choice.launch.grid // choice.launch.cluster <= clusters[choice.launch.cluster]
        assert choice.launch.smem_bytes <= H200.smem_bytes_per_block
        assert choice.rows * choice.launch.grid >= hidden * (1 if backward else gates)
        state = hidden * choice.samples * choice.groups * (gates if backward else 1)
        assert choice.exchange_words * (2 if dtype != "float32" else 1) >= 16 * state
        tiles = -(-batch // (choice.samples * choice.groups))
        assert (tiles - 1) * choice.samples * choice.groups < batch


@pytest.mark.parametrize(("dtype", "largest"), LARGEST_GRID_HIDDEN.items())
def test_largest_that_fits_and_one_past_it(dtype: str, largest: int) -> None:
    assert largest_grid_hidden(Problem(4, largest, dtype, "relu", False), H200, H200.sms) == largest
    assert choose(Problem(4, largest, dtype, "relu", False), H200).launch.cooperative
    with pytest.raises(DoesNotFit, match=rf"hidden size {largest + 1} .* {largest} x {largest}; .*backend='gemm'"):
        choose(Problem(4, largest + 1, dtype, "relu", True), H200)


def test_fewer_multiprocessors_hold_less() -> None:
    assert choose(Problem(4, 1760, "bfloat16", "relu", False), H200, 100).launch.grid <= 100
    with pytest.raises(DoesNotFit, match=r"the 20 multiprocessors that may be used on H200 \(132 in all\)"):
        choose(Problem(4, 1760, "bfloat16", "relu", False), H200, 20)


def test_large_batches_take_turns_in_groups() -> None:
    sizes = {}
    for batch in (4, 9, 64, 70):
        choice = next(choice for choice in grid_choices_of(2560, batch) if choice.launch.cluster == 4)
        sizes[batch] = (choice.groups, choice.samples)
    assert sizes == {4: (1, 4), 9: (2, 5), 64: (8, 8), 70: (5, 8)}


def test_a_new_batch_size_needs_no_new_kernel() -> None:
    sources = {choose(Problem(batch, 1760, "bfloat16", "relu", False), H200).launch.source for batch in range(1, 200)}
    assert len(sources) == 2


@pytest.mark.parametrize("dtype", LARGEST_GRID_HIDDEN)
def test_largest_tile_compiles_without_spills(dtype: str) -> None:
    assert_no_spills(one_a_kernel(grid_choices_of(LARGEST_GRID_HIDDEN[dtype], 8, dtype, backward=True)))


# The multiplying warps' weights fill their registers: every length of K on clusters of 5, then one on 6 and on 8.
@pytest.mark.parametrize("hidden", [2200, 2300, 2400, 2480, 2560, 2048, 1760])
def test_weights_of_the_wide_kernel_leave_registers_to_the_rest(hidden: int) -> None:
    assert_no_spills(grid_choices_of(hidden, 64, backward=backward)[-1] for backward in (False, True))


# A cell of one gate is code of the finishing warps alone: every tile with the longest of them, the others on one size.
# And float16 has bfloat16's words and instructions: two sizes.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("hidden", "dtype", "cell"),
    [
        *((hidden, dtype, "tanh") for hidden in (1160, 1760, 2048, 2560, 2816) for dtype in ("bfloat16", "float32")),
        *((hidden, "float16", "tanh") for hidden in (1160, 2816)),
        *((2816, "bfloat16", cell) for cell in PLAIN if cell != "tanh"),
        *((1024, "bfloat16", cell) for cell in GATED),
        *((1053, "float16", cell) for cell in ("lstm", "gru_after")),
        (1025, "float32", "gru_after"),
    ],
)
def test_tiles_compile_without_spills(hidden: int, dtype: str, cell: str) -> None:
    for backward in (False, True):
        assert_no_spills(one_a_kernel(grid_choices_of(hidden, 64, dtype, cell=cell, backward=backward)))
