"""`batching.auto`: the search for the largest budget, and what a run does with it; memory is made up."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.run_log import events

from ds2.config.schema import BatchingConfig, Config, ConfigError
from ds2.distributed.communicator import Communicator
from ds2.training import budget, trainer
from ds2.training.budget import largest_budget, settle_batching, worst_parts
from ds2.training.loop import train
from ds2.training.state import Progress
from ds2.training.trainer import Trainer

MakeConfig = Callable[..., Config]
DURATIONS_S = np.random.default_rng(0).uniform(2.0, 16.0, 3000)
AUTO = BatchingConfig(utterances=0, auto=True)


def need(part: list[int], base: float, an_s: float, an_utterance: float, power: float = 1.0) -> float:
    padded_s = float(DURATIONS_S[part[0]]) * len(part)
    return base + an_s * padded_s**power + an_utterance * len(part)


@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize(
    "memory", [(1e9, 5e7, 0.0), (0.0, 1e6, 2e8), (2e9, 3e7, 1e8, 1.15), (1e9, 3e8, 0.0, 0.9)], ids=str
)
def test_the_budget_fits_and_one_a_little_larger_does_not(memory: tuple[float, ...], world: int) -> None:
    room, trials = 70e9, []

    def measure(part: list[int]) -> float | None:
        trials.append(part)
        size = need(part, *memory)
        return size if size < 1.05 * room else None  # past the memory itself nothing is known

    found_s = largest_budget(DURATIONS_S, AUTO, 1, world, measure, room)
    worst = [need(p, *memory) for p in worst_parts(DURATIONS_S, BatchingConfig(0, found_s), 1, world)]
    larger = [need(p, *memory) for p in worst_parts(DURATIONS_S, BatchingConfig(0, 1.15 * found_s), 1, world)]
    assert max(worst) <= room < max(larger)
    assert len(trials) <= 16 and found_s == float(f"{found_s:.3g}")


class Clock:
    """Stands in for the module `time`: passes over made-up audio move it."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.mark.parametrize("shape_s", [0.0, 4.0])  # that what is new takes: kernels to compile
@pytest.mark.parametrize("rate", [50.0, 1000.0, 1e5])  # audio seconds a second
def test_the_search_ends_within_a_minute(
    shape_s: float, rate: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, room, longest = Clock(), 70e9, float(DURATIONS_S.max())
    monkeypatch.setattr(budget, "time", clock)

    def measure(part: list[int]) -> float:
        clock.now_s += shape_s + float(DURATIONS_S[part[0]]) * len(part) / rate
        return need(part, 1e9, 5e6, 0.0)

    found_s = largest_budget(DURATIONS_S, AUTO, 1, 1, measure, room)
    assert clock.now_s - 100.0 < 60
    assert found_s > 10 * longest
    assert ("ended after" in caplog.text) == (found_s < 0.9 * (room - 1e9) / 5e6)


def test_a_corpus_that_fits_as_a_whole_is_one_batch() -> None:
    found_s = largest_budget(DURATIONS_S, AUTO, 1, 1, lambda part: 1e5 * len(part), 1e12)
    assert len(worst_parts(DURATIONS_S, BatchingConfig(0, found_s), 1, 1)[0]) > 0.99 * len(DURATIONS_S)


def test_what_is_not_to_be_passed_is_not_tried() -> None:
    def measure(part: list[int]) -> float:
        assert DURATIONS_S[part].sum() <= 500
        return 1.0

    assert largest_budget(DURATIONS_S, AUTO, 1, 1, measure, 1e9, 500.0) == 500.0


@pytest.mark.parametrize("size", [2e9, None])
def test_an_utterance_that_does_not_fit_is_said(size: float | None) -> None:
    with pytest.raises(ConfigError, match=r"not even one utterance of 16\.0 s.*max_duration_s"):
        largest_budget(DURATIONS_S, AUTO, 1, 1, lambda part: size, 1e9)


def test_worst_parts_hold_the_most_audio_and_the_most_utterances() -> None:
    durations_s = np.array([19.0] * 4 + [1.0] * 18)
    padded, most = worst_parts(durations_s, BatchingConfig(utterances=0, audio_s=19.5), 1, 1)
    assert len(most) == 18 and durations_s[most].max() == 1.0 and durations_s[padded].tolist() == [19.0]


def test_ranks_take_the_least_and_a_resumed_run_what_it_had(caplog: pytest.LogCaptureFixture) -> None:
    class Two(Communicator):
        world = 2

        def allgather(self, value: Any) -> list[Any]:
            return [value, 0.5 * value]

    config, progress = Config(run_dir="", batching=AUTO), Progress()
    with caplog.at_level(logging.WARNING):
        mine = largest_budget(DURATIONS_S, AUTO, 1, 2, lambda part: need(part, 0, 1e6, 0), 1e9)
        settled = settle_batching(
            config,
            progress,
            Two(torch.device("cpu")),
            DURATIONS_S,
            lambda: (lambda part: need(part, 0, 1e6, 0), 1e9, 1e9),
        )
    assert settled.audio_s == progress.budget_s == 0.5 * mine and settled.utterances == 0
    assert "an epoch of" in caplog.text and "batching=fixed" in caplog.text
    again = settle_batching(config, progress, Two(torch.device("cpu")), DURATIONS_S, pytest.fail)  # type: ignore[arg-type]
    assert again == settled


def test_a_cpu_is_refused_before_data_is_read(tiny_config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"batching=auto fills a GPU's memory.*batching\.audio_s"):
        train(tiny_config("batching=auto", "data.train=[none.jsonl]"), tmp_path / "run")


def test_a_run_plans_with_what_was_found_and_resumes_exactly(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "check_device", lambda *_: None)
    asked = []

    def trial(self: Trainer) -> Any:
        asked.append(self)
        return (lambda part: float(self.durations_s[part[0]] * len(part))), 3.1, 1e9  # room for 3.1 s

    monkeypatch.setattr(Trainer, "_trial", trial)
    auto = ("batching=auto", "train.epochs=2")

    def steps(name: str) -> list[tuple[int, float]]:
        return [(event["step"], event["loss"]) for event in events(tmp_path / name, "train")]

    assert train(tiny_config(*auto), tmp_path / "whole") == 0
    assert train(tiny_config(*auto, "train.max_steps=2"), tmp_path / "broken") == 0
    assert train(tiny_config(*auto), tmp_path / "broken") == 0
    assert len(asked) == 2 and steps("broken") == steps("whole")
    found = Trainer(tiny_config(*auto), tmp_path / "whole")
    assert 2.5 < found.batching.audio_s <= 3.1 and found.batching.utterances == 0
    assert train(tiny_config("batching.utterances=0", f"batching.audio_s={found.batching.audio_s}", "train.epochs=2"),
                 tmp_path / "by-hand") == 0  # fmt: skip
    assert steps("by-hand") == steps("whole")
