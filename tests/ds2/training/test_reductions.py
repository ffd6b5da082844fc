"""The sums over ranks of a step's numbers, and the choice of when gradients are summed."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ds2.distributed.communicator import Communicator
from ds2.training.reductions import OverlapChoice, StepReport

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


def test_all_ranks_clip_by_the_norm_of_rank_0() -> None:
    """Other kernels, and GPUs of another kind, add up the same squares in another order."""
    comm = Twins("cpu", [1.0, 3.0000002])
    comm.rank = 1
    report = StepReport(comm, [torch.tensor([1.0])], torch.tensor(3.0), [])
    assert report.read().norm == 3.0000002 and torch.equal(report.norm, torch.tensor(3.0000002))


def gradients(device: str = "cuda", *, overlaps: bool = True, can_copy: bool = False) -> Any:
    comm = SimpleNamespace(device=torch.device(device), rank=0)
    return SimpleNamespace(comm=comm, overlaps=overlaps, overlap=overlaps, copied=False, can_copy=can_copy)


def run(
    choice: OverlapChoice, reducer: Any, *, during_s: float, after_s: float, copied_s: float = 2.0, steps: int
) -> int:
    """Take steps of growing length that are as fast as said, reported a step later; returns how many were taken."""
    previous_s = 0.0
    for step in range(steps):
        audio_s = 10.0 + step
        choice.start_step()
        slow = step % 7 == 0  # a recording
        a_second = copied_s if reducer.copied else during_s if reducer.overlap else after_s
        step_s = a_second * audio_s + 5 * slow
        choice.end_step(audio_s, typical=not slow, previous_s=previous_s)
        previous_s = step_s
        if choice.decided:
            return step + 1
    return steps


@pytest.mark.parametrize(("during_s", "after_s"), [(0.9, 1.0), (1.0, 0.9)])
def test_the_faster_way_is_taken_whatever_the_lengths_of_steps(during_s: float, after_s: float) -> None:
    reducer = gradients()
    choice = OverlapChoice(reducer)
    taken = run(choice, reducer, during_s=during_s, after_s=after_s, steps=1000)
    assert 24 < taken < 40 and reducer.overlap == (during_s < after_s)
    before = reducer.overlap
    choice.start_step()
    choice.end_step(1.0, typical=True, previous_s=100.0)
    assert reducer.overlap == before


@pytest.mark.parametrize("times_s", [(0.9, 1.0, 1.1), (1.1, 0.9, 1.0), (1.1, 1.0, 0.9), (0.9, 1.1, 1.0)])
def test_copies_are_tried_where_there_are_such_and_taken_where_they_win(times_s: tuple[float, float, float]) -> None:
    during_s, after_s, copied_s = times_s
    reducer = gradients(can_copy=True)
    choice = OverlapChoice(reducer)
    taken = run(choice, reducer, during_s=during_s, after_s=after_s, copied_s=copied_s, steps=1000)
    assert 36 < taken < 60
    fastest = min(times_s)
    assert (reducer.overlap, reducer.copied) == (fastest != after_s, fastest == copied_s)


def test_steps_that_never_count_leave_sums_behind_the_pass() -> None:
    reducer = gradients()
    choice = OverlapChoice(reducer)
    for _ in range(1000):
        assert not choice.decided
        choice.start_step()
        choice.end_step(1.0, typical=False, previous_s=1.0)
    assert choice.decided and not reducer.overlap


@pytest.mark.parametrize(("device", "overlaps"), [("cpu", True), ("cuda", False)])
def test_nothing_is_tried_where_there_is_nothing_to_choose(device: str, overlaps: bool) -> None:
    reducer = gradients(device, overlaps=overlaps)
    choice = OverlapChoice(reducer)
    assert choice.decided
    run(choice, reducer, during_s=1.0, after_s=2.0, steps=1)
    assert reducer.overlap == overlaps
