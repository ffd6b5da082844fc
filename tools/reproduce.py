"""Train the rows of a table, several at a time, and report: `tools/reproduce.py table1 data.corpus=FOLDER --gpus 0 1`.

The same command goes on where it was stopped, by kill -9 too: runs resume from their folders, and a row whose
results/ROW.json exists is done, also on a machine that has nothing but these. A row that fails is named, the others
go on.
"""

from __future__ import annotations

import argparse
import json
import queue
import re
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from reproduce_command import RowFailed, TimeUp, run_command
from reproduce_log import curve, events, minutes_of_steps, noise_scale, so_far
from reproduce_report import Unfinished, report, write_plot
from reproduce_tables import OPTIMIZERS, TABLES, Row, Shape, Table

from ds2.commands.common import real, whole
from ds2.config.allowed import COUNT, UNLIMITED
from ds2.system.files import write_text
from ds2.system.machine import git_commit

_NARROWEST = 1152  # as wide as the paper's layers: over this, none is left


class Reproduction:
    """The runs of a table in a folder.

    Args:
        table: what to run.
        folder: of run folders (`runs`), `results` and the report.
        given: the options of the command.
    """

    def __init__(self, table: Table, folder: Path, given: argparse.Namespace) -> None:
        self.table, self.folder, self.given = table, folder, given
        self.stop_at = time.monotonic() + 60 * given.stop_after_minutes if given.stop_after_minutes else float("inf")
        self.failures: dict[str, str] = {}
        self._saying = threading.Lock()
        self._trained: dict[Path, int] = {}  # epochs that this process saw a run end with
        self._places: queue.Queue[str] = queue.Queue()  # a GPU's number for each run that may be on it
        for gpu in list(given.gpus) * given.at_once:
            self._places.put(gpu)

    def run(self) -> None:
        """Run every row that has no result yet."""
        by_name = {row.name: row for row in self.table.rows}
        wanted = [by_name[name] for name in self.given.rows] or list(self.table.rows)
        with ThreadPoolExecutor(self._places.qsize()) as pool:
            list(pool.map(self._row, wanted))

    def results(self) -> dict[str, dict[str, Any]]:
        """What is known, by row."""
        return {row.name: found for row in self.table.rows if (found := self._kept(row))}

    def of_other_settings(self) -> str | None:
        """The first row whose result is one of another shape of the table, and what differs; None where all fit."""
        for row in self.table.rows:
            wanted = {*self.table.settings, *row.settings}
            kept = self._kept(row)
            if kept and (missing := sorted(wanted - {*kept["settings"]})):
                return f"{self._result_file(row)} was trained without {', '.join(missing)}"
        return None

    def _kept(self, row: Row) -> dict[str, Any] | None:
        path = self._result_file(row)
        found: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        return found

    def unfinished(self) -> dict[str, Unfinished]:
        """How far the rows came that have begun and have no result, by row; of several rates the one that went on."""
        found = {}
        for row in self.table.rows:
            folders = [self._run_dir(row, rate) for rate in (None, *self._rates())]
            begun = [folder for folder in folders if events(folder, "train")]
            if begun and not self._result_file(row).is_file():
                furthest = max(begun, key=lambda folder: events(folder, "train")[-1]["step"])
                found[row.name] = Unfinished(so_far(furthest), curve(furthest))
        return found

    def _rates(self) -> Sequence[float]:
        given: list[float] | None = self.given.rates
        return self.table.rates if given is None else given

    def _row(self, row: Row) -> None:
        if self._result_file(row).is_file():
            return
        try:
            result = self._result(row)
            write_text(self._result_file(row), json.dumps(result, indent=1) + "\n")
            scores = [f"{name} {100 * found['wer']:.2f} %" for name, found in result["tests"].items()]
            self._say(f"{row.name}: {', '.join(scores)}")
        except Exception as error:  # whatever it is: the other rows go on
            self.failures[row.name] = str(error) if isinstance(error, RowFailed) else repr(error)
            self._say(f"{row.name}: {self.failures[row.name]}")

    def _result(self, row: Row) -> dict[str, Any]:
        rate, tried = self._best_rate(row)
        run_dir = self._train(row, rate, self.given.epochs)
        tests = self._evaluate(run_dir, "greedy", ["decode=greedy"])
        if self.given.decode:
            try:
                tests |= self._evaluate(run_dir, "with LM", self.given.decode)
            except RowFailed as error:
                self._say(f"{row.name}, with LM: {error}")
        best = min(events(run_dir, "dev"), key=lambda event: (event["wer"], event["cer"]))
        passed = events(run_dir, "train")
        if not passed:
            raise RowFailed(f"{run_dir}/log.jsonl tells of no step: set train.log_every_steps below the steps taken")
        last = [
            event["loss"] for event in passed if event["epoch"] == passed[-1]["epoch"] and event["loss"] is not None
        ]
        return {
            "tests": tests,
            "dev_loss": best["loss"],
            "train_loss": sum(last) / len(last) if last else None,
            "parameters": _parameters(run_dir),
            "rate": rate,
            "rates": tried,
            "epochs": passed[-1]["epoch"],
            "steps": passed[-1]["step"],
            "minutes": minutes_of_steps(passed),
            "noise_scale": noise_scale(passed),
            "curve": curve(run_dir),
            "settings": [*self.table.settings, *row.settings, *self.given.overrides],
            "git_commit": git_commit(),
        }

    def _best_rate(self, row: Row) -> tuple[float | None, dict[str, float]]:
        """The rate of those tried whose dev cost is lowest after the first epochs: the paper's fastest convergence."""
        rates = self._rates()
        if len(rates) <= 1:
            return (rates[0] if rates else None), {}
        with ThreadPoolExecutor(len(rates)) as pool:  # beside each other where there are places
            costs = list(pool.map(lambda rate: self._try(row, rate), rates))
        found = {rate: cost for rate, cost in zip(rates, costs, strict=True) if isinstance(cost, float)}
        failed = [cost for cost in costs if isinstance(cost, RowFailed)]
        if late := next((why for why in failed if isinstance(why, TimeUp)), None):
            raise late
        if not found:
            raise RowFailed(f"no learning rate of {list(rates)} trained: {(failed or ['no finite dev cost'])[0]}")
        return min(found, key=lambda rate: found[rate]), {f"{rate:g}": loss for rate, loss in found.items()}

    def _try(self, row: Row, rate: float) -> float | RowFailed | None:
        """The dev cost of a rate after the epochs of the search, or why there is none."""
        run_dir = self._run_dir(row, rate)
        try:
            if not self._tried(run_dir):
                run_dir = self._train(row, rate, self.given.search_epochs)
        except RowFailed as error:
            return error
        losses = [e["loss"] for e in events(run_dir, "dev") if e["epoch"] <= self.given.search_epochs]
        return float(losses[-1]) if losses and losses[-1] is not None else None

    def _tried(self, run_dir: Path) -> bool:
        return any(event["epoch"] == self.given.search_epochs for event in events(run_dir, "dev"))

    def _train(self, row: Row, rate: float | None, epochs: int) -> Path:
        run_dir = self._run_dir(row, rate)
        if self._trained.get(run_dir) == epochs:
            return run_dir
        settings = [*self.table.settings, *row.settings, *self.given.overrides, f"run_dir={run_dir}"]
        settings += [f"optim.learning_rate={rate}"] if rate else []
        if epochs:
            settings += [f"train.epochs={epochs}"]
        self._command(["train", *settings], run_dir)
        self._trained[run_dir] = epochs
        return run_dir

    def _command(self, arguments: Sequence[str], run_dir: Path) -> None:
        gpu = self._places.get()
        try:
            run_command(arguments, gpu, run_dir, self.stop_at)
        finally:
            self._places.put(gpu)

    def _evaluate(self, run_dir: Path, how: str, decode: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Scores by test manifest and way of decoding."""
        out = run_dir / _file_name(how)
        self._command(["evaluate", str(run_dir), *self.given.test, *decode, "--out", str(out)], run_dir)
        scores = {}
        for path in sorted(out.glob("*/report.json")):
            found = json.loads(path.read_text(encoding="utf-8"))
            scores[f"{path.parent.name}, {how}"] = {key: found[key] for key in ("wer", "cer", "interval")}
        return scores

    def _run_dir(self, row: Row, rate: float | None) -> Path:
        return self.folder / "runs" / (_file_name(row.name) + (f"-{rate:g}" if rate else ""))

    def _result_file(self, row: Row) -> Path:
        return self.folder / "results" / f"{_file_name(row.name)}.json"

    def _say(self, text: str) -> None:
        with self._saying:
            print(time.strftime("%H:%M:%S"), text, flush=True)


def _parameters(run_dir: Path) -> int:
    from ds2.model.checkpoint import find_model, load_model  # here: a report need not wait for torch

    return load_model(find_model(run_dir)).model.parameter_count


def _undone(table: Table, overrides: Sequence[str]) -> str | None:
    """The first override of a setting in which rows differ: it would make them alike."""
    rows = [dict(setting.split("=", 1) for setting in row.settings) for row in table.rows]
    return next((given for given in overrides if len({row.get(given.split("=", 1)[0]) for row in rows}) > 1), None)


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.]+", "_", name)


def main() -> int:
    """Run, report; status 1 where rows are missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("overrides", nargs="*", help="settings of ds2 train for all rows: data.corpus=FOLDER")
    parser.add_argument("--out", type=Path, help="folder (default: runs/TABLE); the same one goes on")
    parser.add_argument("--rows", nargs="+", default=[], help="only these, by name, in this order")
    parser.add_argument(
        "--narrow", type=real(0, _NARROWEST, above=True), default=1, help="widths of the paper over this"
    )
    parser.add_argument(
        "--epochs", type=whole(0, COUNT), default=20, help="of a row of the paper's tables; 0: as its settings say"
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd", help="of the paper's tables; theirs is sgd")
    parser.add_argument(
        "--rates", type=real(0, 1e6, above=True), nargs="*", help="learning rates to try; one: no search"
    )
    parser.add_argument("--search-epochs", type=whole(1, COUNT), default=2, help="that each learning rate is tried for")
    parser.add_argument("--gpus", nargs="+", default=["0"], help="numbers of GPUs, or cpu")
    parser.add_argument("--at-once", type=whole(1, 1024), default=1, help="runs that share a GPU")
    parser.add_argument("--test", nargs="+", default=[], help="manifests to report on, if not the recipe's test set")
    parser.add_argument(
        "--decode", nargs="+", default=[], help="settings of ds2 evaluate for a second WER: decode.lm=..."
    )
    parser.add_argument(
        "--stop-after-minutes", type=real(0, UNLIMITED), default=0, help="stop runs then, to go on another day"
    )
    given = parser.parse_intermixed_args()
    table = TABLES[given.table](Shape(given.narrow, given.epochs, given.optimizer))
    unknown = set(given.rows) - {row.name for row in table.rows}
    if unknown:
        parser.error(f"{given.table} has no row {sorted(unknown)}; it has {[row.name for row in table.rows]}")
    if clash := _undone(table, given.overrides):
        parser.error(f"{clash} would undo what the rows differ in; leave it out (--narrow changes all widths alike)")
    folder = given.out or Path("runs") / given.table
    reproduction = Reproduction(table, folder, given)
    if differs := reproduction.of_other_settings():
        parser.error(f"{differs}, as this command would: give the former options, another --out, or remove the file")
    reproduction.run()
    results = reproduction.results()
    unfinished = reproduction.unfinished()
    text = report(table, results, unfinished, reproduction.failures)
    write_text(folder / "report.md", text)
    write_plot(table, results, unfinished, folder / "report.png")
    print(text)
    return int(len(results) < len(table.rows))


if __name__ == "__main__":
    sys.exit(main())
