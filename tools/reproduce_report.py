"""A table of results as Markdown, and its learning curves as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from reproduce_tables import Table

_FACTS = ("dev cost", "training cost", "parameters", "rate", "epochs", "steps", "noise scale", "minutes")


@dataclass(frozen=True)
class Unfinished:
    """A row that has begun and has no result: where it is, and dev points of step, cost and WER."""

    where: str
    curve: list[list[Any]]


def report(
    table: Table,
    results: Mapping[str, Mapping[str, Any]],
    unfinished: Mapping[str, Unfinished],
    failures: Mapping[str, str],
) -> str:
    """The table in Markdown; columns that no row fills are left out, rows without a result are named beneath.

    Args:
        table: whose rows are reported.
        results: by row, as `tools/reproduce.py` keeps them.
        unfinished: rows without a result that had begun.
        failures: why rows have none, as far as this run tried.
    """
    tests = list(dict.fromkeys(name for row in table.rows for name in results.get(row.name, {}).get("tests", ())))
    columns = ["", "paper", *(column for name in tests for column in (f"{name}: WER (95 %)", "CER")), *_FACTS]
    rows = [_cells(row.name, row.paper, results[row.name], tests) for row in table.rows if row.name in results]
    filled = [index for index in range(len(columns)) if index == 0 or any(cells[index] for cells in rows)]
    lines = [[columns[index] for index in filled], ["---"] * len(filled)]
    lines += [[cells[index] for index in filled] for cells in rows]
    text = f"## {table.title}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)
    if table.repeats:
        text += "".join(_mean(test, [found["tests"][test]["wer"] for found in results.values()]) for test in tests)
    missing = [row.name for row in table.rows if row.name not in results]
    if missing:
        text += f"\nMissing rows, {len(missing)} of {len(table.rows)}:\n\n"
        begun = {name: f"begun, {row.where}" for name, row in unfinished.items()}
        text += "".join(f"- {name}: {failures.get(name) or begun.get(name, 'not run')}\n" for name in missing)
    return text


def _cells(name: str, paper: float | None, result: Mapping[str, Any], tests: Sequence[str]) -> list[str]:
    scores = [result["tests"].get(test) for test in tests]
    return [
        name,
        "" if paper is None else f"{paper:.2f}",
        *(cell for found in scores for cell in ((_rate(found), f"{100 * found['cer']:.2f}") if found else ("", ""))),
        _number(result["dev_loss"], ".1f"),
        _number(result["train_loss"], ".1f"),
        f"{result['parameters'] / 1e6:.2f} M",
        _number(result["rate"], "g"),
        f"{result['epochs']}",
        f"{result['steps']}",
        _number(result["noise_scale"], ".0f"),
        f"{result['minutes']:.1f}",
    ]


def _mean(test: str, rates: Sequence[float]) -> str:
    low, high = (100 * edge(rates) for edge in (min, max))
    return f"\n{test}: mean WER {100 * fmean(rates):.2f} of {len(rates)}, {low:.2f} to {high:.2f}\n"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _rate(scores: Mapping[str, Any]) -> str:
    interval = scores["interval"]
    return f"{100 * scores['wer']:.2f} ({100 * interval['low']:.2f} .. {100 * interval['high']:.2f})"


def write_plot(
    table: Table, results: Mapping[str, Mapping[str, Any]], unfinished: Mapping[str, Unfinished], path: Path
) -> None:
    """Draw what there is; without matplotlib nothing.

    Left dev cost and dev WER by step, a line a row, dashed where it is unfinished; right the WER of the first test
    set by row with its interval, the paper's beside it, and the gradient noise scale where rows have one.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(16, 5), layout="constrained")
    cost, errors, ends = figure.subplots(1, 3)
    for row in table.rows:
        if row.name not in results and row.name not in unfinished:
            continue
        done = row.name in results
        known = results[row.name]["curve"] if done else unfinished[row.name].curve
        curve = [point for point in known if None not in point]
        for axes, column, scale in ((cost, 1, 1), (errors, 2, 100)):
            axes.plot(
                [point[0] for point in curve],
                [scale * point[column] for point in curve],
                linestyle="-" if done else "--",
                marker="o",
                markersize=3,
                label=row.name,
            )
    cost.set(xlabel="step", ylabel="dev CTC cost, nats an utterance", title=table.title)
    errors.set(xlabel="step", ylabel="dev WER %, greedy")
    for axes in (cost, errors, ends):
        axes.grid(alpha=0.3)
    if errors.lines:
        errors.legend(fontsize=7)
    _draw_ends(ends, table, results)
    figure.savefig(path, dpi=120)


def _draw_ends(axes: Any, table: Table, results: Mapping[str, Mapping[str, Any]]) -> None:
    done = [row for row in table.rows if row.name in results]
    if not done:
        return
    test = next(iter(results[done[0].name]["tests"]))
    scores = [results[row.name]["tests"].get(test) for row in done]
    scored = [(at, found) for at, found in enumerate(scores) if found]
    places, wers = [at for at, _ in scored], [100 * found["wer"] for _, found in scored]
    reach = [[100 * abs(found["interval"][edge] - found["wer"]) for _, found in scored] for edge in ("low", "high")]
    axes.errorbar(places, wers, yerr=reach, fmt="o", capsize=3, label=test)
    printed = [(at, row.paper) for at, row in enumerate(done) if row.paper is not None]
    if printed:
        axes.plot(*zip(*printed, strict=True), "x", color="gray", label="the paper's")
    axes.set_xticks(range(len(done)), [row.name for row in done], rotation=60, ha="right", fontsize=7)
    axes.set(ylabel="WER % with its 95 % interval")
    noise = [(at, found) for at, row in enumerate(done) if (found := results[row.name]["noise_scale"]) is not None]
    if noise:
        beside = axes.twinx()
        beside.plot(*zip(*noise, strict=True), "s--", color="tab:orange", label="noise scale")
        beside.set(ylabel="gradient noise scale, utterances", yscale="log")
        beside.legend(fontsize=7, loc="upper right")
    axes.legend(fontsize=7, loc="upper left")
