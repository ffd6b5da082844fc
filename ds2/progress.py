"""How far a run is, what ranks tell each other of a step, and whether two configurations are the same run's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Progress:
    """How far a run is: everything that changes and is not a tensor."""

    epoch: int = 1  # 1-based, the epoch that is running
    batch: int = 0  # batches of it that are behind us
    step: int = 0  # optimizer steps, skipped ones not counted
    skipped: int = 0  # steps skipped for a loss or gradient that was not finite
    infeasible: int = 0  # utterances left out of a loss because no alignment exists (after speed change)
    best_wer: float = float("inf")
    best_cer: float = float("inf")
    best_epoch: int = 0
    elapsed_s: float = 0.0
    audio_s: float = 0.0


@dataclass
class StepReport:
    """What a rank tells the others about its part of a step."""

    loss: float = 0.0  # summed over its utterances, nats
    gradient_norm: float = 0.0  # of all ranks' gradients, as this one sees it
    infeasible: int = 0
    audio_s: float = 0.0
    bad: list[str] = field(default_factory=list)  # names of utterances whose loss was not finite


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
