"""The planner's choice without a GPU: the fastest of the tiles that fit, or the reason why none does."""

from dataclasses import replace

import pytest
from ds2_ops.recurrent.plan.choose import choose
from ds2_ops.recurrent.plan.devices import DEVICES
from ds2_ops.recurrent.plan.problem import DeviceFacts, DoesNotFit, Problem

H200 = DEVICES["H200"]


def problem(hidden: int, batch: int = 4, dtype: str = "bfloat16", backward: bool = False) -> Problem:
    return Problem(batch, hidden, dtype, "clipped_relu", backward)


def test_small_batches_spread_over_clusters_before_they_fill_a_tile() -> None:
    for batch in range(1, 8):
        choice = choose(problem(1152, batch), H200)
        assert (choice.samples, choice.groups, choice.launch.grid) == (1, 1, 16 * batch)


@pytest.mark.parametrize(
    ("hidden", "batch", "tile"),
    [
        (1152, 4, (16, 1, 1)),
        (1152, 16, (16, 1, 2)),
        (1152, 32, (16, 1, 2)),
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
    choice = choose(problem(hidden, batch), H200)
    assert (choice.launch.cluster, choice.groups, choice.parts) == tile


@pytest.mark.parametrize(
    ("cell", "backward", "batch", "layout"),
    [
        ("lstm", False, 16, "narrow2"),
        ("lstm", True, 16, "narrow8"),
        ("lstm", False, 64, "streams2"),
        ("lstm", True, 64, "wider16"),
        ("gru_after", False, 32, "wide3"),
        ("gru_after", True, 32, "wide9"),
    ],
)
def test_with_gates_too(cell: str, backward: bool, batch: int, layout: str) -> None:
    assert choose(Problem(batch, 1024, "bfloat16", cell, backward), H200).work.layout == layout


def test_a_new_batch_size_of_the_same_class_needs_no_new_kernel() -> None:
    sources = {choose(problem(1152, batch), H200).launch.source for batch in range(1, 200)}
    assert len(sources) <= 4  # one part, two parts cut in two ways, two groups


@pytest.mark.parametrize(
    ("wrong", "device", "max_sms", "message"),
    [
        (problem(512), H200, 1, r"cluster of 8 or 16 .* 1 of 132 may be used on H200: raise max_sms"),
        (
            problem(512),
            replace(H200, name="T4", capability=(7, 5)),
            None,
            r"T4 has compute capability 7\.5.*8\.0.*gemm",
        ),
        (
            problem(512, dtype="float64"),
            H200,
            None,
            "dtype float64 is not one of bfloat16, float16, float32.*reference",
        ),
        (
            problem(512)._replace(nonlinearity="gelu"),
            H200,
            None,
            "'gelu' is not one of relu, clipped_relu, tanh, lstm",
        ),
        (problem(512), replace(H200, active_clusters={8: 1}), 4, "needs a cluster of 8 or 16"),
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
