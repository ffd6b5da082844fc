"""Delays by saves of the trainer state: of the steps beside them, and from SIGTERM to a complete state.

    python tools/bench.py saves --model rnn_48_skip_4 --batch 4

A step counts from the end of the one before, so that the one after a save's beginning has the copy of the state in it.
Delays are against the median of the steps beside no save. The first save takes memory that later ones use again.
"""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Table, facts, write_json
from benchmarks.training import add_noise_options, noise_overrides, open_trainer
from dispatch import new_parser, parse

from ds2.commands.compose import compose_config
from ds2.config.device import resolve_device
from ds2.system.machine import short_collections
from ds2.training.loop import train
from ds2.training.state import state_file
from ds2.training.trainer import Trainer

COLUMNS = {
    "save": "{save}",
    "copy ms": "{copy_ms:.1f}",
    "whole save ms": "{whole_ms:.0f}",
    "steps beside it": "{steps}",
    "slowest ms": "{slowest_ms:.1f}",
    "delay": "{delay:+.0%}",
}


def step_times(take_step: Callable[[], object], count: int) -> list[float]:
    """Take steps; return the seconds of each."""
    ends = [time.perf_counter()]
    for _ in range(count):
        take_step()
        ends.append(time.perf_counter())
    return [end - start for start, end in itertools.pairwise(ends)]


def save_during_steps(trainer: Trainer, take_step: Callable[[], object]) -> tuple[float, list[float]]:
    """Save the state once; return the seconds of its copy and those of the steps until the file is complete."""
    file, ends = state_file(trainer.run_dir), [time.perf_counter()]
    before = file.stat().st_ino if file.is_file() else None
    trainer.files.save_in_epoch()
    copy_s = time.perf_counter() - ends[0]
    while len(ends) == 1 or not file.is_file() or file.stat().st_ino == before:
        take_step()
        ends.append(time.perf_counter())
        trainer.files.check()
    return copy_s, [end - start for start, end in itertools.pairwise(ends)]


def delays(quiet_s: Sequence[float], saves: Sequence[tuple[float, Sequence[float]]]) -> list[dict[str, Any]]:
    """A row for each of `saves`, against the steps of `quiet_s`; its last step is that in which it is complete."""
    rows = []
    for number, (copy_s, steps_s) in enumerate(saves, 1):
        steps_ms = [1e3 * seconds for seconds in steps_s]
        row = {"save": number, "copy_ms": 1e3 * copy_s, "whole_ms": sum(steps_ms), "steps": len(steps_ms)}
        delay = max(steps_s) / statistics.median(quiet_s) - 1
        rows.append(row | {"slowest_ms": max(steps_ms), "delay": delay, "steps_ms": steps_ms})
    return rows


def stop_seconds(overrides: Sequence[str]) -> float:
    """Train by the loop of `ds2 train`; return the seconds from SIGTERM, after its first save, to its end."""
    config = compose_config([*overrides, "train.epochs=100000", "checkpoint.every_epochs=100000"])
    run_dir, sent_s = Path(config.run_dir), list[float]()

    def stop() -> None:
        while not state_file(run_dir).is_file():
            time.sleep(0.01)
        sent_s.append(time.perf_counter())
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    train(config, run_dir)
    return time.perf_counter() - sent_s[0]


def main(arguments: list[str] | None = None) -> int:
    """Take steps with saves among them, then train and stop."""
    parser = new_parser(__doc__)
    parser.add_argument("--model", default="rnn_48_skip_4")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--warmup", type=int, default=20, help="steps that are not timed: the first ones record graphs")
    parser.add_argument("--steps", type=int, default=20, help="beside no save, before each save")
    parser.add_argument("--saves", type=int, default=4)
    add_noise_options(parser)
    options = parse(parser, arguments)
    head = facts(options, resolve_device(options.device), f"saves, {options.model}, {options.batch} utterances a step")
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"model={options.model}", f"device={options.device}", "checkpoint.every_steps=20"]
        overrides += noise_overrides(Path(folder), options.batch, options)
        trainer, take_step = open_trainer(overrides, options.batch)
        quiet_s, saves = list[float](), []
        with short_collections():  # as in `ds2 train`
            step_times(take_step, options.warmup)
            for _ in range(options.saves):
                quiet_s += step_times(take_step, options.steps)
                saves.append(save_during_steps(trainer, take_step))
        mib = state_file(trainer.run_dir).stat().st_size / 2**20
        result = {"mib": mib, "quiet_ms": [1e3 * s for s in quiet_s], "saves": delays(quiet_s, saves)}
        table = Table(COLUMNS)
        for row in result["saves"]:
            table.print_row(row)
        median, slowest = 1e3 * statistics.median(quiet_s), 1e3 * max(quiet_s)
        print(f"beside no save a step takes {median:.1f} ms, the slowest of {len(quiet_s)} {slowest:.1f}", flush=True)
        result["stop_s"] = stop_seconds([*overrides, f"run_dir={folder}/stopped"])
    print(f"a state of {mib:.0f} MiB is complete, and the run ends, {result['stop_s']:.2f} s after SIGTERM")
    write_json(None, head | result)
    return 0
