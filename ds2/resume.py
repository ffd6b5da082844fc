"""Where a run begins: from its trainer state, from another model's weights, or from nothing; and that state's file."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ds2.averaging import WeightAverage
from ds2.config.convert import config_to_dict
from ds2.config.schema import ConfigError
from ds2.model.checkpoint import load_model, load_trainer, optimizer_tensors, restore_optimizer, save_trainer
from ds2.progress import Progress, changed_keys
from ds2.system.tensor_file import CheckpointError

if TYPE_CHECKING:
    from ds2.trainer import Trainer

log = logging.getLogger(__name__)
_PARTS = ("model", "features", "optimizer", "average")


def take_up(trainer: Trainer) -> None:
    """Give all ranks the state that rank 0 reads from the run folder, or that it starts from where there is none.

    Raises:
        CheckpointError: the state cannot be read, or the folder holds another run.
        ConfigError: the state is of another model, or `checkpoint.init_from` has another alphabet.
    """
    parts: dict[str, dict[str, Tensor]] = {part: {} for part in _PARTS}
    if trainer.comm.rank == 0:
        state = _state_file(trainer)
        if trainer.config.checkpoint.resume and state.is_file():
            parts = _read(trainer, state)
        else:
            _start(trainer)
            parts = _parts(trainer)
    parts = {part: trainer.comm.broadcast_tensors(tensors) for part, tensors in parts.items()}
    trainer.progress = Progress(**trainer.comm.broadcast(asdict(trainer.progress)))
    trainer.comm.whereabouts.step = trainer.progress.step
    trainer.model.load_state_dict(parts["model"])
    trainer.features.load_state_dict(parts["features"])
    restore_optimizer(trainer.optimizer, parts["optimizer"])
    if trainer.config.train.average_decay:
        trainer.average = WeightAverage(trainer.model, trainer.config.train.average_decay)
        if parts["average"]:
            trainer.average.model.load_state_dict(parts["average"])
            trainer.average.updates = trainer.progress.step


def save_state(trainer: Trainer) -> None:
    """Write what `take_up` reads."""
    save_trainer(_state_file(trainer), _parts(trainer), asdict(trainer.progress), trainer.config)


def _state_file(trainer: Trainer) -> Path:
    return trainer.run_dir / "trainer.safetensors"


def _start(trainer: Trainer) -> None:
    config = trainer.config
    if any(trainer.run_dir.glob("*.safetensors")):
        raise CheckpointError(
            f"{trainer.run_dir} holds the checkpoints of another run: resume it (checkpoint.resume=true), "
            "give another run_dir, or move the folder away"
        )
    if config.checkpoint.init_from:
        loaded = load_model(config.checkpoint.init_from, trainer.device)
        if loaded.alphabet != trainer.alphabet:
            raise ConfigError(f"checkpoint.init_from={config.checkpoint.init_from} has another alphabet")
        trainer.model.load_state_dict(loaded.model.state_dict())
        trainer.features.load_state_dict(loaded.features.state_dict())
    elif config.features.normalise == "corpus":
        chosen = np.random.default_rng(config.train.seed).permutation(len(trainer.utterances))
        drawn = chosen[: config.features.statistics_utterances]
        trainer.features.estimate(torch.from_numpy(trainer.loader.audio[int(i)]) for i in drawn)


def _read(trainer: Trainer, path: Path) -> dict[str, dict[str, Tensor]]:
    parts, metadata = load_trainer(path, _PARTS)
    changed = changed_keys(metadata["config"], config_to_dict(trainer.config))
    fixed = [key for key in changed if key.split(".")[0] in ("model", "features", "alphabet")]
    if fixed:
        raise ConfigError(
            f"{path} was trained with other {', '.join(fixed)}: resume with the same values, give another run_dir, "
            "or start from its weights with checkpoint.init_from"
        )
    progress = trainer.progress = Progress(**metadata["progress"])
    log.info(
        "resumed %s: epoch %d, batch %d, step %d%s", path, progress.epoch, progress.batch, progress.step,
        f"; changed: {', '.join(changed)}" if changed else "",
    )  # fmt: skip
    return parts


def _parts(trainer: Trainer) -> dict[str, dict[str, Tensor]]:
    return {
        "model": trainer.model.state_dict(),
        "features": trainer.features.state_dict(),
        "optimizer": optimizer_tensors(trainer.optimizer),
        "average": trainer.average.model.state_dict() if trainer.average is not None else {},
    }
