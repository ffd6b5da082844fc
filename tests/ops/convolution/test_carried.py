"""What streams carry, joined with their next block: the kernels' bits are those of PyTorch's operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from ds2_ops.convolution import carried
from ds2_ops.convolution.carried import ConvInput, block_launch, flattened, joined, windows
from ds2_ops.jit.build import build
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
    """A block as a layer gives it, a table and places; streams begin, are amid and end."""
    batch, bins, frames, held, _, edges = case
    draw = torch.Generator().manual_seed(frames)
    x = torch.randn(bins, batch, frames + 5, channels, generator=draw)[:, :, 2 : 2 + frames].transpose(0, 1)
    x[0, 0, 0, 0] = torch.nan
    places = torch.randperm(batch + 3, generator=draw)[:batch]
    table = torch.randn(batch + 3, bins, held, channels, generator=draw).bfloat16().to(device)
    clock = {
        "blocks": torch.tensor([3, 0, 2, 5]).repeat(33)[:batch].to(device),
        "ends": torch.tensor([2**62, frames - 1, 2 * frames + 1, 0]).repeat(33)[:batch].to(device),
        "delay": 2,
    }
    if channels == 1:
        given = ConvInput(x.contiguous().to(device), torch.bfloat16)
    else:
        given = ConvInput(
            x.bfloat16().to(device), torch.bfloat16, torch.randn(channels, generator=draw).bfloat16().to(device), 1.5
        )
    return (replace(given, **clock) if edges else given), table, places.to(device)


def same(found: Tensor, wanted: Tensor) -> bool:
    return torch.equal(found.nan_to_num(77.0), wanted.nan_to_num(77.0))


def check(case: Case, device: torch.device, plain: Callable[[], None]) -> None:
    needed = case[3] + case[2] - case[4]
    given, table, places = block(case, 32, device)
    features, of_features, _ = block(case, 1, device)
    tables = [table.clone(), of_features.clone()]
    found = [
        joined(given, tables[0], places, needed),
        flattened(given),
        windows(features, tables[1], places, 2, 1 + needed // 2),
    ]
    plain()
    wanted = [
        joined(given, table, places, needed),
        flattened(given),
        windows(features, of_features, places, 2, 1 + needed // 2),
    ]
    for ours, theirs in zip([*found, *tables], [*wanted, table, of_features], strict=True):
        assert ours.shape == theirs.shape and same(ours, theirs)
    assert bool(found[1].isnan().any())


@pytest.mark.parametrize("case", CASES)
def test_the_kernels_on_a_cpu(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_run(monkeypatch, carried)
    with monkeypatch.context() as patched:
        for name in ("why_not", "why_not_features"):
            patched.setattr(carried, name, lambda given: None)
        check(case, torch.device("cpu"), patched.undo)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, (64, 81, 10, 10, 0, False), (130, 161, 20, 9, 0, True)])
def test_the_kernels_on_a_gpu(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    given, _, _ = block(case, 32, CUDA)
    assert carried.why_not(given) is None
    check(case, CUDA, lambda: monkeypatch.setattr(carried, "_why_no_gpu", lambda given: "asked"))


def test_what_is_carried_is_the_end_of_what_was_given() -> None:
    given, table, places = block((3, 5, 10, 4, 0, False), 32, torch.device("cpu"))
    whole = joined(given, table, places, 14)
    assert torch.equal(table[places].nan_to_num(), whole[:, :, 10:].nan_to_num())
    values = given.values()
    assert same(whole[:, :, 4:], values) and same(flattened(given)[3, 1].view(32, 5), values[1, :, 3].t())


@pytest.mark.parametrize("name", ["join", "flatten", "windows"])
def test_they_compile_without_spills(name: str) -> None:
    assert build(block_launch(name, 1).source.text).local_bytes == 0
