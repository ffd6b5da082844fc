"""The cluster kernel's own source with gates on a CPU, with slow warps and late messages, against float64."""

from collections.abc import Callable

import pytest
import torch
from ds2_ops.recurrent.cells import GATED
from ds2_ops.recurrent.gated import gemm, persistent
from ds2_ops.recurrent.plan.cluster import cluster_choices
from ds2_ops.recurrent.plan.problem import Choice, Problem
from support.chip import Faults, patch, small_chip
from support.gated_cases import in_float64, problem
from support.op_cases import CPU, nan_filled_memory, ragged_lengths, relative_error
from torch import Tensor


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """See `support.chip.patch`."""
    return patch(monkeypatch)


def the_choice(cluster: int, groups: int, cell: str, batch: int, hidden: int, backward: bool) -> Choice:
    facts = small_chip({cluster: 1})
    choices = cluster_choices(Problem(batch, hidden, "bfloat16", cell, backward), facts, facts.sms)
    return next(choice for choice in choices if choice.groups == groups)


def wrong_results(
    chip: Callable[..., None],
    cell: str,
    tile: tuple[int, int],
    shape: tuple[int, int, int],
    faults: tuple[Faults, Faults] = ((), ()),
) -> list[int]:
    """Results of the kernels whose relative error is not at most twice that of stock products in the same types."""
    frames, batch, hidden = shape
    (x, weight_hh, bias, h0, c0), (grad_y, grad_h_n, *grad_c_n) = problem(cell, shape, CPU, torch.bfloat16)
    lengths = ragged_lengths(frames, batch).to(torch.int32)
    given = (x, weight_hh, bias, h0, c0)
    grads = (grad_y, grad_h_n, grad_c_n[0] if grad_c_n else None)
    results: list[list[Tensor]] = [[], [], []]
    true = in_float64(given), in_float64(grads)
    for index, (run, tensors, above) in enumerate(((persistent, given, grads), (gemm, given, grads), (gemm, *true))):
        with nan_filled_memory():
            chip(the_choice(*tile, cell, batch, hidden, False), 1, faults[0])
            *outputs, saved = run.forward(cell, *tensors, lengths, True)  # type: ignore[attr-defined]
            chip(the_choice(*tile, cell, batch, hidden, True), 2, faults[1])
            weight = tensors[1]
            results[index] = [*outputs, *run.backward_data(cell, *above, saved, weight, lengths)]  # type: ignore[attr-defined]
    triples = enumerate(zip(*results, strict=True))
    return [i for i, (our, stock, true) in triples if not relative_error(our, true) <= 2 * relative_error(stock, true)]


# Tiles of both clusters, of one group and two; odd rows, units that do not exist, two tiles of utterances.
CASES = [
    pytest.param("lstm", (8, 1), (3, 2, 40), id="lstm"),
    pytest.param("gru_after", (8, 2), (4, 21, 33), id="gru, odd rows, two groups, two tiles"),
    pytest.param("lstm", (16, 2), (3, 11, 250), id="lstm, cluster of 16", marks=pytest.mark.slow),
    pytest.param("gru_after", (16, 1), (5, 3, 512), id="gru, cluster of 16", marks=pytest.mark.slow),
    pytest.param("lstm", (16, 1), (2, 3, 512), id="the largest lstm", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("cell", "tile", "shape"), CASES)
def test_slow_warps_and_late_messages_change_nothing(
    cell: str, tile: tuple[int, int], shape: tuple[int, int, int], chip: Callable[..., None]
) -> None:
    assert not wrong_results(chip, cell, tile, shape)


CLUSTER = "recurrent/cluster.cuh"
AWAIT = "barrier_wait(barrier + (stage * Shape::UNITS + first_unit + part) * 8 * WARPS"
FAULTS = [
    pytest.param(
        (CLUSTER, AWAIT, "if (false) barrier_wait(0"),
        id="no wait for the peers",
    ),
    pytest.param((CLUSTER, "if (valid_frame) store_shared_4(carry", "store_shared_4(carry"), id="carry of padding"),
    pytest.param(("recurrent/cells.cuh", "dc * before * f", "dc * carry * f"), id="c of the wrong frame"),
    pytest.param((CLUSTER, "4 * v * Shape::OWN_WORDS, address", "4 * v * Shape::WORDS, address"), id="gates overlap"),
]


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: tuple[str, str, str], chip: Callable[..., None]) -> None:
    try:
        wrong = wrong_results(chip, "lstm", (8, 1), (3, 2, 40), ((), (fault,)))
    except AssertionError:
        return  # the emulation itself saw it
    assert wrong


def test_every_cell_with_kernels_is_run_here() -> None:
    assert {case.values[0] for case in CASES} == {name for name, cell in GATED.items() if cell.kernels}
