"""Gates in the whole-chip designs on a GPU: every tile against float64, poisoned memory, same bits twice, split."""

import pytest
import torch
from ds2_ops.recurrent.backends import persistent
from ds2_ops.recurrent.plan.choose import grid_choices
from ds2_ops.recurrent.plan.problem import Choice, Problem
from support.gated_cases import assert_as_good_as_stock, gated, problem, run
from support.op_cases import CUDA, assert_same_bits, nan_filled_memory, poison_padding, ragged_lengths
from support.persistent_cases import H200, one_a_kernel

# The largest of the goals; uneven groups, and streams with weights in shared memory; odd rows, few utterances; two
# tiles; so many frames that the exchange comes round; one frame of one utterance; a last cluster that owns little.
CASES = [
    ((6, 64, 1024), torch.bfloat16),
    ((20, 63, 1000), torch.bfloat16),
    ((19, 35, 1001), torch.float16),
    ((5, 9, 777), torch.float16),
    ((21, 70, 640), torch.bfloat16),
    ((70, 9, 640), torch.bfloat16),
    ((1, 1, 640), torch.bfloat16),
    ((3, 33, 1056), torch.bfloat16),
]
CELLS = ["lstm", "gru_after"]


def tiles(wanted: Problem) -> list[Choice]:
    return one_a_kernel(grid_choices(wanted, H200, H200.sms))


def use_tile(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Run the tile of this number, or the last where a pass has fewer."""

    def plan_for(wanted: Problem, *_: object) -> Choice:
        found = tiles(wanted)
        return found[min(number, len(found) - 1)]

    monkeypatch.setattr(persistent, "choose_tile", plan_for)


def most_tiles(cell: str, batch: int, hidden: int, dtype: str = "bfloat16") -> int:
    return max(len(tiles(Problem(batch, hidden, dtype, cell, backward))) for backward in (False, True))


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_every_tile_against_float64(
    shape: tuple[int, int, int], cell: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames, batch, hidden = shape
    lengths = ragged_lengths(frames, batch).to(CUDA)
    (x, *others), (grad_y, *last) = problem(cell, shape, CUDA, dtype)
    poisoned = [poison_padding(x, lengths), *others], [poison_padding(grad_y, lengths), *last]

    def ours() -> list[torch.Tensor]:
        with nan_filled_memory():
            return run(cell, *poisoned, lengths, backend="persistent")

    for number in range(most_tiles(cell, batch, hidden, str(dtype).removeprefix("torch."))):
        use_tile(monkeypatch, number)
        assert_as_good_as_stock(cell, ours, [x, *others], [grad_y, *last], lengths)
        assert_same_bits(ours(), ours())


@pytest.mark.gpu
@pytest.mark.parametrize("cell", CELLS)
def test_split_in_time_and_off_16_bytes_the_same_bits(cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (x, weight_hh, bias, h0, c0), _ = problem(cell, (20, 40, 640), CUDA, torch.bfloat16)
    for number in range(most_tiles(cell, 40, 640)):
        use_tile(monkeypatch, number)
        whole = gated(cell, x, weight_hh, bias, h0, c0, None, backend="persistent")
        shifted = torch.cat([x.new_zeros(2), x.flatten()])[2:].view_as(x)
        assert shifted.data_ptr() % 16 == 4
        assert_same_bits(gated(cell, shifted, weight_hh, bias, h0, c0, None, backend="persistent"), whole)
        for cut in (1, 9):
            first, h, c = gated(cell, x[:cut], weight_hh, bias, h0, c0, None, backend="persistent")
            c = c if c0 is not None else None
            second, h, c = gated(cell, x[cut:], weight_hh, bias, h, c, None, backend="persistent")
            assert_same_bits([torch.cat([first, second]), h, c], whole)
