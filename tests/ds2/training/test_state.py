"""Files that are whole or old, open without pickle, and say what is wrong with a foreign one."""

from pathlib import Path
from typing import cast

import pytest
import torch
from torch import nn

from ds2.audio.features import Features
from ds2.config.schema import Config, FeaturesConfig, OptimConfig
from ds2.model.acoustic import AcousticModel
from ds2.training.optim import make_optimizer
from ds2.training.state import Progress, TrainState, read_state, save_state


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_an_optimizer_goes_on_as_if_it_had_not_stopped(tmp_path: Path, name: str) -> None:
    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
        for i in range(count):
            optimizer.zero_grad()
            model(torch.full((2, 3), 0.1 * (i + 1))).square().sum().backward()
            optimizer.step()

    config = OptimConfig(name=name, learning_rate=0.01, weight_decay=0.1)
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    optimizer = make_optimizer(model, config)
    steps(model, optimizer, 3)
    features = Features(FeaturesConfig(), 16000)
    state = TrainState(cast(AcousticModel, model), features, optimizer, Progress(step=3))
    save_state(tmp_path, state, Config(run_dir="x"))
    parts, progress = read_state(tmp_path, Config(run_dir="y"))
    resumed = nn.Linear(3, 2)
    resumed_optimizer = make_optimizer(resumed, config)
    again = TrainState(cast(AcousticModel, resumed), features, resumed_optimizer)
    again.take(parts, progress, average_decay=0.0)
    steps(model, optimizer, 2)
    steps(resumed, resumed_optimizer, 2)
    assert again.progress == Progress(step=3)
    assert torch.equal(model.weight, resumed.weight) and torch.equal(model.bias, resumed.bias)
