"""Both directions in one launch: the kernels' own source on a CPU, with slow warps and late messages."""

import pytest
import torch
from ds2_ops import recurrence
from ds2_ops.recurrent.backends import persistent
from ds2_ops.recurrent.cells import CELLS, GATED, Options
from ds2_ops.recurrent.plan.cluster import cluster_choices
from ds2_ops.recurrent.plan.problem import Choice, Problem
from support.chip import Chip, Fault, Faults, assert_seen, slow, small_chip
from support.op_cases import CPU, draw, nan_filled_memory, outputs_and_gradients, ragged_lengths, relative_error
from torch import Tensor

CLIP = 1.0
Tile = tuple[int, int, int]  # blocks of a cluster, clusters of the chip, groups


def the_choice(tile: Tile, cell: str, batch: int, hidden: int, backward: bool) -> Choice:
    cluster, clusters, groups = tile
    facts = small_chip({cluster: clusters})
    choices = cluster_choices(Problem(batch, hidden, "bfloat16", cell, backward, 2), facts, facts.sms)
    return next(choice for choice in choices if choice.groups == groups)


def wrong_results(
    chip: Chip, cell: str, tile: Tile, shape: tuple[int, int, int], faults: tuple[Faults, Faults]
) -> list[str]:
    """Which results have an error that is not at most twice that of plain autograd in bfloat16."""
    frames, batch, hidden = shape
    row, options = CELLS[cell], Options(cell, CLIP)
    x = draw(1, frames, batch, 2, row.gates * hidden, device=CPU, dtype=torch.bfloat16)
    weight = draw(2, 2, row.gates * hidden, hidden, device=CPU, dtype=torch.bfloat16, scale=0.9 * hidden**-0.5)
    bias = draw(3, 2, hidden, device=CPU, dtype=torch.bfloat16) if cell == "gru_after" else None
    grad_y = draw(4, frames, batch, 2, hidden, device=CPU, dtype=torch.bfloat16)
    h0, grad_h_n = (draw(seed, batch, 2, hidden, device=CPU, dtype=torch.bfloat16) for seed in (5, 6))
    c0, grad_c_n = (
        draw(seed, batch, 2, hidden, device=CPU, dtype=torch.float32) if row.carries_c else None for seed in (7, 8)
    )
    lengths = ragged_lengths(frames, batch).to(torch.int32)
    with nan_filled_memory():
        chip(the_choice(tile, cell, batch, hidden, False), 1, faults[0])
        y, h_n, c_n, saved = persistent.forward((x, weight, bias, h0, c0, lengths), options, True)
        chip(the_choice(tile, cell, batch, hidden, True), 2, faults[1])
        above = (grad_y, grad_h_n, grad_c_n)
        grad_x, _, grad_h0, grad_c0 = persistent.backward_data((*above, y, saved, weight, lengths), options)
    ours = {"y": y, "h_n": h_n, "c_n": c_n, "grad_x": grad_x, "grad_h0": grad_h0, "grad_c0": grad_c0}
    ours = {name: tensor for name, tensor in ours.items() if tensor is not None}

    def plain(dtype: torch.dtype) -> list[Tensor]:
        wide = torch.promote_types(dtype, torch.float32)

        def op(x: Tensor, h0: Tensor, c0: Tensor | None) -> tuple[Tensor, ...]:
            tensors = (x, weight.to(dtype), h0.transpose(0, 1), lengths)
            b, c = None if bias is None else bias.to(dtype), None if c0 is None else c0.transpose(0, 1)
            y, *last = recurrence(*tensors, cell=cell, bias_hn=b, c0=c, clip=CLIP, backend="reference")
            return y, *(state.transpose(0, 1) for state in last)

        inputs = [x.to(dtype), h0.to(dtype), None if c0 is None else c0.to(wide)]
        cotangents = [grad_y.to(dtype), grad_h_n.to(dtype), *([] if grad_c_n is None else [grad_c_n.to(wide)])]
        return outputs_and_gradients(op, inputs, cotangents)

    results = zip(ours, ours.values(), plain(torch.bfloat16), plain(torch.float64), strict=True)
    return [n for n, our, stock, true in results if not relative_error(our, true) <= 2 * relative_error(stock, true)]


# One cluster a direction, or several; odd rows, two groups of which one may be empty, units that push.
CASES = [
    pytest.param("lstm", (8, 1, 1), (3, 2, 40), id="lstm"),
    pytest.param("gru_after", (8, 2, 2), (4, 3, 33), id="gru, odd rows, two groups"),
    pytest.param("tanh", (8, 2, 1), (5, 3, 60), id="a cell without gates"),
    slow("lstm", (8, 1, 2), (3, 1, 250), id="pushing, an empty group"),
    slow("lstm", (16, 1, 2), (4, 1, 250), id="an empty group"),
    slow("gru_after", (8, 2, 1), (4, 9, 250), id="gru, two tiles a direction"),
]


@pytest.mark.parametrize(("cell", "tile", "shape"), CASES)
def test_slow_warps_and_late_messages_change_nothing(
    cell: str, tile: Tile, shape: tuple[int, int, int], chip: Chip
) -> None:
    assert not wrong_results(chip, cell, tile, shape, ((), ()))


SHAPE, CLUSTER = "cluster_shape.cuh", "cluster.cuh"
SMALL = ((8, 1, 2), (4, 3, 40))
FAULTS = [
    pytest.param((SHAPE, "? frames - 1 - t", "? pass.frames - 1 - t"), SMALL, id="padding is heard first"),
    slow((SHAPE, "* Shape::DIRECTIONS + direction;", "* Shape::DIRECTIONS;"), SMALL, id="the first's rows"),
    slow((CLUSTER, "Tile<Shape>(pass).first_element()", "0"), SMALL, id="the first's weights"),
    slow((SHAPE, "(pass.batch + full - 1) / full * full", "pass.batch"), SMALL, id="tiles of both overlap"),
]


@pytest.mark.parametrize(("fault", "where"), FAULTS)
def test_planted_faults_are_found(fault: Fault, where: tuple[Tile, tuple[int, int, int]], chip: Chip) -> None:
    header, right, wrong = fault
    planted = ((f"recurrent/{header}", right, wrong),)
    assert_seen(lambda: wrong_results(chip, "lstm", *where, (planted, planted)))


def test_a_cell_of_every_kind_is_run_here() -> None:
    run = {case.values[0] for case in CASES}
    assert {name for name, cell in GATED.items() if cell.phases == 1} < run
