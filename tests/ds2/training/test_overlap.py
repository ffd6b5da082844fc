"""Sums go the way that steps were faster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds2.training.overlap import OverlapTrial


def gradients(device: str = "cuda", *, overlaps: bool = True, can_copy: bool = False) -> Any:
    comm = SimpleNamespace(device=torch.device(device), rank=0)
    return SimpleNamespace(comm=comm, overlaps=overlaps, overlap=overlaps, copied=False, can_copy=can_copy)


def run(trial: OverlapTrial, given: Any, *, beside_s: float, behind_s: float, copied_s: float = 2.0, steps: int) -> int:
    """Take steps of growing length that are as fast as said, each told of a step later; returns how many were taken."""
    former_s = 0.0
    for step in range(steps):
        audio_s = 10.0 + step
        trial.begin()
        slow = step % 7 == 0  # a recording
        a_second = copied_s if given.copied else beside_s if given.overlap else behind_s
        took_s = a_second * audio_s + 5 * slow
        trial.end(audio_s, usual=not slow, former_s=former_s)
        former_s = took_s
        if trial.over:
            return step + 1
    return steps


@pytest.mark.parametrize(("beside_s", "behind_s"), [(0.9, 1.0), (1.0, 0.9)])
def test_the_faster_way_is_taken_whatever_the_lengths_of_steps(beside_s: float, behind_s: float) -> None:
    given = gradients()
    trial = OverlapTrial(given)
    taken = run(trial, given, beside_s=beside_s, behind_s=behind_s, steps=1000)
    assert 24 < taken < 40 and given.overlap == (beside_s < behind_s)
    before = given.overlap
    trial.begin()
    trial.end(1.0, usual=True, former_s=100.0)
    assert given.overlap == before


@pytest.mark.parametrize("times_s", [(0.9, 1.0, 1.1), (1.1, 0.9, 1.0), (1.1, 1.0, 0.9), (0.9, 1.1, 1.0)])
def test_copies_are_tried_where_there_are_such_and_taken_where_they_win(times_s: tuple[float, float, float]) -> None:
    beside_s, behind_s, copied_s = times_s
    given = gradients(can_copy=True)
    trial = OverlapTrial(given)
    taken = run(trial, given, beside_s=beside_s, behind_s=behind_s, copied_s=copied_s, steps=1000)
    assert 36 < taken < 60
    fastest = min(times_s)
    assert (given.overlap, given.copied) == (fastest != behind_s, fastest == copied_s)


def test_steps_that_never_count_leave_sums_behind_the_pass() -> None:
    given = gradients()
    trial = OverlapTrial(given)
    for _ in range(1000):
        assert not trial.over
        trial.begin()
        trial.end(1.0, usual=False, former_s=1.0)
    assert trial.over and not given.overlap


@pytest.mark.parametrize(("device", "overlaps"), [("cpu", True), ("cuda", False)])
def test_nothing_is_tried_where_there_is_nothing_to_choose(device: str, overlaps: bool) -> None:
    given = gradients(device, overlaps=overlaps)
    trial = OverlapTrial(given)
    assert trial.over
    run(trial, given, beside_s=1.0, behind_s=2.0, steps=1)
    assert given.overlap == overlaps
