"""Model files: safetensors with a JSON header, written whole, opened without pickled code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ds2.audio.features import Features
from ds2.config.convert import config_from_dict, config_to_dict
from ds2.config.schema import Config
from ds2.model.acoustic import AcousticModel
from ds2.system.tensor_file import CheckpointError, load, part, prefixed, save
from ds2.text.alphabet import Alphabet


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

    @property
    def trained_precision(self) -> str:
        """fp32 or bf16; `auto` in files of runs that did not note what it came to."""
        return str(self.metadata["metrics"].get("precision", self.config.train.precision))


def save_model(
    path: Path, model: AcousticModel, features: Features, alphabet: Alphabet, config: Config, metrics: Mapping[str, Any]
) -> None:
    """Write one self-contained model file: weights, feature statistics, alphabet, resolved config and metrics."""
    tensors = prefixed("model", model.state_dict()) | prefixed("features", features.state_dict())
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
        model.load_state_dict(part("model", tensors))
        features.load_state_dict(part("features", tensors))
    except RuntimeError as error:
        raise CheckpointError(f"{file}: its weights do not fit its own config: {error}") from error
    return LoadedModel(model.to(device).eval(), features.to(device).eval(), alphabet, config, metadata)
