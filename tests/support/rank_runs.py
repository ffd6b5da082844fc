"""Trainings of the tiny model on ranks, for the tests of launchers: how one is started, and what its folder tells."""

from __future__ import annotations

from pathlib import Path

import torch

from ds2.system.tensor_file import load
from support.run_log import events

STEPS = ("train.epochs=3", "optim.schedule=constant")  # 9 steps; every third batch has 2 utterances: ranks idle on 4
# Where sums in another order are compared: AdamW divides a gradient by its own size, and where that is all rounding,
# the whole step is; SGD's step is as far off as the gradient is.
SMOOTH = ("optim=sgd", "optim.learning_rate=1e-3")
Job = tuple[str, ...]


def clean(overrides: list[str], run_dir: Path, *extra: str) -> Job:
    """A job of `rank_job.py` in which nothing goes wrong."""
    return ("none", "0", "0", *overrides, *STEPS, *extra, f"run_dir={run_dir}")


def arguments(*jobs: Job) -> list[str]:
    """For `rank_job.py`: jobs (fault, rank, step, override...) one after the other on the same ranks."""
    return [word for number, job in enumerate(jobs) for word in (*(["--"] if number else []), *job)]


def scores(run_dir: Path) -> list[tuple[float, float]]:
    """WER and CER of every evaluation."""
    return [(event["wer"], event["cer"]) for event in events(run_dir, "dev")]


def state(run_dir: Path) -> dict[str, torch.Tensor]:
    """The trainer's tensors."""
    return load(run_dir / "trainer.safetensors")[0]


def same_bits(a: Path, b: Path) -> bool:
    """Whether two trainings ended in the same state, to the last bit."""
    one, other = state(a), state(b)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
