"""The kernels' own source, whole-chip and of small layers, on a CPU, with slow warps and late messages."""

from dataclasses import replace

import pytest
import torch
from ds2_ops.recurrent.cells import Options
from ds2_ops.recurrent.plan.choose import grid_choices
from ds2_ops.recurrent.plan.problem import Choice, Problem
from ds2_ops.recurrent.plan.units import units_choices
from support.chip import Chip, slow, small_chip
from support.op_cases import CPU, nan_filled_memory, ragged_lengths
from support.persistent_cases import CLIP, assert_near_float64, backward_data, forward, inputs

# cluster -> clusters of a chip small enough to run here
NARROW, WIDE = {2: 5}, {5: 4}
ALONE, FEW = {1: 2}, {4: 1}
PORTABLE, TEAMS = {1: 7}, {2: 6}  # of capability 8.0


def the_choice(active: dict[int, int], batch: int, hidden: int, backward: bool) -> Choice:
    facts = replace(small_chip(active), capability=(8, 0) if active in (PORTABLE, TEAMS) else (9, 0))
    make = units_choices if active in (ALONE, FEW) else grid_choices
    choices = make(Problem(batch, hidden, "bfloat16", "tanh", backward), facts, facts.sms)
    if active in (PORTABLE, TEAMS):
        choices = [choice for choice in choices if choice.work.cluster in active]
    return max(choices, key=lambda choice: (choice.launch.grid, choice.samples))  # all multiprocessors at work


# One group and several, two tiles, odd rows, a last cluster that owns little; 20 frames come round the exchange.
CASES = [
    pytest.param(ALONE, (5, 11, 77), 8, id="two multiprocessors, two columns a lane, two tiles"),
    pytest.param(FEW, (4, 3, 100), 9, id="units of a cluster"),
    pytest.param(NARROW, (6, 5, 520), 1, id="narrow, one group"),
    slow(NARROW, (20, 5, 520), 2, id="narrow, many frames"),
    slow(NARROW, (4, 70, 561), 3, id="narrow, two tiles"),
    pytest.param(WIDE, (4, 40, 392), 4, id="wide, two groups"),
    slow(WIDE, (20, 3, 264), 5, id="wide, blocks that own nothing"),
    slow(WIDE, (20, 35, 264), 8, id="wide, many frames of uneven groups"),
    slow(WIDE, (3, 70, 465), 6, id="wide, two tiles"),
    slow(WIDE, (3, 9, 396), 7, id="wide, rows of whole words"),
    pytest.param(PORTABLE, (20, 5, 100), 10, id="portable, many frames, warps without a part of K"),
    slow(PORTABLE, (6, 19, 333), 11, id="portable, odd rows, groups"),
    slow(PORTABLE, (4, 70, 201), 12, id="portable, two tiles"),
    pytest.param(TEAMS, (5, 5, 520), 13, id="teams"),
    slow(TEAMS, (20, 5, 520), 13, id="teams, many frames"),
    slow(TEAMS, (6, 70, 561), 14, id="teams, two tiles, odd rows"),
]


@pytest.mark.parametrize(("active", "shape", "seed"), CASES)
def test_slow_warps_and_late_messages_change_nothing(
    active: dict[int, int], shape: tuple[int, int, int], seed: int, chip: Chip
) -> None:
    frames, batch, hidden = shape
    x, weight_hh, h0, grad_y, grad_h_n = tensors = inputs(shape, torch.bfloat16, CPU)
    lengths = ragged_lengths(frames, batch).to(torch.int32)
    tile, tile_back = (the_choice(active, batch, hidden, b) for b in (False, True))
    options = Options("tanh", CLIP)
    with nan_filled_memory():
        chip(tile, seed)
        y, h_n = forward(x, weight_hh, h0, lengths, options)
        chip(tile_back, seed)
        grads = backward_data(grad_y, grad_h_n, y, weight_hh, lengths, options)
    assert_near_float64(tensors, lengths, "tanh")([y, h_n, *grads])
