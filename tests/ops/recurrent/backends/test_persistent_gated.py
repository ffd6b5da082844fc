"""Every tile of the cells with gates on a GPU, beside float64: ragged, in poisoned memory, the same bits twice."""

import pytest
import torch
from ds2_ops.recurrent.backends import persistent
from ds2_ops.recurrent.calibrate import device_facts
from ds2_ops.recurrent.cells import GATED
from ds2_ops.recurrent.plan.choose import space
from ds2_ops.recurrent.plan.problem import Choice, Problem
from support.gated_cases import assert_as_good_as_stock, problem, run
from support.op_cases import CUDA, assert_same_bits, nan_filled_memory, poison_padding, ragged_lengths
from support.persistent_cases import TF32_ERROR, one_a_kernel
from torch import Tensor

# Odd rows, one utterance, more tiles than clusters, units of one multiprocessor and of clusters.
CASES = [((6, 3, 65), torch.bfloat16), ((5, 1, 64), torch.bfloat16), ((4, 150, 77), torch.bfloat16)]
CASES += [((5, 20, 250), torch.bfloat16), ((6, 3, 65), torch.float16), ((5, 9, 90), torch.float32)]


def tiles(problem: Problem) -> list[Choice]:
    facts = device_facts(torch.cuda.current_device())
    return one_a_kernel([choice for choice in space(problem, facts) if not choice.launch.cooperative])


@pytest.mark.gpu
@pytest.mark.parametrize("cell", GATED)
@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_every_tile_is_as_good_as_stock(
    shape: tuple[int, int, int], dtype: torch.dtype, cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames, batch, hidden = shape
    name = str(dtype).removeprefix("torch.")
    lengths = ragged_lengths(frames, batch).to(CUDA, torch.int32)
    inputs, cotangents = problem(cell, shape, CUDA, dtype)
    poisoned = [poison_padding(inputs[0], lengths), *inputs[1:]]  # type: ignore[arg-type]
    gradients = [poison_padding(cotangents[0], lengths), *cotangents[1:]]
    counts = [len(tiles(Problem(batch, hidden, name, cell, backward))) for backward in (False, True)]
    for index in range(max(counts)):

        def tile(problem: Problem, *_: object, i: int = index) -> Choice:
            found = tiles(problem)
            return found[i % len(found)]

        monkeypatch.setattr(persistent, "choose_tile", tile)

        def ours() -> list[Tensor]:
            with nan_filled_memory():
                first = run(cell, poisoned, gradients, lengths, backend="persistent")
                assert_same_bits(run(cell, poisoned, gradients, lengths, backend="persistent"), first)
            return first

        floor = TF32_ERROR if dtype == torch.float32 else 2e-7
        assert_as_good_as_stock(cell, ours, inputs, cotangents, lengths, floor)
