"""Batches of one epoch after the other come from one run of the workers; who leaves early gets the right ones too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any, cast

from ds2.training.inputs import EpochBatches

PLAN = {1: [[0], [1, 2], [3]], 2: [[2], [0, 3], [1]], 3: [[3, 1], [0], [2]]}


class Loader:
    """Gives what it was asked for, and counts the askings."""

    def __init__(self) -> None:
        self.runs = 0

    def epochs(self, plans: Iterable[tuple[int, list[list[int]]]]) -> Iterator[Any]:
        self.runs += 1
        return ((epoch, tuple(part)) for epoch, batches in plans for part in batches)


def coming(loader: Loader, rank: int = 0, world: int = 1) -> EpochBatches:
    return EpochBatches(cast(Any, loader), PLAN.__getitem__, 3, cast(Any, SimpleNamespace(rank=rank, world=world)))


def test_epochs_that_follow_each_other_are_one_run() -> None:
    loader = Loader()
    batches = coming(loader)
    for epoch in (1, 2, 3):
        assert list(batches.remaining(epoch, 0, 3)) == [(epoch, tuple(part)) for part in PLAN[epoch]]
    assert loader.runs == 1


def test_a_place_amid_an_epoch_and_one_left_early() -> None:
    loader = Loader()
    batches = coming(loader, rank=1, world=2)
    assert list(batches.remaining(1, 1, 2)) == [(1, (2,)), (1, (3,))]  # of one utterance both ranks have it
    remaining = batches.remaining(2, 0, 3)
    assert next(remaining) == (2, (2,)) and loader.runs == 1
    assert list(batches.remaining(2, 0, 3)) == [(2, (2,)), (2, (3,)), (2, (1,))] and loader.runs == 2
    assert list(batches.remaining(2, 2, 1)) == [(2, (1,))] and loader.runs == 3
