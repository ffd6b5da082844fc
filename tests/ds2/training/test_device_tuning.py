"""What a run measures before its first step: the budget of `batching.auto`, its memory, tiles of recurrent kernels."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from ds2_ops.recurrent.plan.problem import DoesNotFit, Problem
from support.run_log import events, losses

from ds2.config.schema import BatchingConfig, Config, ConfigError
from ds2.data.manifest import Utterance
from ds2.distributed.communicator import Communicator
from ds2.system.plain import from_plain
from ds2.training import device_tuning, trainer
from ds2.training.device_tuning import choose_batching, largest_budget, worst_parts
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
    monkeypatch.setattr(device_tuning, "time", clock)

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
def test_an_utterance_that_does_not_fit_is_named(size: float | None) -> None:
    with pytest.raises(ConfigError, match=r"not even one utterance of 16\.0 s.*max_duration_s"):
        largest_budget(DURATIONS_S, AUTO, 1, 1, lambda part: size, 1e9)


def test_worst_parts_hold_the_most_audio_and_the_most_utterances() -> None:
    durations_s = np.array([19.0] * 4 + [1.0] * 18)
    padded, most = worst_parts(durations_s, BatchingConfig(utterances=0, audio_s=19.5), 1, 1)
    assert len(most) == 18 and durations_s[most].max() == 1.0 and durations_s[padded].tolist() == [19.0]


def test_ranks_take_the_least_and_a_resumed_run_what_it_had(caplog: pytest.LogCaptureFixture) -> None:
    class Probe:
        available_bytes = max_s = 1e9

        def __call__(self, part: list[int]) -> float:
            return need(part, 0, 1e6, 0)

    class Two(Communicator):
        world = 2

        def allgather(self, value: Any) -> list[Any]:
            return [value, 0.5 * value]

    config, progress = Config(run_dir="", batching=AUTO), Progress()
    with caplog.at_level(logging.WARNING):
        mine = largest_budget(DURATIONS_S, AUTO, 1, 2, lambda part: need(part, 0, 1e6, 0), 1e9)
        batching = choose_batching(
            config,
            progress,
            Two(torch.device("cpu")),
            DURATIONS_S,
            cast(Any, Probe),
        )
    assert batching.audio_s == progress.budget_s == 0.5 * mine and batching.utterances == 0
    assert "an epoch of" in caplog.text and "batching=fixed" in caplog.text
    again = choose_batching(config, progress, Two(torch.device("cpu")), DURATIONS_S, pytest.fail)  # type: ignore[arg-type]
    assert again == batching


def test_a_cpu_is_refused_before_data_is_read(tiny_config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"batching=auto fills a GPU's memory.*batching\.audio_s"):
        train(tiny_config("batching=auto", "data.train=[none.jsonl]"), tmp_path / "run")


def test_a_run_plans_with_what_was_found_and_resumes_exactly(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "check_batching", lambda *_: None)
    probes = []

    class Probe:
        available_bytes, max_s = 3.1, 1e9  # a byte a second of audio

        def __init__(self, _: Config, utterances: Sequence[Utterance], *__: Any, **___: Any) -> None:
            probes.append(self)
            self.durations_s = [u.duration_s for u in utterances]

        def __call__(self, part: list[int]) -> float:
            return self.durations_s[part[0]] * len(part)

    monkeypatch.setattr(trainer, "MemoryProbe", Probe)
    auto = ("batching=auto", "train.epochs=2")

    def steps(name: str) -> list[tuple[int, float]]:
        return [(event["step"], event["loss"]) for event in events(tmp_path / name, "train")]

    assert train(tiny_config(*auto), tmp_path / "whole") == 0
    assert train(tiny_config(*auto, "train.max_steps=2"), tmp_path / "broken") == 0
    assert train(tiny_config(*auto), tmp_path / "broken") == 0
    assert len(probes) == 2 and steps("broken") == steps("whole")
    found = Trainer(tiny_config(*auto), tmp_path / "whole")
    assert 2.5 < found.batching.audio_s <= 3.1 and found.batching.utterances == 0
    assert train(tiny_config("batching.utterances=0", f"batching.audio_s={found.batching.audio_s}", "train.epochs=2"),
                 tmp_path / "by-hand") == 0  # fmt: skip
    assert steps("by-hand") == steps("whole")


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
    monkeypatch.setattr(device_tuning, "calibrate", calibrate)
    monkeypatch.setattr(device_tuning, "adopt", adopted.append)
    return seen


PLAN = [[0, 1, 2, 3]] * 5 + [[4, 5]] * 2 + [[6, 7, 8]]


def choose(rank: int, progress: Progress, most: int) -> dict[str, str]:
    config = Config(run_dir="x")
    config.train.calibrate = most
    device_tuning.choose_tiles(progress, config, "bf16", Rank(rank), PLAN)
    return progress.tiles


def test_rank_0_measures_and_all_use_the_same(measured: list[Problem]) -> None:
    first = choose(0, Progress(), 5)
    assert first == {"2 False": "fastest of 5", "2 True": "fastest of 5"}  # a rank's part of batches of 4 and of 3
    assert [problem.batch for problem in measured] == [2, 2]
    assert choose(1, Progress(), 5) == first
    assert len(measured) == 2


def test_a_driver_that_refuses_the_kernels_stops_no_run(
    measured: list[Problem], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> dict[str, str]:
        raise RuntimeError("the driver cannot load a kernel built for sm_86: CUDA_ERROR_UNSUPPORTED_PTX_VERSION")

    monkeypatch.setattr(device_tuning, "calibrate", refuse)
    assert choose(0, Progress(), 5) == choose(1, Progress(), 5) == {}
    assert "no tile of the recurrent kernels was timed: the driver cannot load a kernel built for sm_86" in caplog.text
    assert caplog.text.count("was timed") == 1


def test_nothing_is_measured_unless_asked_for(measured: list[Problem]) -> None:
    assert choose(0, Progress(), 0) == {}
    assert not measured


def test_a_resumed_run_keeps_its_tiles(measured: list[Problem]) -> None:
    kept = {"2 False": "of before"}
    assert choose(0, Progress(step=7, tiles=kept), 5) == kept
    assert choose(0, Progress(step=7), 5) == {}  # began without: its first steps cannot be had again
    assert not measured


def test_rank_0_fits_the_constants_and_a_resumed_run_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, adopted = [], []
    first = {"NVIDIA A100-SXM4-80GB": {"portable": {"exchange": 1.5, "reads": 1.25, "products": 1.0}}}

    def measured_factors(index: int) -> dict[str, dict[str, dict[str, float]]]:
        measured.append(index)
        return first

    monkeypatch.setattr(device_tuning, "measured_factors", measured_factors)
    monkeypatch.setattr(device_tuning, "adopt_factors", adopted.append)
    of_before = {"NVIDIA A100-SXM4-80GB": {"portable": {"exchange": 2.0, "reads": 2.0, "products": 2.0}}}
    of_ranks = []
    for rank, progress in (
        *((0, Progress()), (1, Progress())),
        *((0, Progress(step=7, factors=of_before)), (1, Progress())),
        *((0, Progress(step=7)), (1, Progress())),  # began without: its first steps cannot be had again
    ):
        device_tuning.choose_factors(progress, Rank(rank))
        of_ranks.append(progress.factors)
    assert of_ranks == adopted == [first, first, of_before, of_before, {}, {}]
    assert measured == [0]
    stored = from_plain(Progress, json.loads(json.dumps(asdict(Progress(factors=first)))), "progress")
    assert stored == Progress(factors=first)


def test_only_layers_that_persistent_kernels_run_are_measured() -> None:
    config = Config(run_dir="x")
    found = device_tuning.recurrent_problems(config, "bf16", [4])
    assert [(p.batch, p.hidden, p.dtype, p.backward) for p in found] == [
        (4, 1152, "bfloat16", False),
        (4, 1152, "bfloat16", True),
    ]
    config.model.cell = "gru"
    assert {p.nonlinearity for p in device_tuning.recurrent_problems(config, "bf16", [4])} == {"gru_after"}
    config.model.cell = "gru_before"
    assert {p.nonlinearity for p in device_tuning.recurrent_problems(config, "bf16", [4])} == {"gru_before"}
    assert device_tuning.recurrent_problems(config, "fp32", [4]) == []  # unless TF32 is allowed
    config.model.backend = "persistent"
    assert len(device_tuning.recurrent_problems(config, "fp32", [4])) == 2
    config.model.backend = "gemm"
    assert device_tuning.recurrent_problems(config, "bf16", [4]) == []


@pytest.mark.gpu
@pytest.mark.parametrize(
    "overrides",
    [("model.backend=auto",), ("model.cell=lstm", "optim=adamw"), ("train.graphs=off", "train.precision=fp32")],
    ids=["graphs", "lstm", "fp32"],
)
def test_training_needs_what_the_trial_measured(
    tiny_config: MakeConfig, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    config = tiny_config("device=cuda", "model.hidden=256", "batching.utterances=10", *overrides)
    trainer = Trainer(config, tmp_path / "run")
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    drawn = torch.get_rng_state(), torch.cuda.get_rng_state()
    probe = trainer.memory_probe()
    available_bytes, max_s = probe.available_bytes, probe.max_s
    plan = trainer.plan()
    measured = max(probe(batch) or 0.0 for batch in plan)
    del probe
    assert max_s > 100 and measured < available_bytes <= torch.cuda.get_device_properties(0).total_memory
    assert all(torch.equal(value, weights[name]) for name, value in trainer.model.state_dict().items())
    assert torch.equal(drawn[0], torch.get_rng_state()) and torch.equal(drawn[1], torch.cuda.get_rng_state())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    batches = trainer.epoch(plan)
    trainer.model.train()
    for batch in plan:
        trainer.step(batches, [batch])
    peak = torch.cuda.max_memory_allocated()
    assert peak <= 1.1 * measured + (64 << 20)  # a tiny model: workspaces of libraries are what differs
    assert measured <= 1.5 * peak + (64 << 20)


@pytest.mark.gpu
def test_a_run_finds_its_budget_and_keeps_it(tiny_config: MakeConfig, tmp_path: Path) -> None:
    auto = ("device=cuda", "batching=auto", "train.epochs=2")
    assert train(tiny_config(*auto, "train.max_steps=1"), tmp_path / "broken") == 0
    assert train(tiny_config(*auto), tmp_path / "broken") == 0
    assert train(tiny_config(*auto), tmp_path / "whole") == 0
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")
