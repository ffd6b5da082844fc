"""What the log of a run says, log.jsonl of its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The events of a kind in a run's log in the order of their steps; of a repeated step the later line counts.

    A line that a kill cut short is passed over.
    """
    log, found = run_dir / "log.jsonl", {}
    epoch = 0
    for line in log.read_text(encoding="utf-8").splitlines() if log.is_file() else ():
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            continue
        epoch = event.get("epoch", epoch)
        if event["event"] == kind:
            found[event["step"]] = {"epoch": epoch, **event}
    return [found[step] for step in sorted(found)]


def curve(run_dir: Path) -> list[list[Any]]:
    """Step, dev cost and dev WER of each evaluation."""
    return [[event["step"], event["loss"], event["wer"]] for event in events(run_dir, "dev")]


def so_far(run_dir: Path) -> str:
    """Where a run is, in words."""
    train, dev = events(run_dir, "train"), events(run_dir, "dev")
    where = f"epoch {train[-1]['epoch']}, step {train[-1]['step']}" if train else "no step"
    return where + (f", dev WER {100 * dev[-1]['wer']:.2f} %, cost {dev[-1]['loss']:.1f}" if dev else "")


def minutes_of_steps(passed: Sequence[Mapping[str, Any]]) -> float:
    """How long the steps of these train events took, whenever and in however many runs they were taken."""
    steps = [0, *(event["step"] for event in passed)]
    return (
        sum((step - last) * event["step_s"] for last, step, event in zip(steps, steps[1:], passed, strict=False)) / 60
    )


def noise_scale(passed: Sequence[Mapping[str, Any]]) -> float | None:
    """The median of these train events' gradient noise scales, None without any: the last have hardly a signal left."""
    found = [event["noise_scale"] for event in passed if event.get("noise_scale") is not None]
    return median(found) if found else None
