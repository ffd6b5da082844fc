"""Model files: safetensors with a JSON header, written whole, opened without pickled code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds2.audio.features import Features
from ds2.config.convert import config_from_dict, config_to_dict
from ds2.config.schema import Config
from ds2.model.acoustic import AcousticModel
from ds2.system.tensor_file import CheckpointError, load, save
from ds2.text.alphabet import Alphabet


def _prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": value for name, value in tensors.items()}


def _with_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name[len(prefix) + 1 :]: value for name, value in tensors.items() if name.startswith(prefix + ".")}


@dataclass
class LoadedModel:
    """Everything recognition needs, in evaluation mode."""

    model: AcousticModel
    features: Features
    alphabet: Alphabet
    config: Config
    metadata: dict[str, Any]

    @property
    def frame_s(self) -> float:
        """Seconds from one output frame to the next."""
        return self.features.step_s * self.model.time_stride


def save_model(
    path: Path, model: AcousticModel, features: Features, alphabet: Alphabet, config: Config, metrics: Mapping[str, Any]
) -> None:
    """Write one self-contained model file: weights, feature statistics, alphabet, resolved config and metrics."""
    tensors = _prefixed("model", model.state_dict()) | _prefixed("features", features.state_dict())
    metadata = {
        "kind": "model",
        "config": config_to_dict(config),
        "alphabet": alphabet.to_dict(),
        "metrics": dict(metrics),
    }
    save(path, tensors, metadata)


def find_model(path: Path) -> Path:
    """The model file that `path` means: the file itself, or the best (else the last) one of a run folder."""
    if not path.is_dir():
        return path
    for name in ("best.safetensors", "last.safetensors"):
        if (path / name).is_file():
            return path / name
    raise CheckpointError(f"{path} holds no best.safetensors or last.safetensors: give a model file or a run folder")


def load_model(path: Path | str, device: torch.device | str = "cpu") -> LoadedModel:
    """Open a model file, or the best one of a run folder.

    Raises:
        CheckpointError: no such file, not a ds2 model, or weights that do not fit its own config.
    """
    file = find_model(Path(path))
    tensors, metadata = load(file)
    if metadata.get("kind") != "model":
        kind = metadata.get("kind")
        raise CheckpointError(f"{file} is a {kind}, not a model: give best.safetensors or last.safetensors")
    config = config_from_dict(metadata["config"])
    alphabet = Alphabet.from_dict(metadata["alphabet"])
    features = Features(config.features, config.data.sample_rate_hz)
    model = AcousticModel(config.model, features.bins, len(alphabet), config.features.step_s)
    try:
        model.load_state_dict(_with_prefix("model", tensors))
        features.load_state_dict(_with_prefix("features", tensors))
    except RuntimeError as error:
        raise CheckpointError(f"{file}: its weights do not fit its own config: {error}") from error
    return LoadedModel(model.to(device).eval(), features.to(device).eval(), alphabet, config, metadata)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state (momenta, step counts) by parameter number; hyper-parameters come from the config."""
    state = optimizer.state_dict()["state"]
    return {
        f"{index}.{name}": value for index, entry in state.items() for name, value in entry.items() if value is not None
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of `optimizer_tensors`, onto an optimizer made from the same model and config."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def save_trainer(
    path: Path, parts: Mapping[str, Mapping[str, Tensor]], progress: Mapping[str, Any], config: Config
) -> None:
    """Write what training needs to go on: tensors by part (model, average, optimizer, features) and its counters."""
    tensors = {name: value for part, values in parts.items() for name, value in _prefixed(part, values).items()}
    save(path, tensors, {"kind": "trainer", "progress": dict(progress), "config": config_to_dict(config)})


def load_trainer(path: Path, parts: Iterable[str]) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Read a trainer state: tensors by part, and the metadata (`progress`, `config`).

    Raises:
        CheckpointError: as `load`, or a file that is not a trainer state.
    """
    tensors, metadata = load(path)
    if metadata.get("kind") != "trainer":
        raise CheckpointError(f"{path} is a {metadata.get('kind')}, not a trainer state")
    return {part: _with_prefix(part, tensors) for part in parts}, metadata
