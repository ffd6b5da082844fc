"""Tiles of the design for small layers, without a GPU: they fit, and compile without spills."""

import itertools
from dataclasses import replace

import pytest
from ds2_ops.jit.build import build
from ds2_ops.recurrent.cells import CELLS, GATED
from ds2_ops.recurrent.plan.choose import choose
from ds2_ops.recurrent.plan.devices import DEVICES
from ds2_ops.recurrent.plan.problem import NUMBERS, DoesNotFit, Problem
from ds2_ops.recurrent.plan.units import units_choices
from hypothesis import given
from hypothesis import strategies as st
from support.compiled import assert_no_spills
from support.persistent_cases import one_a_kernel

H200 = DEVICES["H200"]


@given(
    hidden=st.integers(1, 600),
    batch=st.integers(1, 1000),
    dtype=st.sampled_from(sorted(NUMBERS)),
    cell=st.sampled_from(sorted(CELLS)),
    backward=st.booleans(),
    sms=st.integers(1, H200.sms),
)
def test_every_launch_fits_the_device_and_covers_the_problem(
    hidden: int, batch: int, dtype: str, cell: str, backward: bool, sms: int
) -> None:
    choices = units_choices(Problem(batch, hidden, dtype, cell, backward), H200, sms)
    # Backwards all gates' weights in float32 leave a lane no registers for a second column, of more than 4 utterances.
    crowded = backward and dtype == "float32" and CELLS[cell].gates > 1 and batch > 4 * sms
    assert choices or hidden > (32 if crowded else 64)
    assert len({choice.name for choice in choices}) == len(choices)
    for choice in choices:
        launch = choice.launch
        assert launch.grid <= sms and launch.grid % launch.cluster == 0
        assert launch.cluster == 1 or launch.grid // launch.cluster <= H200.active_clusters[launch.cluster]
        assert choice.step_us > 0
        assert launch.smem_bytes <= H200.smem_bytes_per_block and launch.threads <= 1024
        assert choice.rows * launch.cluster >= hidden * (1 if backward else CELLS[cell].gates)
        assert launch.grid // launch.cluster * choice.samples * choice.work.tiles >= batch


@pytest.mark.parametrize(("cell", "hidden"), [("lstm", 128), ("gru_after", 128), ("gru_before", 96), ("relu", 256)])
def test_the_largest_on_one_multiprocessor_and_one_past_it(cell: str, hidden: int) -> None:
    def alone(hidden: int) -> bool:
        return all(units_choices(Problem(4, hidden, "bfloat16", cell, backward), H200, 1) for backward in (False, True))

    assert alone(hidden)
    assert not alone(hidden + 1)


def test_a_cell_with_two_phases_that_does_not_fit_names_the_way_out() -> None:
    with pytest.raises(
        DoesNotFit, match=r"hidden size 2113 in bfloat16 does not fit.* at most 2112.* reset_after=True"
    ):
        choose(Problem(4, 2113, "bfloat16", "gru_before", True), H200)


@pytest.mark.parametrize("gates", [2, 5])
def test_cells_of_other_numbers_of_gates_have_constants(gates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CELLS, "new", replace(CELLS["gru_after"], name="new", gates=gates))
    for hidden, batch, backward in itertools.product((33, 64, 128, 200, 512), (1, 4, 33), (False, True)):
        for device in DEVICES.values():
            assert choose(Problem(batch, hidden, "bfloat16", "new", backward), device).step_us > 0


def test_a_cell_that_saves_other_numbers_does_not_compile() -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    alone = units_choices(Problem(1, 64, "bfloat16", "gru_after", False), H200, H200.sms)[0].launch.source.text
    shape = "using Shape"
    cell = "struct Cell : ds2::GruAfter { static constexpr int SAVED = 3; };\n"
    source = alone.replace("ds2::GruAfter", "Cell").replace(shape, cell + shape, 1)
    with pytest.raises(RuntimeError, match="saves is four numbers and the state before the step"):
        build(source)


@pytest.mark.parametrize(
    ("cell", "hidden", "backward"), [("lstm", 128, False), ("lstm", 192, True), ("gru_before", 256, True)]
)
def test_largest_tiles_compile_without_spills(cell: str, hidden: int, backward: bool) -> None:
    assert_no_spills(units_choices(Problem(4, hidden, "bfloat16", cell, backward), H200, H200.sms)[:1])


# Cells of one gate differ in 2 or 4 registers, and float16 has bfloat16's words: every tile with all gates and with
# the one of those cells that needs most, the others on two sizes.
EVERY_TILE = {(cell, dtype) for cell in ("clipped_relu", *GATED) for dtype in NUMBERS if dtype != "float16"}


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("cell", CELLS)
def test_every_tile_compiles_without_spills(cell: str, dtype: str, backward: bool) -> None:
    hiddens = (*range(32, 641, 32), 77) if (cell, dtype) in EVERY_TILE else (77, 640)
    batches = (64,) if backward or cell not in GATED else (64, 1)  # one utterance: four lanes share a unit
    problems = [Problem(batch, hidden, dtype, cell, backward) for hidden in hiddens for batch in batches]
    assert_no_spills(one_a_kernel([choice for one in problems for choice in units_choices(one, H200, H200.sms)]))
