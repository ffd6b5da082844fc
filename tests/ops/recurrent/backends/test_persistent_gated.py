"""Every tile of the cells with gates on a GPU, beside float64: ragged, poisoned memory, same bits twice and split."""

import functools

import pytest
import torch
from ds2_ops.recurrent.calibrate import device_facts
from ds2_ops.recurrent.cells import GATED
from ds2_ops.recurrent.plan.choose import hopper, space
from ds2_ops.recurrent.plan.problem import Choice, Problem
from support.gated_cases import check_each_tile, gated, problem
from support.op_cases import CUDA, assert_same_bits
from support.persistent_cases import TF32_ERROR, each_tile, one_a_kernel, one_a_layout

# Odd rows, one utterance, more tiles than clusters, units of one multiprocessor and of clusters.
SMALL = [((6, 3, 65), torch.bfloat16), ((5, 1, 64), torch.bfloat16), ((4, 150, 77), torch.bfloat16)]
SMALL += [((5, 20, 250), torch.bfloat16), ((6, 3, 65), torch.float16), ((5, 9, 90), torch.float32)]
# The largest of the goals; uneven groups, and streams with weights in shared memory; odd rows, few utterances; two
# tiles; so many frames that the exchange comes round; one frame of one utterance; a last cluster that owns little.
LARGE = [((6, 64, 1024), torch.bfloat16), ((20, 63, 1000), torch.bfloat16), ((19, 35, 1001), torch.float16)]
LARGE += [((5, 9, 777), torch.float16), ((21, 70, 640), torch.bfloat16), ((70, 9, 640), torch.bfloat16)]
LARGE += [((1, 1, 640), torch.bfloat16), ((3, 33, 1056), torch.bfloat16)]
CASES = [(cell, *case, False) for cell in GATED for case in SMALL]
CASES += [(cell, *case, True) for cell in GATED for case in LARGE]
CASES += [("gru_before", (7, 5, 600), torch.float32, True)]


def tiles(problem: Problem, whole_chip: bool) -> list[Choice]:
    facts = device_facts(torch.cuda.current_device())
    if not hopper(facts):  # many sizes have portable tiles only, or in one pass
        return one_a_layout(space(problem, facts))
    return one_a_kernel([choice for choice in space(problem, facts) if choice.launch.cooperative == whole_chip])


@pytest.mark.gpu
@pytest.mark.parametrize(("cell", "shape", "dtype", "whole_chip"), CASES, ids=str)
def test_every_tile_is_as_good_as_stock(
    cell: str, shape: tuple[int, int, int], dtype: torch.dtype, whole_chip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_design = functools.partial(tiles, whole_chip=whole_chip)
    floor = TF32_ERROR if dtype == torch.float32 else 0.0 if whole_chip else 2e-7
    check_each_tile(monkeypatch, of_design, shape, dtype, cell, floor)


@pytest.mark.gpu
@pytest.mark.parametrize("cell", GATED)
def test_split_in_time_and_off_16_bytes_the_same_bits(cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (20, 40, 640)
    (x, weight_hh, bias, h0, c0), _ = problem(cell, shape, CUDA, torch.bfloat16)
    of_design = functools.partial(tiles, whole_chip=True)
    for _ in each_tile(monkeypatch, of_design, shape, torch.bfloat16, cell):
        whole = gated(cell, x, weight_hh, bias, h0, c0, None, backend="persistent")
        shifted = torch.cat([x.new_zeros(2), x.flatten()])[2:].view_as(x)
        assert shifted.data_ptr() % 16 == 4
        assert_same_bits(gated(cell, shifted, weight_hh, bias, h0, c0, None, backend="persistent"), whole)
        for cut in (1, 9):
            first, h, c = gated(cell, x[:cut], weight_hh, bias, h0, c0, None, backend="persistent")
            c = c if c0 is not None else None
            second, h, c = gated(cell, x[cut:], weight_hh, bias, h, c, None, backend="persistent")
            assert_same_bits([torch.cat([first, second]), h, c], whole)
