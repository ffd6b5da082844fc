"""Files that are whole or old, open without pickle, and say what is wrong with a foreign one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ds2.audio.features import Features
from ds2.config.schema import Config, ConfigError, FeaturesConfig, OptimConfig
from ds2.model.acoustic import AcousticModel
from ds2.system.tensor_file import CheckpointError, load, make_header, save
from ds2.training.optim import make_optimizer
from ds2.training.state import Progress, TrainState, read_state, save_state
from ds2.training.trainer import Trainer

MakeConfig = Callable[..., Config]


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
    save_state(tmp_path, state, Config(optim=config, run_dir="x"))
    resumed = nn.Linear(3, 2)
    resumed_optimizer = make_optimizer(resumed, config)
    again = TrainState(cast(AcousticModel, resumed), features, resumed_optimizer)
    parts, progress = read_state(tmp_path, Config(optim=config, run_dir="y"), again)
    again.take(parts, progress, average_decay=0.0)
    steps(model, optimizer, 2)
    steps(resumed, resumed_optimizer, 2)
    assert again.progress == Progress(step=3)
    assert torch.equal(model.weight, resumed.weight) and torch.equal(model.bias, resumed.bias)


@pytest.mark.parametrize(
    "lost", ["optimizer.3.exp_avg", "optimizer.", "average.", "model.classifier.bias", "features."]
)
@pytest.mark.parametrize("form", [1, 2])
def test_a_state_without_some_of_its_tensors_does_not_resume(
    tiny_config: MakeConfig, tmp_path: Path, lost: str, form: int
) -> None:
    config = tiny_config("train.average_decay=0.9", "train.max_steps=1")
    trainer = Trainer(config, tmp_path)
    trainer.step(trainer.epoch(trainer.plan()), trainer.plan()[:1])
    trainer.files.save()
    path = tmp_path / "trainer.safetensors"
    tensors, metadata = load(path)
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(lost)}
    metadata["format"] = form
    save_file(kept, path, make_header(metadata, kept) if form == 2 else {"ds2": json.dumps(metadata)})
    with pytest.raises(CheckpointError, match=rf"trainer\.safetensors: {lost}.*: is missing, expected"):
        Trainer(config, tmp_path)


def test_a_state_with_damaged_metadata_does_not_resume(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config("train.max_steps=1")
    trainer = Trainer(config, tmp_path)
    trainer.files.save()
    path = tmp_path / "trainer.safetensors"
    tensors, metadata = load(path)
    progress = metadata["progress"]
    for change, says in (
        ({"progress": None}, "metadata.progress: is None"),
        ({"progress": progress | {"step": "3"}}, "metadata.progress.step: is '3', expected a whole number"),
        ({"progress": progress | {"epoch": 0}}, "metadata.progress: counts from before the start"),
        ({"progress": progress | {"stpe": 0}}, "metadata.progress.stpe: no such field"),
        ({"config": []}, r"metadata.config: is \[\]"),
        ({"config": metadata["config"] | {"optim": 1}}, "metadata.config.optim: is 1"),
        ({"kind": "model"}, "is a model, not a trainer state"),
    ):
        save(path, tensors, metadata | change)
        with pytest.raises(CheckpointError, match=rf"trainer\.safetensors.*{says}"):
            Trainer(config, tmp_path)
    save(path, tensors, metadata)
    with pytest.raises(ConfigError, match=r"other optim\.name"):
        Trainer(tiny_config("optim=sgd"), tmp_path)


def test_dropout_may_change_as_a_run_goes_on_and_widths_may_not(tiny_config: MakeConfig, tmp_path: Path) -> None:
    trainer = Trainer(tiny_config("model.dropout=0.1"), tmp_path)
    save_state(tmp_path, trainer.state, trainer.config)
    other = tiny_config("model.dropout=0.4", "model.stochastic_depth=0.1")
    goes_on = Trainer(other, tmp_path)
    parts, _ = read_state(tmp_path, other, goes_on.state)
    assert {*parts["model"]} == {*trainer.model.state_dict()}
    narrower = tiny_config("model.hidden=8")
    with pytest.raises(ConfigError, match=r"trained with other model\.hidden"):
        read_state(tmp_path, narrower, goes_on.state)
