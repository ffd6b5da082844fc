"""The result of a sweep: a table that ranks its runs, and a picture of their dev scores."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ds2.system.files import write_text
from ds2.system.text_files import read_log

_LONGEST_NAME = 120


@dataclass(frozen=True)
class Job:
    """One run of a sweep."""

    name: str  # the settings in which it differs
    run_dir: Path
    status: int  # 0: it finished

    def evaluations(self) -> list[dict[str, float]]:
        """Return the `dev` events of its log, in order."""
        events = read_log(self.run_dir / "log.jsonl")
        return [event for event in events if event.get("event") == "dev" and event.get("wer") is not None]


def folder_name(differing: str) -> str:
    """Return a folder name for `key=value,...`: unsafe characters become _, a long name ends in a hash."""
    name = re.sub(r"[^\w.,=+-]+", "_", differing) or "all"
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[: _LONGEST_NAME - 9]}-{hashlib.sha256(differing.encode()).hexdigest()[:8]}"


def ranking(jobs: Sequence[Job], metric: str) -> str:
    """Return the runs as a table, sorted by their best dev WER or CER; runs without one come last.

    Args:
        jobs: of the sweep.
        metric: wer or cer.
    """
    rows = []
    for job in jobs:
        events = job.evaluations()
        best = min(events, key=lambda event: event[metric], default=None)
        key = best[metric] if best else math.inf
        scores = (f"{100 * best['wer']:.2f}", f"{100 * best['cer']:.2f}", f"{best['step']}") if best else ("-",) * 3
        rows.append((key, (*scores, job.name + ("" if job.status == 0 else f" (status {job.status})"))))
    rows.sort(key=lambda row: row[0])
    lines = [f"{'':>4} {'dev WER %':>9} {'CER %':>7} {'step':>7}  run"]
    lines += [
        f"{place:>4} {wer:>9} {cer:>7} {step:>7}  {name}" for place, (_, (wer, cer, step, name)) in enumerate(rows, 1)
    ]
    return "\n".join(lines)


def finish(folder: Path, jobs: Sequence[Job], metric: str) -> str:
    """Write ranking.txt and, if matplotlib is installed, ranking.png into the folder; return the text to print."""
    table = ranking(jobs, metric)
    write_text(folder / "ranking.txt", table + "\n")
    picture = folder / "ranking.png"
    drawn = (
        f" and {picture}" if _draw(jobs, metric, picture) else "; a picture needs matplotlib: pip install matplotlib"
    )
    return f"{table}\nwrote {folder / 'ranking.txt'}{drawn}"


def _draw(jobs: Sequence[Job], metric: str, path: Path) -> bool:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for job in jobs:
        if events := job.evaluations():
            steps, rates = [event["step"] for event in events], [100 * event[metric] for event in events]
            axes.plot(steps, rates, marker="o", markersize=3, label=job.name)
    axes.set(xlabel="step", ylabel=f"dev {metric.upper()} %", title=f"{len(jobs)} runs")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=150)
    return True
