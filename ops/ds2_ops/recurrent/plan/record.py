"""What a sweep over tiles recorded (tools/plans.py sweep), and how far from the fastest tile a ranking is."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ds2_ops.recurrent.plan.choose import space
from ds2_ops.recurrent.plan.problem import Choice, DeviceFacts, Problem


class Measured(NamedTuple):
    """All tiles of one problem that were timed: microseconds a time step, launch included."""

    problem: Problem
    times: list[tuple[Choice, float]]

    def regret(self, cost: Callable[[Choice], float], most: int) -> float:
        """Time of the fastest among the `most` cheapest by `cost`, over that of the fastest of all."""
        ranked = sorted(self.times, key=lambda entry: cost(entry[0]))
        return min(us for _, us in ranked[:most]) / min(us for _, us in self.times)


class Record(NamedTuple):
    """A sweep: of which GPU, and its problems."""

    about: dict[str, Any]
    facts: DeviceFacts
    max_sms: int | None
    problems: list[Measured]


def read(path: Path) -> Record:
    """Read a sweep.

    Raises:
        ValueError: a tile of it is not one of this version's space: sweep anew.
    """
    content = json.loads(path.read_text())
    clusters = {int(size): count for size, count in content["active_clusters"].items()}
    facts = DeviceFacts(name=content["gpu"], sms=content["sms"], active_clusters=clusters)
    many, _ = content["frames"]
    max_sms, dtype = content.get("max_sms"), content.get("dtype", "bfloat16")
    problems = []
    for cell, backward, hidden, batch, times in content["rows"]:
        problem = Problem(batch, hidden, dtype, cell, backward)
        choices = {choice.name: choice for choice in space(problem, facts, max_sms)}
        named = [(content["names"][number], us / many) for number, us, _ in times]
        if unknown := [name for name, _ in named if name not in choices]:
            raise ValueError(f"{path}: {problem} has no tile {unknown[0]!r} in this version: record the sweep anew")
        problems.append(Measured(problem, [(choices[name], us) for name, us in named]))
    return Record(content, facts, max_sms, problems)


def halves(problems: Iterable[Measured]) -> tuple[list[Measured], list[Measured]]:
    """Part problems as on a chessboard of hidden and batch sizes: one half to fit by, one to judge by."""
    problems = list(problems)
    hidden = sorted({p.problem.hidden for p in problems})
    batch = sorted({p.problem.batch for p in problems})

    def black(p: Measured) -> bool:
        return (hidden.index(p.problem.hidden) + batch.index(p.problem.batch)) % 2 == 0

    return [p for p in problems if black(p)], [p for p in problems if not black(p)]
