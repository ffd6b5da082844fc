"""Cached frames of streams joined with the next block: the kernels have the bits of PyTorch's operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from ds2_ops import convolution
from ds2_ops.convolution import ConvInput, flatten, join, join_windows, why_not_block
from support.kernel_on_cpu import patch_run
from support.op_cases import CUDA
from torch import Tensor

Case = tuple[int, int, int, int, int, bool]
# B, F, T, R, frames fewer than all that are needed, edges
CASES = [
    (3, 5, 10, 10, 0, True),
    (3, 5, 10, 10, 0, False),
    (1, 4, 3, 9, 2, True),
    (2, 3, 20, 40, 1, True),
    (4, 1, 1, 0, 0, True),
]


def block(case: Case, channels: int, device: torch.device) -> tuple[ConvInput, Tensor, Tensor]:
    """A block from a layer, a table and slots; streams begin, go on and end."""
    batch, bins, frames, cached, _, edges = case
    draw = torch.Generator().manual_seed(frames)
    x = torch.randn(bins, batch, frames + 5, channels, generator=draw)[:, :, 2 : 2 + frames].transpose(0, 1)
    x[0, 0, 0, 0] = torch.nan
    slots = torch.randperm(batch + 3, generator=draw)[:batch]
    table = torch.randn(batch + 3, bins, cached, channels, generator=draw).bfloat16().to(device)
    clock = {
        "blocks": torch.tensor([3, 0, 2, 5]).repeat(33)[:batch].to(device),
        "ends": torch.tensor([2**62, frames - 1, 2 * frames + 1, 0]).repeat(33)[:batch].to(device),
        "delay": 2,
    }
    if channels == 1:
        conv_input = ConvInput(x.contiguous().to(device), torch.bfloat16)
    else:
        conv_input = ConvInput(
            x.bfloat16().to(device), torch.bfloat16, torch.randn(channels, generator=draw).bfloat16().to(device), 1.5
        )
    return (replace(conv_input, **clock) if edges else conv_input), table, slots.to(device)


def same(actual: Tensor, expected: Tensor) -> bool:
    return torch.equal(actual.nan_to_num(77.0), expected.nan_to_num(77.0))


def check(case: Case, device: torch.device, plain: Callable[[], None]) -> None:
    needed = case[3] + case[2] - case[4]
    conv_input, table, slots = block(case, 32, device)
    features, of_features, _ = block(case, 1, device)
    tables = [table.clone(), of_features.clone()]
    actual = [
        join(conv_input, tables[0], slots, needed),
        flatten(conv_input),
        join_windows(features, tables[1], slots, 2, 1 + needed // 2),
    ]
    plain()
    expected = [
        join(conv_input, table, slots, needed),
        flatten(conv_input),
        join_windows(features, of_features, slots, 2, 1 + needed // 2),
    ]
    for ours, theirs in zip([*actual, *tables], [*expected, table, of_features], strict=True):
        assert ours.shape == theirs.shape and same(ours, theirs)
    assert bool(actual[1].isnan().any())


@pytest.mark.parametrize("case", CASES)
def test_the_kernels_on_a_cpu(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_run(monkeypatch, convolution)
    with monkeypatch.context() as patched:
        for name in ("why_not_block", "why_not_features"):
            patched.setattr(convolution, name, lambda block: None)
        check(case, torch.device("cpu"), patched.undo)


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("case", [*CASES, (64, 81, 10, 10, 0, False), (130, 161, 20, 9, 0, True)])
def test_the_kernels_on_a_gpu(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    conv_input, _, _ = block(case, 32, CUDA)
    assert why_not_block(conv_input) is None
    check(case, CUDA, lambda: monkeypatch.setattr(convolution, "_why_no_gpu", lambda block: "the reference"))


def test_the_last_frames_are_cached() -> None:
    conv_input, table, slots = block((3, 5, 10, 4, 0, False), 32, torch.device("cpu"))
    whole = join(conv_input, table, slots, 14)
    assert torch.equal(table[slots].nan_to_num(), whole[:, :, 10:].nan_to_num())
    values = conv_input.values()
    assert same(whole[:, :, 4:], values) and same(flatten(conv_input)[3, 1].view(32, 5), values[1, :, 3].t())
