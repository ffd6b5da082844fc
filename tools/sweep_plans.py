"""Measure every tile that the planner could choose: what tools/fit_plans.py fits its model to.

    python tools/sweep_plans.py record --out ops/figures/plans_h200.json   on a GPU: compile, check, time

A tile's result is checked against float64 before it is timed. Times are medians of launches between device events, of
T 256 and of T 64; the clock of the multiprocessors is read inside running kernels (clock64 beside globaltimer). A tile
that hangs is killed, noted and left out; the journal beside the record keeps what is done, and the same command goes on
from there. Shape letters: T frames, B batch, H hidden.
"""

import argparse
import json
import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from ds2_ops.jit.build import build
from ds2_ops.recurrent.calibrate import device_facts
from ds2_ops.recurrent.plan.choose import rank
from ds2_ops.recurrent.plan.problem import Choice, DeviceFacts, DoesNotFit, Problem
from plan_bench import FRAMES, Bench, clocked_text

HIDDEN = [64, 77, 128, 192, 256, 384, 512, 640, 700, 768, 896, 1001, 1024, 1152]
HIDDEN += [1280, 1536, 1760, 1761, 2048, 2304, 2560, 2816]
BATCH = [1, 2, 4, 8, 16, 32, 48, 64]
FEW_FRAMES, ROUNDS = 64, 2
CLOCKED = [(hidden, 64) for hidden in (256, 512, 1152, 1760, 2560)]
Key = tuple[str, bool, int, int]  # cell, backward, hidden, batch


def problems(options: argparse.Namespace) -> list[Problem]:
    """Return what is measured, in an order that leaves a record that is cut short spread over all sizes."""
    found = [
        Problem(batch, hidden, options.dtype, cell, backward)
        for cell in options.cells
        for hidden in options.hidden
        for backward in (False, True)
        for batch in options.batch
    ]
    random.Random(0).shuffle(found)
    return found


def key_of(problem: Problem) -> Key:
    """What tells problems of one record apart."""
    return problem.nonlinearity, problem.backward, problem.hidden, problem.batch


def tiles(problem: Problem, facts: DeviceFacts, options: argparse.Namespace) -> list[Choice]:
    """All tiles of a problem, or those of each design that the model likes most; none where it does not fit."""
    try:
        ranked = rank(problem, facts, options.max_sms)
        return [c for design in options.designs for c in [c for c in ranked if c.design == design][: options.most]]
    except DoesNotFit:
        return []


def clocked(problem: Problem, choices: list[Choice], options: argparse.Namespace) -> list[Choice]:
    """Return the tiles in whose kernels the clock is read: of some problems, the first of each layout."""
    if options.max_sms or (problem.hidden, problem.batch) not in CLOCKED:
        return []
    return list({choice.work.layout: choice for choice in reversed(choices)}.values())


def build_all(sources: Iterable[str], workers: int) -> dict[str, str]:
    """Compile in parallel into the cache of kernels; return what failed or spilt."""
    wanted, started = sorted(set(sources)), time.perf_counter()
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        notes = dict(zip(wanted, pool.map(_build_one, wanted), strict=True))
    print(f"{len(wanted)} kernels compiled in {time.perf_counter() - started:.0f} s by {workers} processes", flush=True)
    return {text: note for text, note in notes.items() if note}


def _build_one(text: str) -> str:
    try:
        binary = build(text)
    except RuntimeError as error:
        return str(error)[:2000]
    return f"{binary.local_bytes} B local, {binary.loss}" if binary.local_bytes or binary.loss else ""


def measure_all(options: argparse.Namespace, journal: Path) -> None:
    """Check and time all that the journal does not hold yet, and add it there."""
    facts = device_facts(0)
    done = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    finished = {tuple(entry["key"]) for entry in done if "times" in entry or entry.get("hung") == "timing"}
    hung = {(*entry["key"], entry["hung"]) for entry in done if "hung" in entry}
    with journal.open("a") as file:

        def note(**entry: Any) -> None:
            file.write(json.dumps(entry) + "\n")
            file.flush()

        for problem in problems(options):
            key = key_of(problem)
            if key in finished:
                continue
            choices = [c for c in tiles(problem, facts, options) if (*key, c.name) not in hung]
            if not choices:
                continue
            bench, right = Bench(problem), []
            for choice in choices:
                note(key=key, trying=choice.name)
                try:
                    error = bench.error(choice)
                except RuntimeError as failure:
                    note(key=key, failed=choice.name, why=str(failure)[:500])
                    torch.cuda.synchronize()  # raises where the context is lost: then another process goes on
                    continue
                if error <= 0.02:
                    right.append(choice)
                else:
                    note(key=key, wrong=choice.name, error=error)
            note(key=key, trying="timing")
            long = bench.times_us(right, FRAMES, ROUNDS)
            short = bench.times_us(right, FEW_FRAMES, 1)
            rows = zip(right, long, short, strict=True)
            note(key=key, times=[(choice.name, round(a, 2), round(b, 2)) for choice, a, b in rows])
            for choice in clocked(problem, right, options):
                note(key=key, trying=choice.name)
                note(key=key, clock=choice.name, mhz=round(bench.clock_mhz(choice)))
            best = min(long)
            print(f"{key}: {len(right)} of {len(choices)} tiles, {best / FRAMES:.3f} us a step", flush=True)


def record(options: argparse.Namespace) -> int:
    """Compile, then measure in a process that may hang."""
    deadline = time.monotonic() + options.budget_s
    facts = _facts_of_gpu()
    wanted = set()
    for problem in problems(options):
        choices = tiles(problem, facts, options)
        wanted |= {choice.launch.source.text for choice in choices}
        wanted |= {clocked_text(choice) for choice in clocked(problem, choices, options)}
    bad = build_all(wanted, options.workers)
    for text, why in bad.items():
        print(f"COMPILED BADLY: {why}\n{text}", flush=True)
    journal = options.out.with_suffix(".journal")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-u", __file__, "measure", *sys.argv[2:]]
    while time.monotonic() < deadline:
        child = subprocess.Popen(command)
        size, changed = -1, time.monotonic()
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.5)
            now = journal.stat().st_size if journal.exists() else 0
            if now != size:
                size, changed = now, time.monotonic()
            if time.monotonic() - changed > options.stall_s:
                break
        if child.poll() == 0:
            break
        child.kill()
        child.wait()
        if time.monotonic() < deadline:
            last = json.loads(journal.read_text().splitlines()[-1]) if journal.exists() else {}
            if "key" not in last:
                print("the measuring process fails at its start", flush=True)
                return 1
            stuck = last.get("trying") or last.get("failed")
            print(f"HUNG or FAILED: {last['key']} {stuck}", flush=True)
            with journal.open("a") as file:
                file.write(json.dumps({"key": last["key"], "hung": stuck}) + "\n")
    write(journal, options.out, facts, options)
    return 0


def write(journal: Path, out: Path, facts: DeviceFacts, options: argparse.Namespace) -> None:
    """Turn a journal into the record: names once, one problem a line."""
    entries = [json.loads(line) for line in journal.read_text().splitlines()]
    numbers: dict[str, int] = {}
    lines = []
    for entry in entries:
        if "times" in entry:
            times = [(numbers.setdefault(name, len(numbers)), a, b) for name, a, b in entry["times"]]
            lines.append(json.dumps([*entry["key"], times], separators=(",", ":")))
    clocks = [[*entry["key"], entry["clock"], entry["mhz"]] for entry in entries if "clock" in entry]
    bad = ((entry, entry.get("wrong") or entry.get("failed") or entry.get("hung")) for entry in entries)
    failed = [[*entry["key"], name] for entry, name in bad if name]
    head = {
        "max_sms": options.max_sms,
        "dtype": options.dtype,
        "gpu": facts.name,
        "sms": facts.sms,
        "active_clusters": dict(facts.active_clusters),
        "driver": _smi("driver_version"),
        "clock_max_mhz": _smi("clocks.max.sm"),
        "clock_under_load_mhz": clocks,
        "failed": failed,
        "frames": [FRAMES, FEW_FRAMES],
        "row": "cell, backward, hidden, batch, [name, us a launch of many frames, of few]",
        "names": list(numbers),
    }
    text = json.dumps(head)[:-1] + ', "rows": [\n' + ",\n".join(lines) + "\n]}\n"
    out.write_text(text)
    print(f"{len(lines)} problems, {sum(line.count('[') - 2 for line in lines)} tiles -> {out}", flush=True)


def _smi(what: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _facts_of_gpu() -> DeviceFacts:
    """Ask in a process of its own: this one will fork compilers, which a CUDA context does not survive."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(device_facts, (0,))


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("record", "measure"):
        one = commands.add_parser(name)
        one.add_argument("--out", type=Path, required=True)
        one.add_argument("--cells", nargs="+", default=["relu"])
        one.add_argument("--hidden", type=int, nargs="+", default=HIDDEN)
        one.add_argument("--batch", type=int, nargs="+", default=BATCH)
        one.add_argument("--dtype", default="bfloat16")
        one.add_argument("--max-sms", type=int)
        one.add_argument("--designs", nargs="+", default=["units", "cluster", "narrow", "wide"])
        one.add_argument("--most", type=int, help="only so many tiles of each design, the model's best")
        one.add_argument("--workers", type=int, default=os.cpu_count())
        one.add_argument("--budget_s", type=float, default=1e9, help="then what there is by then is written")
        one.add_argument("--stall_s", type=float, default=25.0, help="without progress, after which a tile has hung")
    return parser.parse_args()


def main() -> int:
    """Run one command."""
    options = parse()
    if options.command == "record":
        return record(options)
    measure_all(options, options.out.with_suffix(".journal"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
