"""Warps that rest at random places: whatever the kernels wait for, they must wait for it.

On an idle GPU all warps keep one pace, and a wait that is missing goes unseen: a race of the whole-chip design passed
every other test.
"""

from dataclasses import replace

import pytest
import torch
from ds2_ops.recurrent.backends import persistent
from ds2_ops.recurrent.plan.choose import grid_choices
from ds2_ops.recurrent.plan.cluster import cluster_choices
from ds2_ops.recurrent.plan.problem import Choice, Problem
from ds2_ops.recurrent.plan.units import units_choices
from support.op_cases import CUDA, poison_padding, ragged_lengths
from support.persistent_cases import H200, inputs, one_a_kernel, run

# Cluster design: one group, two parts. Whole chip: one group and several; the last one comes round the exchange.
SHAPES = [(6, 3, 130), (6, 9, 77), (5, 40, 700), (1, 1, 1153), (6, 3, 1761), (6, 40, 2558), (20, 70, 1760)]


def tiles(problem: Problem) -> list[Choice]:
    chosen = cluster_choices(problem, H200, H200.sms) or grid_choices(problem, H200, H200.sms)
    return one_a_kernel(chosen + units_choices(problem, H200, H200.sms))


# A case for each kernel, so that workers share them: together they take minutes.
CASES = [
    (shape, tile) for shape in SHAPES for tile in range(len(tiles(Problem(*shape[1:], "bfloat16", "relu", False))))
]


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize(("shape", "tile"), CASES, ids=str)
def test_rests_at_random_places_change_no_bit(
    shape: tuple[int, int, int], tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = ragged_lengths(*shape[:2]).to(CUDA, torch.int32)
    x, weight_hh, h0, grad_y, grad_h_n = inputs(shape, torch.bfloat16)
    arguments = (poison_padding(x, lengths), weight_hh, h0, poison_padding(grad_y, lengths), grad_h_n)

    def plain(problem: Problem, *_: object) -> Choice:
        return tiles(problem)[tile]

    def with_rests(problem: Problem, *_: object) -> Choice:
        choice = tiles(problem)[tile]
        source = replace(choice.launch.source, text="#define DS2_JITTER\n" + choice.launch.source.text)
        return replace(choice, launch=replace(choice.launch, source=source))

    monkeypatch.setattr(persistent, "choose_tile", plain)
    expected = run(arguments, lengths, "relu")
    monkeypatch.setattr(persistent, "choose_tile", with_rests)
    for attempt in range(60):
        assert all(map(torch.equal, run(arguments, lengths, "relu"), expected)), attempt
