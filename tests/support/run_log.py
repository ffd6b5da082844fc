"""What a run has logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ds2.system.files import read_log


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """Those of one kind in a run folder's log.jsonl, in order."""
    return [event for event in read_log(run_dir / "log.jsonl") if event["event"] == kind]


def losses(run_dir: Path) -> dict[int, float]:
    """The loss by step; what was logged of a step last, where a resumed run repeats it."""
    return {event["step"]: event["loss"] for event in events(run_dir, "train")}
