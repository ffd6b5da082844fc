"""The planner without a GPU: what fits, what does not and why, and that what it plans compiles without spills."""

from dataclasses import replace

import pytest
from ds2_ops.jit.build import build
from ds2_ops.recurrent.cells import CELLS
from ds2_ops.recurrent.plan.choose import choose
from ds2_ops.recurrent.plan.cluster import cluster_launches, cluster_rows, largest_cluster_hidden
from ds2_ops.recurrent.plan.problem import (
    FINISHERS,
    MMA_SAMPLES,
    NUMBERS,
    THREADS,
    DeviceFacts,
    DoesNotFit,
    Launch,
    Problem,
)
from hypothesis import given
from hypothesis import strategies as st

H200 = DeviceFacts()


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
    launches = cluster_launches(problem(hidden, batch, dtype, backward), H200, allowed)
    assert launches
    for launch in launches:
        assert launch.grid <= allowed
        assert launch.grid % launch.cluster == 0
        assert launch.grid // launch.cluster <= H200.active_clusters[launch.cluster]
        assert launch.smem_bytes <= H200.smem_bytes_per_block
        assert launch.rows * launch.cluster >= hidden
        assert 1 <= launch.samples <= MMA_SAMPLES
        assert launch.threads == THREADS + FINISHERS * launch.groups * launch.parts <= 512
        tiles = -(-batch // (launch.samples * launch.groups))
        assert launch.grid // launch.cluster <= tiles


@pytest.mark.parametrize(("dtype", "largest"), [("bfloat16", 1152), ("float16", 1152), ("float32", 768)])
def test_largest_that_fits_and_one_past_it(dtype: str, largest: int) -> None:
    assert largest_cluster_hidden(dtype) == largest
    assert cluster_rows(largest, dtype, 16) is not None
    assert cluster_rows(largest + 1, dtype, 16) is None


def test_small_batches_spread_over_clusters_before_they_fill_a_tile() -> None:
    for batch in range(1, 8):
        launch = choose(problem(1152, batch), H200)
        assert (launch.samples, launch.groups, launch.grid) == (1, 1, 16 * batch)


@pytest.mark.parametrize(
    ("hidden", "batch", "tile"),
    [
        (1152, 4, (16, 1, 1)),
        (1152, 16, (16, 1, 2)),
        (1152, 32, (16, 1, 2)),
        (1152, 48, (16, 2, 1)),
        (1152, 64, (16, 2, 1)),
        (1024, 32, (16, 1, 2)),
        (768, 16, (16, 1, 1)),
        (768, 64, (8, 1, 2)),
        (512, 4, (16, 1, 1)),
        (512, 32, (8, 1, 1)),
        (512, 64, (8, 1, 2)),
    ],
)
def test_the_tile_that_was_measured_fastest_is_chosen(hidden: int, batch: int, tile: tuple[int, int, int]) -> None:
    launch = choose(problem(hidden, batch), H200)
    assert (launch.cluster, launch.groups, launch.parts) == tile


def test_a_new_batch_size_of_the_same_class_needs_no_new_kernel() -> None:
    sources = {choose(problem(1152, batch), H200).source for batch in range(1, 200)}
    assert len(sources) <= 3


@pytest.mark.parametrize(
    ("wrong", "device", "max_sms", "message"),
    [
        (problem(512), H200, 1, r"cluster of 8 or 16 .* 1 of 132 may be used on NVIDIA H200: raise max_sms"),
        (problem(512), replace(H200, name="A100", capability=(8, 0)), None, r"A100 has compute capability 8\.0.*gemm"),
        (
            problem(512, dtype="float64"),
            H200,
            None,
            "dtype float64 is not one of bfloat16, float16, float32.*reference",
        ),
        (replace(problem(512), nonlinearity="gelu"), H200, None, "'gelu' is not one of relu, clipped_relu, tanh"),
        (problem(512), replace(H200, active_clusters={}), 8, "needs a cluster of 8 or 16"),
    ],
)
def test_refusals_say_what_was_given_and_the_way_out(
    wrong: Problem, device: DeviceFacts, max_sms: int | None, message: str
) -> None:
    with pytest.raises(DoesNotFit, match=message):
        choose(wrong, device, max_sms)


def test_explain_names_the_design_and_the_tile() -> None:
    text = choose(problem(1152, 32), H200).explain()
    assert "cluster design" in text
    assert "72 rows a block in 2 parts" in text


def assert_no_spills(launch: Launch) -> None:
    binary = build(launch.source)
    assert binary.local_bytes == 0, launch.explain()


@pytest.mark.parametrize("dtype", NUMBERS)
def test_largest_tile_compiles_without_spills(dtype: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    launches = cluster_launches(problem(largest_cluster_hidden(dtype), 64, dtype, backward=True), H200, H200.sms)
    assert_no_spills(launches[-1])


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", NUMBERS)
def test_every_tile_and_cell_compiles_without_spills(dtype: str, backward: bool) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    largest = largest_cluster_hidden(dtype)
    hiddens = [*range(64, largest + 1, 64), largest - 1]  # each tile, and rows that start between words
    problems = [Problem(64, hidden, dtype, "tanh", backward) for hidden in hiddens]
    problems += [Problem(64, largest, dtype, cell, backward) for cell in CELLS]
    launches = {launch.source: launch for one in problems for launch in cluster_launches(one, H200, H200.sms)}
    assert len(launches) >= len(hiddens)
    for launch in launches.values():
        assert_no_spills(launch)
