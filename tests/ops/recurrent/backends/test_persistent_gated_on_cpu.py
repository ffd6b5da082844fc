"""The kernels' own source with gates on a CPU, with slow warps and late messages, against float64."""

from dataclasses import replace

import pytest
import torch
from ds2_ops.recurrent.backends import gemm, persistent
from ds2_ops.recurrent.cells import GATED, Options
from ds2_ops.recurrent.plan import wide
from ds2_ops.recurrent.plan.cluster import cluster_choices
from ds2_ops.recurrent.plan.narrow import narrow_choices, portable_choices
from ds2_ops.recurrent.plan.problem import Choice, Problem
from ds2_ops.recurrent.plan.units import units_choices
from ds2_ops.recurrent.plan.wide import wide_choices
from support.chip import Chip, Fault, Faults, assert_seen, slow, small_chip
from support.gated_cases import both_passes, in_float64, problem
from support.op_cases import CPU, assert_same_bits, nan_filled_memory, ragged_lengths, relative_error
from torch import Tensor

# design, blocks of a cluster, clusters of the chip, groups
Tile = tuple[str, int, int, int]
DESIGNS = {
    "cluster": cluster_choices,
    "units": units_choices,
    "narrow": narrow_choices,
    "portable": portable_choices,
    "wide": wide_choices,
    "wider": wide_choices,  # with three multiplying warp groups
    "streams": wide_choices,  # two, each with all weights
}
OTHER = {"wide": 9, "wider": 16, "streams": 9}  # blocks of a cluster, where a pass cannot have as few as are asked for


def the_choice(tile: Tile, cell: str, batch: int, hidden: int, backward: bool) -> Choice:
    design, cluster, clusters, groups = tile
    other = OTHER.get(design, cluster)
    facts = small_chip({cluster: clusters, other: clusters})
    choices = DESIGNS[design](Problem(batch, hidden, "bfloat16", cell, backward), facts, facts.sms)
    fitting = [c for c in choices if c.groups == groups and c.work.layout in (f"{design}{cluster}", f"{design}{other}")]
    return min(fitting, key=lambda choice: choice.launch.cluster != cluster)


def wrong_results(
    chip: Chip,
    cell: str,
    tile: Tile,
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
            chip(the_choice(tile, cell, batch, hidden, False), 1, faults[0])

            def backward() -> None:
                chip(the_choice(tile, cell, batch, hidden, True), 2, faults[1])

            results[index] = both_passes(run, cell, tensors, above, lengths, backward)
    triples = enumerate(zip(*results, strict=True))
    return [i for i, (our, stock, true) in triples if not relative_error(our, true) <= 2 * relative_error(stock, true)]


# Tiles of both clusters, of one group and two; odd rows, units that do not exist, two tiles of utterances.
CASES = [
    pytest.param("lstm", ("cluster", 8, 1, 1), (3, 2, 40), id="lstm"),
    pytest.param("gru_after", ("cluster", 8, 1, 2), (4, 21, 33), id="gru, odd rows, two groups, two tiles"),
    slow("lstm", ("cluster", 16, 1, 2), (3, 11, 250), id="lstm, warps that share"),
    slow("gru_after", ("cluster", 16, 1, 2), (4, 11, 512), id="gru that pushes"),
    pytest.param("lstm", ("cluster", 8, 1, 1), (5, 3, 250), id="lstm that pushes"),
    slow("lstm", ("cluster", 8, 1, 2), (5, 1, 256), id="pushing, an empty group"),
    slow("lstm", ("cluster", 16, 1, 2), (6, 1, 250), id="an empty group"),
    slow("lstm", ("units", 1, 2, 1), (3, 3, 65), id="lstm, one multiprocessor, two tiles"),
    slow("lstm", ("units", 1, 1, 1), (7, 12, 40), id="lstm, one multiprocessor, a second tile"),
    pytest.param("lstm", ("units", 1, 3, 1), (4, 3, 65), id="lstm, a lane a gate"),
    slow("lstm", ("units", 2, 3, 1), (4, 3, 60), id="lstm, cluster, one utterance a tile"),
    pytest.param("lstm", ("units", 2, 1, 1), (4, 5, 60), id="lstm, units of a cluster, two columns a lane"),
    slow("gru_after", ("units", 1, 4, 1), (4, 3, 33), id="gru, a lane a gate"),
    pytest.param("gru_after", ("units", 1, 1, 1), (4, 3, 33), id="gru, one multiprocessor"),
    pytest.param("gru_before", ("units", 1, 2, 1), (4, 3, 65), id="reset before, one multiprocessor, two tiles"),
    pytest.param("gru_before", ("units", 2, 3, 1), (5, 3, 60), id="reset before, cluster, a lane a gate"),
    slow("gru_before", ("units", 4, 1, 1), (5, 3, 77), id="reset before, cluster"),
    slow("gru_before", ("narrow", 2, 16, 1), (5, 3, 500), id="reset before, whole chip"),
    slow("gru_before", ("narrow", 2, 12, 2), (4, 11, 511), id="reset before, whole chip, odd rows, two groups"),
    slow("gru_before", ("narrow", 2, 8, 1), (36, 1, 500), id="reset before, the exchange comes round"),
    pytest.param("gru_before", ("portable", 1, 7, 1), (11, 3, 100), id="reset before, portable, many frames"),
    slow("gru_before", ("portable", 1, 7, 5), (3, 66, 60), id="reset before, portable, two tiles"),
    slow("gru_before", ("portable", 2, 16, 2), (5, 11, 501), id="reset before, teams of two, odd rows"),
    slow("lstm", ("narrow", 2, 16, 1), (3, 3, 500), id="lstm, whole chip"),
    slow("gru_after", ("narrow", 2, 12, 2), (4, 11, 511), id="gru, whole chip"),
    slow("gru_after", ("narrow", 2, 8, 1), (66, 1, 500), id="gru, the exchange comes round"),
    pytest.param("lstm", ("portable", 1, 7, 1), (19, 3, 100), id="lstm, portable, many frames"),
    slow("gru_after", ("portable", 1, 7, 2), (4, 11, 131), id="gru, portable, odd rows"),
    slow("lstm", ("portable", 1, 5, 5), (3, 66, 60), id="lstm, portable, two tiles"),
    slow("lstm", ("portable", 2, 16, 1), (20, 3, 500), id="lstm, teams of two, many frames"),
    slow("gru_after", ("portable", 2, 16, 2), (5, 11, 501), id="gru, teams of two, odd rows"),
    pytest.param("lstm", ("wide", 3, 6, 1), (5, 9, 168), id="lstm, wide"),
    slow("gru_after", ("wide", 2, 6, 2), (4, 39, 177), id="gru, wide, odd rows"),
    slow("lstm", ("wider", 4, 4, 1), (3, 9, 184), id="lstm, three warp groups"),
    slow("gru_after", ("wider", 4, 4, 2), (3, 35, 245), id="gru, three warp groups"),
    slow("lstm", ("wide", 4, 6, 2), (3, 66, 162), id="lstm, wide, two tiles"),
    slow("lstm", ("wide", 4, 6, 1), (20, 3, 162), id="lstm, wide, many frames"),
    slow("lstm", ("streams", 2, 12, 1), (20, 35, 100), id="lstm, two streams"),
    # The second stream has a tile less, and odd rows.
    slow("gru_after", ("streams", 2, 12, 1), (9, 70, 85), id="gru, three tiles"),
    # Groups of 18 and 17: a lane may have an utterance of the first alone. The exchange comes round.
    slow("gru_after", ("wide", 2, 6, 2), (20, 35, 177), id="gru, wide, uneven groups"),
]


@pytest.mark.parametrize(("cell", "tile", "shape"), CASES)
def test_slow_warps_and_late_messages_change_nothing(
    cell: str, tile: Tile, shape: tuple[int, int, int], chip: Chip
) -> None:
    assert not wrong_results(chip, cell, tile, shape)


@pytest.mark.slow
def test_a_split_in_time_gives_the_same_bits(chip: Chip) -> None:
    """Sums that a team sends through L2 carry a bit of the state's number, which must not reach the results."""
    cell, tile, shape = "gru_before", ("portable", 2, 16, 1), (4, 8, 501)
    (x, weight_hh, bias, h0, _), _ = problem(cell, shape, CPU, torch.bfloat16)

    def run(x: Tensor, h0: Tensor) -> tuple[Tensor, Tensor]:
        chip(the_choice(tile, cell, *shape[1:], False), 1)
        with nan_filled_memory():
            return persistent.forward((x, weight_hh, bias, h0, None, None), Options(cell), True)[:2]

    first, h = run(x[:1], h0)
    second, h = run(x[1:], h)
    assert_same_bits([torch.cat([first, second]), h], run(x, h0))


@pytest.mark.slow
@pytest.mark.parametrize(("cell", "hidden"), [("lstm", 100), ("gru_after", 85)])
def test_weights_in_shared_memory(cell: str, hidden: int, chip: Chip, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all instructions along K but one, where the chip has those from the 29th on; forward two streams."""
    monkeypatch.setattr(wide, "GATES", replace(wide.GATES, max_k_tiles={2: 1}))
    fewer = (("recurrent/grid_wide_shape.cuh", "K_TILES > 28 ? K_TILES - 28 : 0", "K_TILES > 1 ? K_TILES - 1 : 0"),)
    forward = the_choice(("streams", 2, 12, 1), cell, 34, hidden, False)
    backward = the_choice(("wide", 9, 2, 2), cell, 34, hidden, True)
    assert min(forward.work.smem_k_tiles, backward.work.smem_k_tiles) > 0
    given, (grad_y, grad_h_n, *grad_c_n) = problem(cell, (4, 34, hidden), CPU, torch.bfloat16)
    above = (grad_y, grad_h_n, grad_c_n[0] if grad_c_n else None)
    results: list[list[Tensor]] = []
    doubles = in_float64(given), in_float64(above)
    for run, tensors, grads in ((persistent, given, above), (gemm, given, above), (gemm, *doubles)):
        y, _, _, saved = gemm.forward((*tensors, None), Options(cell), True)
        with nan_filled_memory():
            chip(forward, 3, fewer)
            outputs = run.forward((*tensors, None), Options(cell), True)  # type: ignore[attr-defined]
            chip(backward, 4, fewer)
            back = run.backward_data((*grads, y, saved, tensors[1], None), Options(cell))  # type: ignore[attr-defined]
            results.append([t for t in (*outputs, *back) if t is not None])
    assert all(relative_error(a, c) <= 2 * relative_error(b, c) for a, b, c in zip(*results, strict=True))


CLUSTER, MULTIPLY, UNITS, SPREAD, WIDE, FINISH, NARROW, BEGIN, CELLS = (
    f"recurrent/{name}.cuh"
    for name in (
        "cluster", "cluster_multiply", "units", "units_spread", "grid_wide", "grid_wide_finish", "grid_narrow",
        "exchange", "cells",
    )
)  # fmt: skip
AWAIT = "barrier_wait(first_barrier + (stage * Shape::UNITS + first_unit + part) * 8 * WARPS"
ALL_WAIT = "block_wait(Shape::ALL_EMPTY, Shape::BEGINNERS);"
NO_SUMS = "if (!DEBUG_WAITS) block_wait(Shape::written(sums_turn), Shape::SUM_THREADS);"
MANY_ROWS = "lstm", ("cluster", 16, 1, 1), (3, 2, 250)  # warps share them
FEW_ROWS = "lstm", ("cluster", 8, 1, 1), (3, 2, 40)
BLOCK, PAIR = (("gru_before", ("units", cluster, 1, 1), (5, 2, 40)) for cluster in (1, 2))
OF_WIDE = "lstm", ("wide", 3, 6, 1), (3, 9, 168)
PORTABLE, TEAM = ("lstm", ("portable", 1, 7, 1), (19, 3, 100)), ("lstm", ("portable", 2, 16, 1), (8, 3, 500))
PHASES = "gru_before", ("portable", 1, 7, 1), (5, 3, 100)
FAULTS = [  # where, whether in the forward pass, the fault
    slow(*MANY_ROWS, True, (MULTIPLY, "await(PORTION);", ""), id="no wait for the peers"),
    slow(*MANY_ROWS, True, (MULTIPLY, "block_wait(Shape::FIRST_STATE, THREADS);", ";"), id="no wait for the first"),
    slow(*FEW_ROWS, False, (MULTIPLY, AWAIT, "if (false) barrier_wait(0"), id="no wait for the peers' gradients"),
    pytest.param(*FEW_ROWS, False, (CLUSTER, "if (t < frames) keep_carry", "keep_carry"), id="carry of padding"),
    slow(*FEW_ROWS, False, (CELLS, "= before * f", "= tanh_c * f"), id="c of the wrong frame"),
    slow(*FEW_ROWS, False, (CLUSTER, "4 * v * Shape::OWN_WORDS", "4 * v * Shape::WORDS"), id="gates overlap"),
    slow(*OF_WIDE, False, (BEGIN, "+ thread; i", "+ thread + 1; i"), id="wide, not all emptied"),
    slow(
        *OF_WIDE, True, (BEGIN, "bool waits = thread == 0", "bool waits = false"), id="wide, no wait for other blocks"
    ),
    slow(*OF_WIDE, True, (BEGIN, ALL_WAIT, ""), id="wide, one warp waits for other blocks"),
    slow(*OF_WIDE, False, (FINISH, "if (t <= last) keep_carry", "keep_carry"), id="wide, carry of padding"),
    slow(*OF_WIDE, False, (FINISH, "plane * plane_words", "plane * 0"), id="wide, gates overlap"),
    slow(*OF_WIDE, True, (WIDE, "* Shape::SUMS + gate)", "* Shape::SUMS)"), id="wide, sums overlap"),
    slow(
        *OF_WIDE,
        True,
        (FINISH, "await_sums(at);\n        const unsigned from", "const unsigned from"),
        id="wide, no wait",
    ),
    slow(*PORTABLE, True, (NARROW, NO_SUMS, ""), id="portable, no wait"),
    slow(
        *PORTABLE,
        True,
        (NARROW, "SOURCES = CLUSTER == 1 ? WARPS", "SOURCES = CLUSTER == 1 ? WARPS / 4"),
        id="a sum less",
    ),
    slow(*TEAM, True, (NARROW, "waits |= missing(sums.v[s][k], use);", ";"), id="no wait for the team"),
    slow(*TEAM, True, (NARROW, "return turn.epoch / 2 % 2;", "return 0;"), id="sums of two states before"),
    slow(*TEAM, True, (NARROW, "return end - (buffer_of(turn) + 1)", "return end - 1"), id="one buffer"),
    slow(*PHASES, False, (NARROW, "sent[1] = load_shared_4(kept_at(at.group, 0));", ""), id="no gradient of z"),
    slow(*PHASES, True, (NARROW, "at.epoch / Shape::PHASES", "at.epoch"), id="inputs of another frame"),
    slow(*PHASES, False, (NARROW, "? Number::pack(grad) : 0", "? out[0] : 0"), id="no gradient of r"),
    slow(*BLOCK, True, (UNITS, "block_wait(1, Shape::ALL_THREADS);", ""), id="units, no barrier of the block"),
    slow(
        *PAIR,
        True,
        (UNITS, "barrier_wait(barrier(epoch), parity", "if (false) barrier_wait(0, parity"),
        id="units, no wait",
    ),
    slow(*PAIR, False, (UNITS, "return Shape::PHASES == 2 && epoch % 2 ?", "return false ?"), id="units, other bytes"),
    slow(
        "lstm",
        ("units", 1, 1, 1),
        (5, 1, 40),
        True,
        (SPREAD, "of_lane(saved, 1) * carry", "carry"),
        id="a gate left out",
    ),
    slow(
        "lstm",
        *BLOCK[1:],
        False,
        (UNITS, "if (exists) u.carry[0] = carry[0];", "u.carry[0] = carry[0];"),
        id="units, carry of padding",
    ),
    slow(*BLOCK, False, (CELLS, "carry += q * slope[3];", ""), id="units, no gradient of r h"),
]


@pytest.mark.parametrize(("cell", "tile", "shape", "forward", "fault"), FAULTS)
def test_planted_faults_are_found(
    cell: str, tile: Tile, shape: tuple[int, int, int], forward: bool, fault: Fault, chip: Chip
) -> None:
    faults = ((fault,), ()) if forward else ((), (fault,))
    assert_seen(lambda: wrong_results(chip, cell, tile, shape, faults))


@pytest.mark.slow
@pytest.mark.parametrize("forward", [True, False])
def test_copies_of_the_tile_before_are_waited_for(forward: bool, chip: Chip) -> None:
    """The last ones of a tile are of zeros, into places that the next tile's first ones take."""
    fault = (UNITS, "copies_wait<0>();", "")
    faults = ((fault,), ()) if forward else ((), (fault,))
    assert wrong_results(chip, "lstm", ("units", 1, 1, 1), (7, 12, 40), faults)


COARSE_GATES = [
    pytest.param((), 1, True, id="a lane a gate"),
    pytest.param((), 2, True, id="as it is"),
    pytest.param(
        ((CELLS, "i = sigmoid(", "i = sigmoid_as<Number>("),),
        2,
        False,
        id="what lets something in",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        ((CELLS, "f = sigmoid(", "f = sigmoid_as<Number>("),),
        2,
        False,
        id="what scales the carry",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("faults", "batch", "right"), COARSE_GATES)
def test_a_long_memory_rests_on_exact_gates(faults: Faults, batch: int, right: bool, chip: Chip) -> None:
    """bfloat16's instruction of less precision is not for gates near their ends, whose errors add up over frames."""
    frames, hidden = 64, 40
    chip(the_choice(("units", 1, 1, 1), "lstm", batch, hidden, False), 1, faults)
    x = torch.tensor([-5.0, 7.0, 0.5, 0.0]).repeat_interleave(hidden).repeat(frames, batch, 1).bfloat16()
    c0, lengths = torch.ones(batch, hidden), torch.full((batch,), frames, dtype=torch.int32)
    given = (x, torch.zeros(4 * hidden, hidden).bfloat16(), None, None, c0, lengths)
    c_n = persistent.forward(given, Options("lstm"))[2]
    truth = gemm.forward((*in_float64(given[:5]), given[5]), Options("lstm"))[2]
    assert (relative_error(c_n, truth) <= 2**-11) == right


@pytest.mark.parametrize("cell", GATED)
def test_the_bits_do_not_depend_on_what_is_kept(cell: str, chip: Chip) -> None:
    """One utterance a tile: a lane writes one plane of what is kept, or none."""
    given, _ = problem(cell, (4, 3, 24), CPU, torch.bfloat16)
    results: list[list[Tensor]] = []
    for kept in (True, False):
        with nan_filled_memory():
            chip(the_choice(("units", 1, 3, 1), cell, 3, 24, False), 1, ())
            results.append([made.clone() for made in persistent.forward((*given, None), Options(cell), kept)[:2]])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_every_cell_is_run_here() -> None:
    assert {case.values[0] for case in CASES} == set(GATED)
