"""A chain of row convolutions on blocks of any length has the bits of the whole, in one launch or in several."""

from __future__ import annotations

import ds2_ops.row_convolution as op
import pytest
import torch
from ds2_ops import lookahead
from ds2_ops.row_convolution import lookahead_chain
from support.kernel_on_cpu import patch_run
from support.op_cases import CUDA, relative_error
from torch import Tensor

# T, B, H, N, tau
SHAPES = [(10, 1, 24, 5, 3), (3, 2, 6, 2, 4), (25, 3, 8, 1, 1), (4, 1, 10, 3, 0), (9, 2, 130, 10, 3)]


def whole(y: Tensor, taps: Tensor, skip: Tensor | None) -> Tensor:
    """All frames of utterances, of which N tau come out of nothing."""
    for weight in taps:
        y = lookahead(y, weight.t())
    return y if skip is None else y + skip


def in_blocks(y: Tensor, taps: Tensor, skip: Tensor | None, cut: list[int]) -> Tensor:
    """The same by blocks of so many frames, each stream from its first frame on."""
    count, width, _ = taps.shape
    delay = count * (width - 1)
    batch, hidden = y.shape[1:]
    slots = torch.arange(batch, device=y.device).flip(0) + 1
    state = y.new_full((delay * (1 if skip is None else 2), batch + 2, hidden), float("nan"))  # of others
    state[:, slots] = 0
    silence = y.new_zeros(delay, *y.shape[1:])
    ys, skips = torch.cat([y, silence]).split(cut), None if skip is None else torch.cat([skip, silence]).split(cut)
    outputs = []
    for number, block in enumerate(ys):
        outputs.append(lookahead_chain(block, taps, state, None if skips is None else skips[number], slots))
    assert bool(state[:, [0, batch + 1]].isnan().all())
    return torch.cat(outputs)[delay:]


def check(shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device, with_skip: bool) -> None:
    frames, batch, hidden, count, tau = shape
    draw = torch.Generator().manual_seed(frames)
    y, skip, taps = (
        torch.randn(*size, generator=draw).to(device, dtype)
        for size in ((frames, batch, hidden), (frames, batch, hidden), (count, tau + 1, hidden))
    )
    added, all_frames = skip if with_skip else None, frames + count * tau
    true = whole(y.double(), taps.double(), None if added is None else added.double())
    stock = whole(y, taps, added)
    cuts = [[all_frames], [1] * all_frames, [2, all_frames - 2]]
    first, *others = (in_blocks(y, taps, added, cut) for cut in cuts)
    assert relative_error(first, true) <= 2 * relative_error(stock, true)
    for other in others:
        assert torch.equal(other, first)


@pytest.mark.parametrize("with_skip", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_give_the_whole(shape: tuple[int, int, int, int, int], with_skip: bool) -> None:
    check(shape, torch.float64, torch.device("cpu"), with_skip)


@pytest.mark.parametrize("with_skip", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_on_a_cpu(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, with_skip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_run(monkeypatch, op)
    monkeypatch.setattr(op, "why_not_chain", lambda y, taps: None)
    check(shape, dtype, torch.device("cpu"), with_skip)


@pytest.mark.gpu
@pytest.mark.since_hopper
@pytest.mark.parametrize("with_skip", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, (50, 16, 1152, 5, 3), (3, 1, 33, 2, 3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_kernel_on_a_gpu(shape: tuple[int, int, int, int, int], dtype: torch.dtype, with_skip: bool) -> None:
    check(shape, dtype, CUDA, with_skip)


def test_wrong_shapes_are_refused() -> None:
    y, taps = torch.zeros(2, 1, 4), torch.zeros(3, 2, 4)
    with pytest.raises(ValueError, match="state has shape"):
        lookahead_chain(y, taps, torch.zeros(3, 1, 4), y)
    with pytest.raises(ValueError, match="skip has shape"):
        lookahead_chain(y, taps, torch.zeros(6, 1, 4), y[:1])
    with pytest.raises(TypeError, match="taps is"):
        lookahead_chain(y, taps.double(), torch.zeros(3, 1, 4))
