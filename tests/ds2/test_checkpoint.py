"""Files that are whole or old, open without pickle, and say what is wrong with a foreign one."""

import errno
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import nn

from ds2.audio.features import Features
from ds2.config.schema import Config, FeaturesConfig, OptimConfig
from ds2.model.acoustic import AcousticModel
from ds2.system import tensor_file
from ds2.system.tensor_file import CheckpointError, load, save
from ds2.training.optim import make_optimizer
from ds2.training.state import Progress, TrainState, read_state, save_state


def test_tensors_and_metadata_come_back(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(3, 2), "n": torch.tensor(7), "view": torch.arange(6.0).view(2, 3).t()}
    save(tmp_path / "a.safetensors", tensors, {"kind": "model", "text": "é"})
    loaded, metadata = load(tmp_path / "a.safetensors")
    assert metadata["text"] == "é" and set(loaded) == set(tensors)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_a_full_disk_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    save(path, {"w": torch.ones(2)}, {})

    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tensor_file, "save_file", fails)
    with pytest.raises(CheckpointError, match=r"No space left.*previous file is untouched"):
        save(path, {"w": torch.zeros(2)}, {})
    assert torch.equal(load(path)[0]["w"], torch.ones(2))
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize(
    ("content", "says"), [(b"", "not a whole"), (b"\x80\x04pickle", "not a whole"), (b"\0" * 64, "not")]
)
def test_a_foreign_file_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=says):
        load(path)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save(path, {"w": torch.ones(1000)}, {})
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        load(path)


def test_another_programs_safetensors_file_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"w": torch.ones(1)}, tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match="not written by ds2"):
        load(tmp_path / "b.safetensors")


def test_a_newer_format_asks_for_a_newer_ds2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "FORMAT_VERSION", 99)
    save(tmp_path / "a.safetensors", {"w": torch.ones(1)}, {})
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="install a newer ds2"):
        load(tmp_path / "a.safetensors")


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
