"""What survives a restart of the training of a recurrent language model, and its file."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ds2.lm.recurrent import RecurrentLM
from ds2.system.optimizer_state import optimizer_tensors, restore_optimizer
from ds2.system.plain import FieldError, from_plain
from ds2.system.tensor_file import CheckpointError, load, part, prefixed, save

_KIND = "recurrent-lm-training"


@dataclass(frozen=True)
class Position:
    """How far a training is."""

    epoch: int = 1  # that is running
    batch: int = 0  # batches of it that are behind
    step: int = 0
    elapsed_s: float = 0.0


@dataclass(frozen=True)
class _Stored:
    """The metadata of a file."""

    format: int
    kind: str
    position: Position
    made_of: dict[str, Any]


class StateFile:
    """Weights, optimizer and position beside the model that is to be, until that is whole.

    Args:
        path: of the file.
        made_of: what must be the same for a training to go on, by the name that messages call it; JSON-serialisable.
        every_s: seconds between two saves; 0: only where the training is stopped.
    """

    def __init__(self, path: Path, made_of: Mapping[str, Any], every_s: float) -> None:
        self.path, self._made_of, self._every_s = path, dict(made_of), every_s
        self._saved = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether the time between two saves has passed."""
        return 0 < self._every_s < time.monotonic() - self._saved

    def save(self, model: RecurrentLM, optimizer: torch.optim.Optimizer, position: Position) -> None:
        """Write the file, the old one or the whole new one.

        Raises:
            CheckpointError: it cannot be written.
        """
        tensors = {
            **prefixed("model", model.state_dict()), **prefixed("optimizer", optimizer_tensors(optimizer)),
        }  # fmt: skip
        save(self.path, tensors, {"kind": _KIND, "position": asdict(position), "made_of": self._made_of})
        self._saved = time.monotonic()

    def restore(self, model: RecurrentLM, optimizer: torch.optim.Optimizer) -> Position:
        """Make model and optimizer those of the file, and return its position; without a file it is the start.

        Raises:
            CheckpointError: the file is damaged, or of a training of other things; the message says which.
        """
        if not self.path.is_file():
            return Position()
        try:
            return self._restore(model, optimizer)
        except (CheckpointError, FieldError, RuntimeError, KeyError, ValueError) as error:
            reason = " ".join(str(error).split()).removeprefix(f"{self.path}: ")
            raise CheckpointError(f"{self.path}: {reason}; remove this file to begin anew") from error

    def _restore(self, model: RecurrentLM, optimizer: torch.optim.Optimizer) -> Position:
        tensors, metadata = load(self.path)
        if metadata.get("kind") != _KIND:
            raise CheckpointError(f"is a {metadata.get('kind')}, not the state of `ds2 lm train`")
        stored = from_plain(_Stored, metadata, "metadata")
        here = self._made_of
        other = [name for name in sorted({*here, *stored.made_of}) if here.get(name) != stored.made_of.get(name)]
        if other:
            raise CheckpointError(f"a training with other {', '.join(other)} was stopped there: go on with the same")
        if min(stored.position.epoch - 1, stored.position.batch, stored.position.step) < 0:
            raise CheckpointError(f"metadata.position: counts from before the start, {stored.position}")
        model.load_state_dict(part("model", tensors))
        momenta, weights = part("optimizer", tensors), list(model.parameters())
        wanted = {f"{n}.{name}": w.shape for n, w in enumerate(weights) for name in ("exp_avg", "exp_avg_sq")}
        wanted |= {f"{n}.step": torch.Size() for n in range(len(weights))}
        if {name: value.shape for name, value in momenta.items()} != wanted:
            raise CheckpointError("optimizer: its momenta are those of other weights")
        restore_optimizer(optimizer, momenta)
        return stored.position

    def remove(self) -> None:
        """Remove the file: the model is whole."""
        self.path.unlink(missing_ok=True)
