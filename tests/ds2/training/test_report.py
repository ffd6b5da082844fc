"""What ranks tell each other of a step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ds2.distributed.communicator import Communicator
from ds2.training.report import StepReport

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Twins(Communicator):
    """Two ranks, the other one of which holds what is given."""

    def __init__(self, device: str, other: list[float]) -> None:
        super().__init__(torch.device(device))
        self.other = other

    def sum_(self, tensor: Tensor) -> None:
        tensor += torch.tensor(self.other, dtype=tensor.dtype, device=tensor.device)


@pytest.mark.parametrize("device", DEVICES)
def test_sums_are_those_of_all_ranks(device: str) -> None:
    losses = [torch.tensor([1.5, 2.0], device=device), torch.tensor([4.0], device=device)]
    norm = torch.tensor(3.0, device=device)
    report = StepReport(Twins(device, [10.0, 0.0, 1.0, 0.25]), losses, norm, [2.0, 0.5])
    numbers = report.read()
    assert (numbers.loss, numbers.norm, numbers.counts, numbers.finite) == (17.5, 3.0, [3.0, 0.75], True)
    assert torch.equal(report.norm, norm)
    idle = StepReport(Communicator(torch.device(device)), [], norm, []).read()
    assert (idle.loss, idle.counts, idle.finite) == (0.0, [], True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("flaw", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["my loss", "my norm", "another's loss", "another's norm"])
def test_what_is_not_finite_on_any_rank_makes_the_update_do_nothing(where: str, flaw: float, device: str) -> None:
    other = {"another's loss": [flaw, 0.0], "another's norm": [1.0, math.nan]}.get(where, [1.0, 0.0])
    loss = torch.tensor([flaw if where == "my loss" else 1.0], device=device)
    norm = torch.tensor(flaw if where == "my norm" else 2.0, device=device)
    report = StepReport(Twins(device, other), [loss], norm, [])
    assert not report.read().finite and not bool(torch.isfinite(report.norm))
