"""Tiles of the cluster design, without a GPU: they fit, and compile without spills."""

import pytest
from ds2_ops.jit import build as builder
from ds2_ops.jit.build import check_registers
from ds2_ops.recurrent.cells import GATED, PLAIN
from ds2_ops.recurrent.plan.choose import space
from ds2_ops.recurrent.plan.cluster import cluster_choices, cluster_units, largest_cluster_hidden
from ds2_ops.recurrent.plan.devices import DEVICES
from ds2_ops.recurrent.plan.problem import (
    FINISHERS,
    MMA_SAMPLES,
    NUMBERS,
    THREADS,
    DoesNotFit,
    Problem,
)
from hypothesis import given
from hypothesis import strategies as st
from support.compiled import assert_no_spills

H200 = DEVICES["H200"]


def problem(hidden: int, batch: int = 4, dtype: str = "bfloat16", backward: bool = False) -> Problem:
    return Problem(batch, hidden, dtype, "clipped_relu", backward)


@given(
    hidden=st.integers(1, 1152),
    batch=st.integers(1, 1000),
    dtype=st.sampled_from(["bfloat16", "float16"]),
    backward=st.booleans(),
    max_sms=st.one_of(st.none(), st.integers(16, 200)),
)
def test_every_launch_fits_the_device_and_covers_the_problem(
    hidden: int, batch: int, dtype: str, backward: bool, max_sms: int | None
) -> None:
    allowed = min(max_sms or H200.sms, H200.sms)
    choices = cluster_choices(problem(hidden, batch, dtype, backward), H200, allowed)
    assert choices
    for choice in choices:
        assert choice.launch.grid <= allowed
        assert choice.launch.grid % choice.launch.cluster == 0
        assert choice.launch.grid // choice.launch.cluster <= H200.active_clusters[choice.launch.cluster]
        assert choice.launch.smem_bytes <= H200.smem_bytes_per_block
        assert choice.rows * choice.launch.cluster >= hidden
        assert 1 <= choice.samples <= MMA_SAMPLES
        assert choice.launch.threads == THREADS + FINISHERS * choice.groups * choice.parts <= 512
        tiles = -(-batch // (choice.samples * choice.groups))
        assert choice.launch.grid // choice.launch.cluster <= tiles


@pytest.mark.parametrize(("dtype", "largest"), [("bfloat16", 1152), ("float16", 1152), ("float32", 768)])
def test_largest_that_fits_and_one_past_it(dtype: str, largest: int) -> None:
    assert largest_cluster_hidden(dtype) == largest
    assert cluster_units(largest, dtype, 16) is not None
    assert cluster_units(largest + 1, dtype, 16) is None


@pytest.mark.parametrize("hidden", [512, 1152, 1760, 2560])  # of every design
def test_a_kernel_compiled_to_other_registers_than_its_warps_share_is_refused(
    hidden: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "compiler_version", lambda: "nvrtc 0.0")
    handing = [choice for choice in space(problem(hidden, 64), H200) if choice.design != "units"]
    assert handing
    for choice in handing:
        launched = 65536 // choice.launch.threads // 8 * 8
        check_registers(choice.launch.source.text, launched)
        with pytest.raises(RuntimeError, match=f"to {launched - 8} registers a thread, its source needs {launched}"):
            check_registers(choice.launch.source.text, launched - 8)


def test_kernels_that_share_no_registers_may_have_any() -> None:
    check_registers('extern "C" __global__ void ds2_kernel() {}', 7)


@pytest.mark.parametrize("dtype", NUMBERS)
def test_largest_tile_compiles_without_spills(dtype: str) -> None:
    choices = cluster_choices(problem(largest_cluster_hidden(dtype), 64, dtype, backward=True), H200, H200.sms)
    assert_no_spills(choices[-1:])


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", NUMBERS)
def test_every_tile_and_cell_compiles_without_spills(dtype: str, backward: bool) -> None:
    largest = largest_cluster_hidden(dtype)
    step = 256 if dtype == "float16" else 64  # which has bfloat16's words and instructions
    hiddens = [*range(step, largest + 1, step), largest - 1]  # each tile, and rows that start between words
    problems = [Problem(64, hidden, dtype, "tanh", backward) for hidden in hiddens]
    problems += [Problem(64, largest, dtype, cell, backward) for cell in PLAIN]
    choices = {choice.launch.source: choice for one in problems for choice in cluster_choices(one, H200, H200.sms)}
    assert len(choices) >= len(hiddens)
    assert_no_spills(choices.values())


@pytest.mark.parametrize("cell", [name for name, cell in GATED.items() if cell.phases == 1])
def test_largest_tile_with_gates_compiles_without_spills(cell: str) -> None:
    largest = largest_cluster_hidden("bfloat16", GATED[cell].gates)
    assert largest == 512
    for backward in (False, True):
        choices = cluster_choices(Problem(64, largest, "bfloat16", cell, backward), H200, H200.sms)
        two_groups = next(choice for choice in choices if choice.groups == 2)
        assert_no_spills([choices[0], two_groups])


@pytest.mark.parametrize("cell", ["clipped_relu", *(name for name, cell in GATED.items() if cell.phases == 1)])
def test_tiles_of_both_directions_compile_without_spills(cell: str) -> None:
    for backward in (False, True):
        problem = Problem(130, 512, "bfloat16", cell, backward, 2)
        assert_no_spills(cluster_choices(problem, H200, H200.sms)[::3])


@given(batch=st.integers(1, 400), hidden=st.integers(1, 512), max_sms=st.one_of(st.none(), st.integers(16, 132)))
def test_both_directions_have_a_cluster_a_tile(batch: int, hidden: int, max_sms: int | None) -> None:
    allowed = max_sms or H200.sms
    for choice in cluster_choices(Problem(batch, hidden, "bfloat16", "lstm", False, 2), H200, allowed):
        tiles = 2 * -(-batch // (choice.samples * choice.groups))
        assert choice.launch.grid == choice.launch.cluster * tiles
        at_once = min(H200.active_clusters[choice.launch.cluster], allowed // choice.launch.cluster)
        assert choice.work.tiles == -(-tiles // at_once)
        # What may not take the whole chip has no clusters in waiting, which would take what is not theirs.
        assert choice.launch.grid <= allowed or at_once == H200.active_clusters[choice.launch.cluster]


def test_both_directions_where_none_fit_say_so() -> None:
    message = r"both directions of hidden size 700 in bfloat16 .* one direction after the other"
    with pytest.raises(DoesNotFit, match=message):
        space(Problem(4, 700, "bfloat16", "lstm", False, 2), H200)
