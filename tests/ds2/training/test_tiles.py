"""Calibrated tiles of a run: measured once by rank 0, the same on all ranks, kept by its state."""

from collections.abc import Iterable

import pytest
import torch
from ds2_ops.recurrent.plan.problem import DoesNotFit, Problem

from ds2.config.schema import Config
from ds2.training import tiles
from ds2.training.state import Progress


class Rank:
    """One rank of two that share what rank 0 says."""

    said: object = None

    def __init__(self, rank: int) -> None:
        self.rank, self.world, self.device = rank, 2, torch.device("cuda", 0)

    def broadcast(self, value: object) -> object:
        if self.rank == 0:
            Rank.said = value
        return Rank.said


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    seen: list[Problem] = []
    adopted: list[object] = []

    def calibrate(problems: Iterable[tuple[Problem, int | None]], index: int, most: int) -> dict[str, str]:
        ((problem, _),) = problems
        if problem.batch == 1:
            raise DoesNotFit("too small")
        seen.append(problem)
        return {f"{problem.batch} {problem.backward}": f"fastest of {most}"}

    monkeypatch.delenv("DS2_OPS_CALIBRATE", raising=False)
    monkeypatch.setattr(tiles, "calibrate", calibrate)
    monkeypatch.setattr(tiles, "adopt", adopted.append)
    return seen


PLAN = [[0, 1, 2, 3]] * 5 + [[4, 5]] * 2 + [[6, 7, 8]]


def settle(rank: int, progress: Progress, most: int) -> dict[str, str]:
    config = Config(run_dir="x")
    config.train.calibrate = most
    tiles.settle_tiles(progress, config, "bf16", Rank(rank), PLAN)
    return progress.tiles


def test_rank_0_measures_and_all_use_the_same(measured: list[Problem]) -> None:
    first = settle(0, Progress(), 5)
    assert first == {"2 False": "fastest of 5", "2 True": "fastest of 5"}  # a rank's part of batches of 4 and of 3
    assert [problem.batch for problem in measured] == [2, 2]
    assert settle(1, Progress(), 5) == first
    assert len(measured) == 2


def test_nothing_is_measured_unless_asked_for(measured: list[Problem]) -> None:
    assert settle(0, Progress(), 0) == {}
    assert not measured


def test_a_resumed_run_keeps_its_tiles(measured: list[Problem]) -> None:
    kept = {"2 False": "of before"}
    assert settle(0, Progress(step=7, tiles=kept), 5) == kept
    assert settle(0, Progress(step=7), 5) == {}  # began without: its first steps cannot be had again
    assert not measured


def test_only_layers_that_persistent_kernels_run_are_measured() -> None:
    config = Config(run_dir="x")
    found = tiles.recurrent_problems(config, "bf16", [4])
    assert [(p.batch, p.hidden, p.dtype, p.backward) for p in found] == [
        (4, 1152, "bfloat16", False),
        (4, 1152, "bfloat16", True),
    ]
    config.model.cell = "gru"
    assert {p.nonlinearity for p in tiles.recurrent_problems(config, "bf16", [4])} == {"gru_after"}
    assert tiles.recurrent_problems(config, "fp32", [4]) == []  # products of float32 stay float32's unless asked for
    config.model.backend = "persistent"
    assert len(tiles.recurrent_problems(config, "fp32", [4])) == 2
    config.model.backend = "gemm"
    assert tiles.recurrent_problems(config, "bf16", [4]) == []
