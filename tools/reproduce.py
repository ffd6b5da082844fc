"""Train the rows of a table, several at a time, and report their word error rates.

    python tools/reproduce.py table1 data.corpus=FOLDER --gpus 0 1

The same command continues where it was stopped, even by kill -9: runs resume from their folders, and a row with a file
results/ROW.json is done, also on a machine that has nothing but these files. If a row fails, the others continue and
the report gives the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from dispatch import new_parser, parse
from reproduce_tables import OPTIMIZERS, TABLES, PaperTable, Row, Shape

from ds2.commands.common import real, whole
from ds2.config.allowed import COUNT, UNLIMITED
from ds2.system.files import read_log, write_text

_NARROWEST = 1152  # the width of the paper's layers: divided by more, none remains
_FACTS = ("dev cost", "training cost", "parameters", "rate", "epochs", "steps", "noise scale", "minutes")
_LINES_OF_AN_ERROR = 3
_SAVING_S = 12  # for a run to save when the time is up
_DS2 = "import sys; from ds2 import cli; from ds2.system.signals import die_with_parent;"
_DS2 += "die_with_parent(); sys.exit(cli.main())"  # a run must not outlive the table


class RowFailed(Exception):
    """A command of a row failed."""


class TimeUp(RowFailed):
    """A command was stopped or not started because the time was up."""


def run_command(arguments: Sequence[str], gpu: str, run_dir: Path, stop_at: float) -> None:
    """Run a command of ds2 on a GPU; it ends with this process, and when the time is up.

    Args:
        arguments: of ds2.
        gpu: its number, or cpu.
        run_dir: of the run; `output.txt` there gets what the command prints.
        stop_at: when it is stopped, by `time.monotonic`.

    Raises:
        RowFailed: its status was not 0.
        TimeUp: it was stopped or not started.
    """
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu} if gpu != "cpu" else None
    run_dir.mkdir(parents=True, exist_ok=True)
    log = run_dir / "output.txt"
    with log.open("a", encoding="utf-8") as output:
        remaining_s = stop_at - time.monotonic()
        if remaining_s <= 0:
            raise TimeUp("not started, the time was up")
        with subprocess.Popen(
            [sys.executable, "-c", _DS2, *arguments], stdout=output, stderr=subprocess.STDOUT, env=environment
        ) as process:
            try:
                status = process.wait(None if remaining_s == float("inf") else remaining_s)
            except subprocess.TimeoutExpired:
                _end(process)
                raise TimeUp(f"stopped when the time was up: {so_far(run_dir)}") from None
    if status:
        lines = [line for line in log.read_text(encoding="utf-8").splitlines() if line.strip()]
        raise RowFailed(f"ds2 {arguments[0]} ended with {status}: {' | '.join(lines[-_LINES_OF_AN_ERROR:])} ({log})")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_SAVING_S)
    except subprocess.TimeoutExpired:  # the run resumes from its last save
        process.kill()


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The events of a kind in a run's log by step; the later line of a repeated step counts."""
    by_step, epoch = {}, 0
    for event in read_log(run_dir / "log.jsonl"):
        epoch = event.get("epoch", epoch)
        if event["event"] == kind:
            by_step[event["step"]] = {"epoch": epoch, **event}
    return [by_step[step] for step in sorted(by_step)]


def so_far(run_dir: Path) -> str:
    """How far a run is, in words."""
    train, dev = events(run_dir, "train"), events(run_dir, "dev")
    where = f"epoch {train[-1]['epoch']}, step {train[-1]['step']}" if train else "no step"
    return where + (f", dev WER {100 * dev[-1]['wer']:.2f} %, cost {dev[-1]['loss']:.1f}" if dev else "")


def noise_scale(train_events: Sequence[Mapping[str, Any]]) -> float | None:
    """The median gradient noise scale of train events, None without any; the last ones have hardly any signal."""
    scales = [event["noise_scale"] for event in train_events if event.get("noise_scale") is not None]
    return median(scales) if scales else None


def report(
    table: PaperTable,
    results: Mapping[str, Mapping[str, Any]],
    unfinished: Mapping[str, str],
    failures: Mapping[str, str],
) -> str:
    """The table in Markdown without its empty columns, and a list of the rows that have no result.

    Args:
        results: content of the files results/ROW.json, by row.
        unfinished: how far rows are that have started and have no result, by row.
        failures: reasons of the rows that failed in this run, by row.
    """
    tests = list(dict.fromkeys(name for row in table.rows for name in results.get(row.name, {}).get("tests", ())))
    columns = ["", "paper", *(column for name in tests for column in (f"{name}: WER (95 %)", "CER")), *_FACTS]
    rows = [_cells(row.name, row.paper, results[row.name], tests) for row in table.rows if row.name in results]
    filled = [index for index in range(len(columns)) if index == 0 or any(cells[index] for cells in rows)]
    lines = [[columns[index] for index in filled], ["---"] * len(filled)]
    lines += [[cells[index] for index in filled] for cells in rows]
    text = f"## {table.title}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)
    missing = [row.name for row in table.rows if row.name not in results]
    if missing:
        text += f"\nMissing rows, {len(missing)} of {len(table.rows)}:\n\n"
        text += "".join(f"- {name}: {failures.get(name) or unfinished.get(name, 'not run')}\n" for name in missing)
    return text


def _cells(name: str, paper: float | None, result: Mapping[str, Any], tests: Sequence[str]) -> list[str]:
    scores = [result["tests"].get(test) for test in tests]
    return [
        name,
        "" if paper is None else f"{paper:.2f}",
        *(cell for score in scores for cell in ((_rate(score), f"{100 * score['cer']:.2f}") if score else ("", ""))),
        _number(result["dev_loss"], ".1f"),
        _number(result["train_loss"], ".1f"),
        f"{result['parameters'] / 1e6:.2f} M",
        _number(result["rate"], "g"),
        f"{result['epochs']}",
        f"{result['steps']}",
        _number(result["noise_scale"], ".0f"),
        f"{result['minutes']:.1f}",
    ]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _rate(scores: Mapping[str, Any]) -> str:
    interval = scores["interval"]
    return f"{100 * scores['wer']:.2f} ({100 * interval['low']:.2f} .. {100 * interval['high']:.2f})"


class Reproduction:
    """The runs of a table in a folder.

    Args:
        folder: of run folders (`runs`), `results` and the report.
    """

    def __init__(self, table: PaperTable, folder: Path, options: argparse.Namespace) -> None:
        self.table, self.folder, self.options = table, folder, options
        self.stop_at = (
            time.monotonic() + 60 * options.stop_after_minutes if options.stop_after_minutes else float("inf")
        )
        self.failures: dict[str, str] = {}
        self._printing = threading.Lock()
        self._trained: dict[Path, int] = {}  # epochs of the runs that this process has finished
        self._free_gpus: queue.Queue[str] = queue.Queue()  # a GPU's number for each run that it has room for
        for gpu in list(options.gpus) * options.at_once:
            self._free_gpus.put(gpu)

    def run(self) -> None:
        """Run every row that has no result yet."""
        by_name = {row.name: row for row in self.table.rows}
        wanted = [by_name[name] for name in self.options.rows] or list(self.table.rows)
        with ThreadPoolExecutor(self._free_gpus.qsize()) as pool:
            list(pool.map(self._row, wanted))

    def results(self) -> dict[str, dict[str, Any]]:
        """The results of finished rows, by row."""
        return {row.name: result for row in self.table.rows if (result := self._saved(row))}

    def of_other_settings(self) -> str | None:
        """Name the first result that other settings gave, and which; None where all results are of these settings."""
        for row in self.table.rows:
            wanted = {*self.table.settings, *row.settings}
            saved = self._saved(row)
            if saved and (missing := sorted(wanted - {*saved["settings"]})):
                return f"{self._result_file(row)} was trained without {', '.join(missing)}"
        return None

    def _saved(self, row: Row) -> dict[str, Any] | None:
        path = self._result_file(row)
        result: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        return result

    def unfinished(self) -> dict[str, str]:
        """How far the rows are that have started and have no result, by row; of several rates the furthest."""
        progress = {}
        for row in self.table.rows:
            folders = [self._run_dir(row, rate) for rate in (None, *self._rates())]
            started = [folder for folder in folders if events(folder, "train")]
            if started and not self._result_file(row).is_file():
                furthest = max(started, key=lambda folder: events(folder, "train")[-1]["step"])
                progress[row.name] = f"started, {so_far(furthest)}"
        return progress

    def _rates(self) -> Sequence[float]:
        rates: list[float] | None = self.options.rates
        return self.table.rates if rates is None else rates

    def _row(self, row: Row) -> None:
        if self._result_file(row).is_file():
            return
        try:
            result = self._result(row)
            write_text(self._result_file(row), json.dumps(result, indent=1) + "\n")
            scores = [f"{name} {100 * score['wer']:.2f} %" for name, score in result["tests"].items()]
            self._print(f"{row.name}: {', '.join(scores)}")
        except Exception as error:  # the other rows continue
            self.failures[row.name] = str(error) if isinstance(error, RowFailed) else repr(error)
            self._print(f"{row.name}: {self.failures[row.name]}")

    def _result(self, row: Row) -> dict[str, Any]:
        from ds2.model.checkpoint import find_model, load_model  # a report does not need torch

        rate, tried = self.best_rate(row)
        run_dir = self.train(row, rate, self.options.epochs)
        tests = self._evaluate(run_dir, "greedy", ["decode=greedy"])
        if self.options.decode:
            try:
                tests |= self._evaluate(run_dir, "with LM", self.options.decode)
            except RowFailed as error:
                self._print(f"{row.name}, with LM: {error}")
        best = min(events(run_dir, "dev"), key=lambda event: (event["wer"], event["cer"]))
        steps_taken = events(run_dir, "train")
        if not steps_taken:
            raise RowFailed(f"{run_dir}/log.jsonl has no step: set train.log_every_steps below the steps taken")
        steps = [0, *(event["step"] for event in steps_taken)]  # of all restarts of the run
        steps_s = sum(
            (step - before) * e["step_s"] for (before, step), e in zip(pairwise(steps), steps_taken, strict=True)
        )
        last = [
            event["loss"]
            for event in steps_taken
            if event["epoch"] == steps_taken[-1]["epoch"] and event["loss"] is not None
        ]
        return {
            "tests": tests,
            "dev_loss": best["loss"],
            "train_loss": sum(last) / len(last) if last else None,
            "parameters": load_model(find_model(run_dir)).model.parameter_count,
            "rate": rate,
            "rates": tried,
            "epochs": steps_taken[-1]["epoch"],
            "steps": steps_taken[-1]["step"],
            "minutes": steps_s / 60,
            "noise_scale": noise_scale(steps_taken),
            "curve": [[event["step"], event["loss"], event["wer"]] for event in events(run_dir, "dev")],
            "settings": [*self.table.settings, *row.settings, *self.options.overrides],
            "git_commit": self.options.commit,
        }

    def best_rate(self, row: Row) -> tuple[float | None, dict[str, float]]:
        """Return the rate of the lowest dev cost after the first epochs, as the paper chooses it, and all costs."""
        rates = self._rates()
        if len(rates) <= 1:
            return (rates[0] if rates else None), {}
        with ThreadPoolExecutor(len(rates)) as pool:  # at the same time where GPUs have room
            costs = list(pool.map(lambda rate: self._try(row, rate), rates))
        finite = {rate: cost for rate, cost in zip(rates, costs, strict=True) if isinstance(cost, float)}
        failed = [cost for cost in costs if isinstance(cost, RowFailed)]
        if late := next((why for why in failed if isinstance(why, TimeUp)), None):
            raise late
        if not finite:
            raise RowFailed(f"no learning rate of {list(rates)} trained: {(failed or ['no finite dev cost'])[0]}")
        return min(finite, key=lambda rate: finite[rate]), {f"{rate:g}": cost for rate, cost in finite.items()}

    def _try(self, row: Row, rate: float) -> float | RowFailed | None:
        """The dev cost of a rate after the epochs of the search, or the error; None for a cost that is not finite."""
        run_dir = self._run_dir(row, rate)
        try:
            if not any(event["epoch"] == self.options.search_epochs for event in events(run_dir, "dev")):
                run_dir = self.train(row, rate, self.options.search_epochs)
        except RowFailed as error:
            return error
        losses = [e["loss"] for e in events(run_dir, "dev") if e["epoch"] <= self.options.search_epochs]
        return float(losses[-1]) if losses and losses[-1] is not None else None

    def train(self, row: Row, rate: float | None, epochs: int) -> Path:
        """Train a row at a rate, and return its run folder."""
        run_dir = self._run_dir(row, rate)
        if self._trained.get(run_dir) == epochs:
            return run_dir
        settings = [*self.table.settings, *row.settings, *self.options.overrides, f"run_dir={run_dir}"]
        settings += [f"optim.learning_rate={rate}"] if rate else []
        if epochs:
            settings += [f"train.epochs={epochs}"]
        self._command(["train", *settings], run_dir)
        self._trained[run_dir] = epochs
        return run_dir

    def _command(self, arguments: Sequence[str], run_dir: Path) -> None:
        gpu = self._free_gpus.get()
        try:
            run_command(arguments, gpu, run_dir, self.stop_at)
        finally:
            self._free_gpus.put(gpu)

    def _evaluate(self, run_dir: Path, how: str, decode: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Scores by test manifest and way of decoding."""
        out = run_dir / _file_name(how)
        self._command(["evaluate", str(run_dir), *self.options.test, *decode, "--out", str(out)], run_dir)
        scores = {}
        for path in sorted(out.glob("*/report.json")):
            scored = json.loads(path.read_text(encoding="utf-8"))
            scores[f"{path.parent.name}, {how}"] = {key: scored[key] for key in ("wer", "cer", "interval")}
        return scores

    def _run_dir(self, row: Row, rate: float | None) -> Path:
        return self.folder / "runs" / (_file_name(row.name) + (f"-{rate:g}" if rate else ""))

    def _result_file(self, row: Row) -> Path:
        return self.folder / "results" / f"{_file_name(row.name)}.json"

    def _print(self, text: str) -> None:
        with self._printing:
            print(time.strftime("%H:%M:%S"), text, flush=True)


def _undone(table: PaperTable, overrides: Sequence[str]) -> str | None:
    """The first override of a setting in which rows differ: it would make them equal."""
    rows = [dict(setting.split("=", 1) for setting in row.settings) for row in table.rows]
    return next((one for one in overrides if len({row.get(one.split("=", 1)[0]) for row in rows}) > 1), None)


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.]+", "_", name)


def main() -> int:
    """Run, report; status 1 where rows are missing."""
    parser = new_parser(__doc__)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("overrides", nargs="*", help="settings of ds2 train for all rows: data.corpus=FOLDER")
    parser.add_argument("--out", type=Path, help="folder (default: runs/TABLE); the same one continues")
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
        "--stop-after-minutes",
        type=real(0, UNLIMITED),
        default=0,
        help="stop runs then; the same command continues them",
    )
    options = parse(parser, None)
    table = TABLES[options.table](Shape(options.narrow, options.epochs, options.optimizer))
    unknown = set(options.rows) - {row.name for row in table.rows}
    if unknown:
        parser.error(f"{options.table} has no row {sorted(unknown)}; it has {[row.name for row in table.rows]}")
    if clash := _undone(table, options.overrides):
        parser.error(f"{clash} would undo what the rows differ in; omit it (--narrow changes all widths alike)")
    folder = options.out or Path("runs") / options.table
    reproduction = Reproduction(table, folder, options)
    if differs := reproduction.of_other_settings():
        parser.error(f"{differs}, unlike this command: pass the former options or another --out, or remove the file")
    reproduction.run()
    results = reproduction.results()
    text = report(table, results, reproduction.unfinished(), reproduction.failures)
    write_text(folder / "report.md", text)
    print(text)
    return int(len(results) < len(table.rows))


if __name__ == "__main__":
    sys.exit(main())
