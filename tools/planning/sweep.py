"""Measure every tile that the planner could choose; `plans.py fit` fits the model to the record.

    python tools/plans.py sweep --out ops/figures/plans_h200.json   on a GPU: compile, check, time

A tile's result is checked against float64 before it is timed. Times are medians of launches between device events, of
T 256. A tile that hangs is killed, noted and left out. A journal next to the record holds what is done, and the same
command continues from there. The record is written every few seconds, and has all tiles of each of its problems.
Several GPUs need a command each, with `CUDA_VISIBLE_DEVICES` and a record of its own; `fit` reads them together.
Shape letters: T frames, B batch, H hidden.
"""

import argparse
import functools
import itertools
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from dispatch import new_parser, parse
from ds2_ops.jit import runtime
from ds2_ops.jit.build import build
from ds2_ops.jit.launch import run_loaded
from ds2_ops.recurrent.backends import gemm
from ds2_ops.recurrent.calibrate import device_facts
from ds2_ops.recurrent.cells import CELLS, Options
from ds2_ops.recurrent.plan.choose import rank
from ds2_ops.recurrent.plan.problem import Choice, DeviceFacts, DoesNotFit, Problem, array_bytes, pass_arguments
from torch import Tensor

from ds2.system.files import read_log, write_text

FRAMES, CHECKED_FRAMES, LAUNCHES = 256, 5, 2
HIDDEN = [64, 77, 128, 192, 256, 384, 512, 640, 700, 768, 896, 1001, 1024, 1152]
HIDDEN += [1280, 1536, 1760, 1761, 2048, 2304, 2560, 2816]
BATCH = [1, 2, 4, 8, 16, 32, 48, 64]
ROUNDS = 2
STALL_S = 25.0  # without progress, after which a tile has hung
SAVE_S = 5.0  # between two versions of the record, which a kill leaves behind
Key = tuple[str, bool, int, int]  # cell, backward, hidden, batch


class Bench:
    """Random tensors of one problem, on which its tiles are checked and timed."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.device = problem, torch.device("cuda")
        self.index, self.cell = torch.cuda.current_device(), CELLS[problem.nonlinearity]
        torch.manual_seed(problem.hidden + problem.batch)
        dtype = getattr(torch, problem.dtype)
        self.arrays: list[Tensor | None] = []
        for place, size in enumerate(array_bytes(problem, FRAMES)):
            kind = torch.float32 if place in (9, 10) else dtype  # the cell state
            count = size // kind.itemsize
            self.arrays.append(torch.randn(count, dtype=kind, device=self.device) if size else None)
        if self.arrays[1] is not None:
            self.arrays[1].clamp_min_(0)  # an output
        self.arrays[2].mul_(0.9 * problem.hidden**-0.5)
        if self.cell.gates > 1 and problem.backward:
            self.arrays[7].uniform_(-0.9, 0.9)  # values that a forward pass may save
        self.exchange: Tensor | None = None
        self.truth = self._truth().flatten()

    def _few(self, place: int, width: int) -> Tensor:
        """The first few frames of an array, in float64."""
        rows = CHECKED_FRAMES * self.problem.batch
        array = self.arrays[place]
        assert array is not None
        return array[: rows * width].double().view(CHECKED_FRAMES, self.problem.batch, width)

    def _truth(self) -> Tensor:
        """The result of a few frames in float64."""
        problem, hidden, gates = self.problem, self.problem.hidden, self.cell.gates
        matrix, options, carry = self.arrays[2].double(), Options(problem.nonlinearity), None
        if gates > 1 and self.arrays[9] is not None:
            carry = self.arrays[9].double().view(problem.batch, hidden)
        if not problem.backward:
            weight = matrix.view(gates * hidden, hidden)
            return gemm.forward((self._few(0, gates * hidden), weight, None, None, carry, None), options)[0]
        weight, grad_y = matrix.view(hidden, gates * hidden).t(), self._few(0, hidden)  # the kernel has the transpose
        if gates == 1:
            return gemm.backward_data((grad_y, None, None, self._few(1, hidden), None, weight, None), options)[0]
        saved = self._few(7, self.cell.saved * hidden).unflatten(2, (self.cell.saved, hidden))
        return gemm.backward_data((grad_y, None, carry, grad_y, saved, weight, None), options)[0]

    def launcher(self, choice: Choice, frames: int) -> Callable[[], None]:
        """Prepare a launch, and return the function that does it."""
        launch = choice.launch
        if choice.exchange_words and (self.exchange is None or self.exchange.numel() < choice.exchange_words):
            self.exchange = torch.empty(choice.exchange_words, dtype=torch.int32, device=self.device)
        addresses = [0 if array is None else array.data_ptr() for array in self.arrays]
        exchange = 0 if self.exchange is None else self.exchange.data_ptr()
        numbers, source = pass_arguments(choice, self.problem, frames, addresses, 1.0, exchange), launch.source
        packed, stream = source.pack(numbers), torch.cuda.current_stream().cuda_stream
        kernel = runtime.load(source.text, self.index)

        def call() -> None:
            run_loaded(launch, kernel, packed, stream)

        return call

    def error(self, choice: Choice) -> float:
        """Relative error of a few frames."""
        call = self.launcher(choice, CHECKED_FRAMES)
        self.arrays[5].fill_(torch.nan)
        call()
        result = self.arrays[5][: self.truth.numel()].double()
        return float((result - self.truth).norm() / self.truth.norm())

    def times_us(self, choices: list[Choice]) -> list[float]:
        """Median time of a launch of each, in turns, so that a drift of the clock affects all alike."""
        calls = [self.launcher(choice, FRAMES) for choice in choices]
        spans: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in choices]
        for turn in range(ROUNDS):
            for call, span in zip(calls, spans, strict=True):
                for launch in range(-1 if turn == 0 else 0, LAUNCHES):
                    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    start.record()
                    call()
                    stop.record()
                    if launch >= 0:  # the others warm up
                        span.append((start, stop))
        torch.cuda.synchronize()
        return [statistics.median(start.elapsed_time(stop) for start, stop in span) * 1e3 for span in spans]


def problems(options: argparse.Namespace) -> list[Problem]:
    """Return the problems to measure, shuffled so that a record that is cut short covers all sizes."""
    every = itertools.product(options.cells, options.hidden, (False, True), options.batch)
    result = [Problem(batch, hidden, options.dtype, cell, backward) for cell, hidden, backward, batch in every]
    random.Random(0).shuffle(result)
    return result


def key_of(problem: Problem) -> Key:
    """The key of a problem in a record."""
    return problem.nonlinearity, problem.backward, problem.hidden, problem.batch


def tiles(problem: Problem, facts: DeviceFacts, options: argparse.Namespace) -> list[Choice]:
    """All tiles of a problem, or those of each design that the model likes most; none where it does not fit."""
    try:
        ranked = rank(problem, facts, options.max_sms)
        return [c for design in options.designs for c in [c for c in ranked if c.design == design][: options.most]]
    except DoesNotFit:
        return []


def build_all(sources: Iterable[str], arch: str, workers: int) -> dict[str, str]:
    """Compile in parallel into the cache of kernels; return the sources that failed or spilled, with the reason."""
    wanted, started = sorted(set(sources)), time.perf_counter()
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        notes = dict(zip(wanted, pool.map(functools.partial(_build_one, arch=arch), wanted), strict=True))
    print(f"{len(wanted)} kernels compiled in {time.perf_counter() - started:.0f} s by {workers} processes", flush=True)
    return {text: note for text, note in notes.items() if note}


def _build_one(text: str, arch: str) -> str:
    try:
        binary = build(text, arch)
    except RuntimeError as error:
        return str(error)[:2000]
    return f"{binary.local_bytes} B local, {binary.loss}" if binary.local_bytes or binary.loss else ""


def finished_problems(entries: list[dict[str, Any]]) -> set[Key]:
    """Return the problems of a journal that need no more measuring."""
    return {tuple(entry["key"]) for entry in entries if "times" in entry or entry.get("hung") == "timing"}


def measure_all(options: argparse.Namespace, journal: Path) -> None:
    """Check and time what the journal lacks, and add it to the journal."""
    facts = device_facts(0)
    done = read_log(journal)
    finished = finished_problems(done)
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
            if not right:
                continue
            note(key=key, trying="timing")
            times_us = bench.times_us(right)
            rows = zip(right, times_us, strict=True)
            note(key=key, times=[(choice.name, round(us, 2)) for choice, us in rows])
            best = min(times_us) / FRAMES
            print(f"{key}: {len(right)} of {len(choices)} tiles, {best:.3f} us a step", flush=True)


def record(options: argparse.Namespace, arguments: list[str]) -> int:
    """Compile, then measure in a process that may hang."""
    facts, arch = _facts_of_gpu()
    journal = options.out.with_suffix(".journal")
    wanted, finished = set(), finished_problems(read_log(journal))
    for problem in problems(options):
        if key_of(problem) not in finished:
            wanted |= {choice.launch.source.text for choice in tiles(problem, facts, options)}
    bad = build_all(wanted, arch, options.workers)
    for text, why in bad.items():
        print(f"COMPILED BADLY: {why}\n{text}", flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    tool = str(Path(__file__).parents[1] / "plans.py")
    command = [sys.executable, "-u", tool, "sweep", *arguments, "--measure"]
    save = functools.partial(write, journal, options.out, facts, options)
    while (child := subprocess.Popen(command)) and not _finishes(child, journal, save):
        last = (read_log(journal) or [{}])[-1]
        if "key" not in last:
            print("the measuring process fails at its start", flush=True)
            return 1
        stuck = last.get("trying") or last.get("failed")
        print(f"HUNG or FAILED: {last['key']} {stuck}", flush=True)
        with journal.open("a") as file:
            file.write(json.dumps({"key": last["key"], "hung": stuck}) + "\n")
    print(f"{save()} -> {options.out}", flush=True)
    return 0


def _finishes(child: subprocess.Popen[bytes], journal: Path, save: Callable[[], object]) -> bool:
    """Wait for the measuring process and save what it adds to its journal; kill it where that does not grow."""
    size, changed = -1, time.monotonic()
    saved = changed
    while child.poll() is None and time.monotonic() - changed < STALL_S:
        time.sleep(0.5)
        now = journal.stat().st_size if journal.exists() else 0
        if now != size:
            size, changed = now, time.monotonic()
        if changed - saved > SAVE_S:
            save()
            saved = time.monotonic()
    child.kill()
    return child.wait() == 0


def write(journal: Path, out: Path, facts: DeviceFacts, options: argparse.Namespace) -> str:
    """Turn a journal into the record: names once, one problem a line; return how much there is."""
    entries = read_log(journal)
    numbers: dict[str, int] = {}
    lines = []
    for entry in entries:
        if "times" in entry:
            times = [(numbers.setdefault(name, len(numbers)), us) for name, us in entry["times"]]
            lines.append(json.dumps([*entry["key"], times], separators=(",", ":")))
    bad = ((entry, entry.get("wrong") or entry.get("failed") or entry.get("hung")) for entry in entries)
    failed = [[*entry["key"], name] for entry, name in bad if name]
    head = {
        "max_sms": options.max_sms, "dtype": options.dtype, "git_commit": options.commit, "gpu": facts.name,
        "capability": facts.capability, "sms": facts.sms, "active_clusters": dict(facts.active_clusters),
        "driver": _smi("driver_version"), "clock_max_mhz": _smi("clocks.max.sm"), "failed": failed, "frames": FRAMES,
        "row": "cell, backward, hidden, batch, [name, us a launch]", "names": list(numbers),
    }  # fmt: skip
    text = json.dumps(head)[:-1] + ', "rows": [\n' + ",\n".join(lines) + "\n]}\n"
    write_text(out, text)
    return f"{len(lines)} problems, {sum(line.count('[') - 2 for line in lines)} tiles"


@functools.cache
def _smi(what: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _facts_of_gpu() -> tuple[DeviceFacts, str]:
    """Ask for its facts and architecture in another process: a CUDA context does not survive the fork of compilers."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(device_facts, (0,)), pool.apply(runtime.arch, (0,))


def main(arguments: list[str]) -> int:
    """Record a sweep; with --measure be the process that measures."""
    parser = new_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cells", nargs="+", default=["relu"])
    parser.add_argument("--hidden", type=int, nargs="+", default=HIDDEN)
    parser.add_argument("--batch", type=int, nargs="+", default=BATCH)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-sms", type=int)
    parser.add_argument("--designs", nargs="+", default=["units", "cluster", "narrow", "wide", "portable"])
    parser.add_argument("--most", type=int, help="only this many tiles of each design, the model's best")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parse(parser, arguments)
    if not options.measure:
        return record(options, arguments)
    measure_all(options, options.out.with_suffix(".journal"))
    return 0
