"""Schedules by hand-worked values, clipping, parameter groups, weight averaging."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ds2.config.allowed import ALLOWED
from ds2.config.schema import Config, ConfigError, OptimConfig
from ds2.distributed.communicator import Communicator
from ds2.distributed.gradients import GradientReducer
from ds2.model.norm import SequenceBatchNorm
from ds2.training import optim
from ds2.training.loop import completed_part, minutes_left
from ds2.training.optim import (
    OptimizerStep,
    WeightAverage,
    clip_gradients,
    learning_rate,
    make_optimizer,
    set_learning_rate,
    state_shapes,
)
from ds2.training.state import Progress


@pytest.mark.parametrize(
    ("schedule", "step", "epoch", "progress", "expected"),
    [
        ("anneal", 0, 1, 0.0, 0.6),
        ("anneal", 900, 3, 0.1, 0.6 / 1.44),
        ("cosine", 900, 5, 0.5, 0.3),
        ("cosine", 900, 9, 1.0, 0.0),
        ("constant", 900, 9, 0.9, 0.6),
    ],
)
def test_learning_rate(schedule: str, step: int, epoch: int, progress: float, expected: float) -> None:
    config = OptimConfig(schedule=schedule, learning_rate=0.6, anneal=1.2)
    assert learning_rate(config, step, epoch, progress) == pytest.approx(expected)


def test_warm_up_rises_linearly_to_the_schedule() -> None:
    config = OptimConfig(schedule="constant", learning_rate=1.0, warmup_steps=4)
    assert [learning_rate(config, step, 1, 0.0) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_warm_up_ends_early_where_the_training_is_short() -> None:
    config = OptimConfig(schedule="constant", learning_rate=1.0, warmup_steps=500)
    parts = [0.0, 0.1, 0.5, 1.0, 3.0]
    assert [learning_rate(config, step, 1, 0.0, part) for step, part in enumerate(parts)] == [0.002, 0.1, 0.5, 1, 1]


@pytest.mark.parametrize("name", OptimConfig.__dataclass_fields__["name"].metadata[ALLOWED])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_optimizer_has_the_state_that_files_of_it_must_hold(name: str, momentum: float) -> None:
    config, model = OptimConfig(name=name, momentum=momentum), model_with_gradients()
    optimizer = make_optimizer(model, config)
    optimizer.step()
    for parameter in model.parameters():
        state = {key: value.shape for key, value in optimizer.state[parameter].items() if value is not None}
        assert state == state_shapes(config, parameter)


def model_with_gradients() -> nn.Module:
    model = nn.Linear(3, 2)
    for value, parameter in zip((3.0, 4.0), model.parameters(), strict=True):
        parameter.grad = torch.zeros_like(parameter)
        parameter.grad.view(-1)[0] = value
    return model


@pytest.mark.parametrize(("limit", "left"), [(400.0, 5.0), (1.0, 1.0), (0.0, 5.0)])
def test_gradients_are_rescaled_only_above_the_limit(limit: float, left: float) -> None:
    model = model_with_gradients()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    assert norm.item() == pytest.approx(5.0)
    clip_gradients(gradients, norm, limit)
    assert nn.utils.get_total_norm(gradients).item() == pytest.approx(left, rel=1e-4)


@pytest.mark.parametrize("library", ["", "rank 2: the driver is too old"])
def test_a_rank_without_kernels_lets_all_take_their_steps_by_torch(
    library: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1, momentum=0.9, nesterov=True)
    optimizer.step(lambda: optimizer.param_groups[0]["params"][0].sum().backward())
    gradients: Any = SimpleNamespace(buckets=[torch.ones(3)], comm=SimpleNamespace(device=torch.device("cuda")))
    monkeypatch.setattr(optim, "why_not", lambda optimizer: None)
    monkeypatch.setattr(optim, "FusedNorm", lambda buckets: lambda: torch.tensor(5.0))
    with caplog.at_level("INFO"):
        update = OptimizerStep(optimizer, gradients, 1.0, graphed=False, why_no_kernels=library)
    assert update.ignores_nonfinite is (not library)  # which torch's do not
    assert float(update.norm()) == pytest.approx(3**0.5 if library else 5.0)
    assert (f"on torch's kernels: {library}" in caplog.text) is bool(library)


def test_the_norm_has_the_same_bits_with_buckets_of_any_size() -> None:
    norms = []
    for bucket_bytes in (1, 10**9):
        torch.manual_seed(1)
        model, drawn = nn.Sequential(*(nn.Linear(37, 37) for _ in range(9))), []
        reducer = GradientReducer(model.parameters(), Communicator(torch.device("cpu")), bucket_bytes, overlap=True)
        step = OptimizerStep(make_optimizer(model, OptimConfig()), reducer, 1.0, graphed=False)
        for _ in range(8):
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.normal_()
            drawn.append(step.norm())
        norms.append(torch.stack(drawn))
    assert torch.equal(*norms)


def test_nesterov_sgd_follows_the_hand_worked_steps() -> None:
    parameter = nn.Parameter(torch.tensor([[1.0]]))
    model = nn.ParameterList([parameter])
    optimizer = make_optimizer(model, OptimConfig(name="sgd", learning_rate=0.1, momentum=0.9))
    velocity, expected = 0.0, 1.0
    for _ in range(3):
        parameter.grad = parameter.detach().clone()  # of x^2 / 2
        gradient = expected
        velocity = 0.9 * velocity + gradient
        expected -= 0.1 * (gradient + 0.9 * velocity)
        optimizer.step()
    assert parameter.item() == pytest.approx(expected, rel=1e-6)


def test_weight_decay_leaves_vectors_alone() -> None:
    optimizer = make_optimizer(nn.Linear(3, 2), OptimConfig(name="adamw", weight_decay=0.1))
    assert [(g["weight_decay"], [p.ndim for p in g["params"]]) for g in optimizer.param_groups] == [
        (0.1, [2]),
        (0.0, [1]),
    ]


def test_weight_average_follows_weights_and_running_statistics() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    average = WeightAverage(model, 0.5)
    before = average.model[0].weight.clone()
    with torch.no_grad():
        model[0].weight.add_(1.0)
        model[1].running_mean.add_(2.0)
        model[1].num_batches_tracked.add_(3)
    average.update(model)
    decay = min(0.5, 2 / 11)
    torch.testing.assert_close(average.model[0].weight, before + (1 - decay))
    torch.testing.assert_close(average.model[1].running_mean, torch.full((2,), 2 * (1 - decay)))
    assert average.model[1].num_batches_tracked.item() == 3
    assert not math.isclose(decay, 0.5)


def test_a_weight_average_knows_how_many_batches_are_behind_its_running_statistics() -> None:
    model = nn.Sequential(nn.Linear(2, 2), SequenceBatchNorm(2))
    average = WeightAverage(model, 0.5)
    for batches in (3, 4):
        model[1].batches = batches
        average.update(model)
        assert average.model[1].batches == batches


def test_a_timed_cosine_is_at_zero_when_the_minutes_or_the_epochs_are_up(tiny_config: Callable[..., Config]) -> None:
    timed = tiny_config("optim.schedule=timed_cosine", "train.max_minutes=2", "train.epochs=10")
    plain = tiny_config("optim.schedule=cosine", "train.max_minutes=2", "train.epochs=10")
    early, late = (Progress(epoch=6, batch=1, elapsed_s=seconds) for seconds in (30.0, 90.0))
    assert completed_part(plain, early, 2) == completed_part(timed, early, 2) == completed_part(plain, late, 2) == 0.55
    assert completed_part(timed, late, 2) == 0.75
    over = completed_part(timed, Progress(elapsed_s=130.0), 2)
    assert learning_rate(timed.optim, 1000, 1, over) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("limits", "expected"), [([], 9.0), (["train.max_steps=4"], 3.0), (["train.max_minutes=3"], 2.0)]
)
def test_the_minutes_left_are_those_to_the_first_limit(
    tiny_config: Callable[..., Config], limits: list[str], expected: float
) -> None:
    config = tiny_config("train.epochs=5", *limits)
    assert minutes_left(config, Progress(epoch=1, batch=1, step=1, elapsed_s=60.0), 2) == pytest.approx(expected)


def test_a_timed_cosine_without_minutes_is_refused(tiny_config: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError, match=r"timed_cosine .*train\.max_minutes"):
        tiny_config("optim.schedule=timed_cosine")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_each_group_keeps_its_own_rate(device: str) -> None:
    model = nn.ModuleDict({"slow": nn.Linear(2, 2), "fast": nn.Linear(2, 2)}).to(device)
    optimizer = make_optimizer(model, OptimConfig(layer_rates={"slow": 0.5}))
    set_learning_rate(optimizer, 0.25)
    rates = {id(p): float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}
    assert [rates[id(p)] for p in model["slow"].parameters()] == [0.125, 0.125]
    assert [rates[id(p)] for p in model["fast"].parameters()] == [0.25, 0.25]


def test_layer_rates_select_weights_by_start_or_end_of_their_names() -> None:
    layers = nn.ModuleList([nn.RNN(2, 2), nn.RNN(2, 2)])
    model = nn.ModuleDict({"layers": layers, "weight": nn.Linear(2, 2)})
    rates = {"weight_hh_l0": 0.5, "layers.1": 0.25, "weight.bias": 2.0, "bias_hh": 3.0}  # as of cells without gates
    optimizer = make_optimizer(model, OptimConfig(layer_rates=rates))
    factors = {id(p): group["rate_factor"] for group in optimizer.param_groups for p in group["params"]}
    by_name = {name: factors[id(parameter)] for name, parameter in model.named_parameters()}
    assert by_name["layers.0.weight_hh_l0"] == 0.5 and by_name["layers.0.weight_ih_l0"] == 1
    assert by_name["layers.1.weight_ih_l0"] == 0.25
    assert by_name["layers.1.weight_hh_l0"] == 0.5  # the longer name wins
    assert by_name["layers.0.bias_hh_l0"] == 3 and by_name["layers.0.bias_ih_l0"] == 1
    assert by_name["weight.bias"] == 2 and by_name["weight.weight"] == 1
    with pytest.raises(ConfigError, match="no weight's name starts or ends so"):
        make_optimizer(model, OptimConfig(layer_rates={"hh_l0": 0.5}))  # parts count, not letters
