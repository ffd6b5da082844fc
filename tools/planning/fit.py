"""Fit the planner's performance model to one half of a recorded sweep, and test its choices on the other half.

    python tools/plans.py fit RECORD...            print how far from the fastest tile the model's choices are, also
                                                   on problems that the constants were not fitted to ("held out")
    python tools/plans.py fit RECORD... --write    fit first, and write the constants that the planner uses

Least squares of relative errors, every constant at least 0. The halves are the two colours of a chessboard of hidden
and batch sizes. GRNN (2019), section 8.3, reports for its model: 1.03 times the fastest on average and 1.14 at worst
by its first choice, 1.02 and 1.08 by its first five.
"""

import functools
import importlib.resources
import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from dispatch import plain_parser, read_result
from ds2_ops.recurrent.plan.choose import space
from ds2_ops.recurrent.plan.devices import DEVICES
from ds2_ops.recurrent.plan.model import Constants, Processor, Timed, contents, step_us
from ds2_ops.recurrent.plan.model import fit as fit_constants
from ds2_ops.recurrent.plan.problem import Choice, DeviceFacts, Problem

FIGURES = Path(__file__).parents[2] / "ops" / "figures"


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


@functools.cache
def read(path: Path) -> Record:
    """Read a sweep.

    Raises:
        ValueError: it names no commit, or a tile that is not one of this version's space: sweep anew.
    """
    content = read_result(path)
    clusters = {int(size): count for size, count in content["active_clusters"].items()}
    capability = tuple(content.get("capability", DEVICES["H200"].capability))
    facts = replace(
        DEVICES["H200"], name=content["gpu"], capability=capability, sms=content["sms"], active_clusters=clusters
    )
    frames = content["frames"] if isinstance(content["frames"], int) else content["frames"][0]  # later ones: unused
    max_sms, dtype = content.get("max_sms"), content.get("dtype", "bfloat16")
    problems = []
    for cell, backward, hidden, batch, times in content["rows"]:
        problem = Problem(batch, hidden, dtype, cell, backward)
        choices = {choice.name: choice for choice in space(problem, facts, max_sms)}
        named = [(content["names"][number], us / frames) for number, us, *_ in times]
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


def fit(problems: Iterable[Measured]) -> Constants:
    """Find the constants of every kind of tile by which estimates come closest to what was measured."""
    return fit_constants(
        Timed(choice.work, us, best_us)
        for measured in problems
        for best_us in [min(us for _, us in measured.times)]
        for choice, us in measured.times
    )


def held_out(records: Iterable[Record]) -> list[Measured]:
    """Return the problems of records that are in no half to which the constants of their capability were fitted."""
    fitted = {
        (other.facts.capability, measured.problem)
        for other in (read(FIGURES / name) for name in contents()["fitted to"])
        for measured in halves(other.problems)[0]
    }
    return [m for record in records for m in record.problems if (record.facts.capability, m.problem) not in fitted]


def judge(
    problems: list[Measured], constants: Constants | None = None, processor: Processor | None = None
) -> dict[str, float]:
    """How far from the fastest the first choice and the first five are, on average and at worst."""
    result: dict[str, float] = {"problems": len(problems)}
    for most in (1, 5):
        regrets = [
            m.regret(lambda choice: step_us(choice.work, constants, processor or Processor()), most) for m in problems
        ]
        result |= {f"top-{most} mean": round(statistics.mean(regrets), 4), f"top-{most} worst": round(max(regrets), 4)}
    return result


def main(arguments: list[str] | None = None) -> int:
    """Fit if asked to, then judge."""
    parser = plain_parser(__doc__)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    whole = [read(path) for path in options.records]
    records = [halves(record.problems) for record in whole]
    fitted_by, judged_by = (
        [problem for halves_of_record in records for problem in halves_of_record[side]] for side in (0, 1)
    )
    constants = fit(fitted_by) if options.write else None
    for name, problems in (("fitted by", fitted_by), ("judged by", judged_by)):
        print(name, judge(problems, constants))
    if constants is None and (unseen := held_out(whole)):
        print("held out", judge(unseen))
    if constants is not None:
        path = Path(str(importlib.resources.files("ds2_ops.recurrent.plan").joinpath("constants.json")))
        lines = [f"  {json.dumps(name)}: {json.dumps(values)}" for name, values in constants.items()]
        gpus = sorted({record.about["gpu"] for record in whole})
        about = json.dumps({"fitted to": [path.name for path in options.records], "gpus": gpus})[1:-1]
        path.write_text(f'{{{about}, "constants": {{\n' + ",\n".join(lines) + "\n}}\n")
        print(f"{sum(map(len, constants.values()))} constants of {len(constants)} kinds -> {path}")
    return 0
