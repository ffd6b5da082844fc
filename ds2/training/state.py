"""All of a run that survives a restart, its file, and how all ranks come to hold the same of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds2.audio.features import Features
from ds2.config.convert import config_from_dict, config_to_dict
from ds2.config.schema import Config, ConfigError
from ds2.distributed.communicator import Communicator
from ds2.model.acoustic import AcousticModel
from ds2.system.tensor_file import CheckpointError, load, part, prefixed, save
from ds2.training.averaging import WeightAverage

log = logging.getLogger(__name__)
Parts = dict[str, dict[str, Tensor]]
_PLANNED_BY = ("batching.", "augment.speed", "train.seed", "data.train")  # keys that change the plan of an epoch
PARTS = ("model", "features", "optimizer", "average")
_FIXED = ("model.", "features.", "alphabet.", "train.freeze", "optim.layer_rates")  # the last two order the optimizer


@dataclass
class Progress:
    """How far a run is: everything that changes and is not a tensor."""

    epoch: int = 1  # 1-based, the epoch that is running
    batch: int = 0  # batches of its plan that are behind us
    plan: str = ""  # fingerprint of the plan that `batch` counts in; '' in files of before it was noted
    batches: int = 0  # of that plan
    step: int = 0  # optimizer steps, skipped ones not counted
    skipped: int = 0  # steps skipped for a loss or gradient that was not finite
    infeasible: int = 0  # utterances left out of a loss because no alignment exists (after speed change)
    best_wer: float = float("inf")
    best_cer: float = float("inf")
    best_epoch: int = 0
    elapsed_s: float = 0.0
    audio_s: float = 0.0


@dataclass
class TrainState:
    """What a step changes: a run goes on from it exactly as if it had not stopped."""

    model: AcousticModel
    features: Features
    optimizer: torch.optim.Optimizer
    progress: Progress = field(default_factory=Progress)
    average: WeightAverage[AcousticModel] | None = None

    def tensors(self) -> Parts:
        """All tensors by part; those of the average are missing where there is none."""
        return {
            "model": self.model.state_dict(),
            "features": self.features.state_dict(),
            "optimizer": optimizer_tensors(self.optimizer),
            "average": self.average.model.state_dict() if self.average is not None else {},
        }

    def take(self, parts: Parts, progress: Progress, average_decay: float) -> None:
        """Become the state of `parts` and `progress`; an average of this decay starts where they hold none (0: off)."""
        self.progress = progress
        self.model.load_state_dict(parts["model"])
        self.features.load_state_dict(parts["features"])
        restore_optimizer(self.optimizer, parts["optimizer"])
        if average_decay:
            self.average = WeightAverage(self.model, average_decay)
            if parts["average"]:
                self.average.model.load_state_dict(parts["average"])
                self.average.updates = progress.step


def share(state: TrainState, parts: Parts, progress: Progress, average_decay: float, comm: Communicator) -> None:
    """Give all ranks the state that rank 0 holds in `parts` and `progress`; other ranks' are not looked at."""
    parts = {name: comm.broadcast_tensors(parts.get(name, {})) for name in PARTS}
    progress = Progress(**comm.broadcast(asdict(progress)))
    comm.whereabouts.step = progress.step
    state.take(parts, progress, average_decay)


def state_file(run_dir: Path) -> Path:
    """Where a run folder holds its trainer state."""
    return run_dir / "trainer.safetensors"


def save_state(run_dir: Path, state: TrainState, config: Config) -> None:
    """Write what `read_state` reads.

    Raises:
        CheckpointError: the file cannot be written; the old one is untouched.
    """
    tensors = {name: value for key, values in state.tensors().items() for name, value in prefixed(key, values).items()}
    metadata = {"kind": "trainer", "progress": asdict(state.progress), "config": config_to_dict(config)}
    save(state_file(run_dir), tensors, metadata)


def read_state(run_dir: Path, config: Config) -> tuple[Parts, Progress]:
    """Read the trainer state of a run folder: tensors by part, and how far the run is.

    Raises:
        CheckpointError: as `load`, or a file that is not a trainer state.
        ConfigError: the state is of another model, other features or another alphabet than `config` describes.
    """
    path = state_file(run_dir)
    tensors, metadata = load(path)
    if metadata.get("kind") != "trainer":
        raise CheckpointError(f"{path} is a {metadata.get('kind')}, not a trainer state")
    old = config_to_dict(config_from_dict(metadata["config"]))  # keys that are newer than the file get their defaults
    changed = changed_keys(old, config_to_dict(config))
    fixed = [key for key in changed if key.startswith(_FIXED)]
    if fixed:
        raise ConfigError(
            f"{path} was trained with other {', '.join(fixed)}: resume with the same values, give another run_dir, "
            "or start from its weights with checkpoint.init_from"
        )
    progress = Progress(**metadata["progress"])
    if not progress.plan and any(key.startswith(_PLANNED_BY) for key in changed):
        progress.plan = "of other settings"
    log.info(
        "resumed %s: epoch %d, batch %d, step %d%s", path, progress.epoch, progress.batch, progress.step,
        f"; changed: {', '.join(changed)}" if changed else "",
    )  # fmt: skip
    return {key: part(key, tensors) for key in PARTS}, progress


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


def changed_keys(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys whose values differ between two nested configurations."""
    changed: list[str] = []
    for key in sorted({*old, *new}):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            changed += changed_keys(a, b, f"{prefix}{key}.")
        elif a != b:
            changed.append(prefix + key)
    return changed
