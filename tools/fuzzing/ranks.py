"""Kill, stop and start ranks of one training at random moments, and compare its losses to those of unbroken runs.

    python tools/fuzz.py ranks --runs 5 --seed 1
    python tools/fuzz.py ranks --runs 5 --device cuda --settings train.graphs=off      ranks share GPUs
    python tools/fuzz.py ranks --runs 5 --device cuda --ranks 2                        two GPUs: sums by NCCL

Each run trains with 1 to 4 ranks that come and go (comm.max_ranks). In each, rank 0 and another rank are killed, one is
stopped and one joins; what else happens is drawn. With even seeds all ranks write a part of each state. The log says
how many ranks took each step. The expected losses are those of trainings with a fixed number of ranks over Gloo, each
of which resumes where the one before was stopped. Every loss and every tensor of the last state must have the same
bits, every step must be there once, and no file may remain half written. The exit status is 1 if a run differs. Ranks
are forked: libraries load once.
"""

import gc
import json
import logging
import math
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from typing import Any

from dispatch import new_parser, parse, variables_of_ranks
from fuzzing.kills import corpus, last_output, trained, training_settings
from fuzzing.seeds import Fault

from ds2.commands.compose import compose_config
from ds2.distributed.nccl import NcclSums
from ds2.system.files import read_log
from ds2.training.loop import train
from ds2.training.trainer import Trainer

RANKS = 4
SILENT_S = 5.0  # comm.timeout_s: so long a rank is stopped before the others go on
LIMIT_S = 240.0  # of a run, a last resort
STEPS = ("batching.utterances=3", "train.epochs=24", f"comm.timeout_s={SILENT_S}")
ON_GPU = (  # a first step waits for a compiler
    "train.epochs=60", "train.evaluate_every_epochs=10", "comm.timeout_s=60", "device=cuda", "model.hidden=256",
)  # fmt: skip
GPU_PAUSES_S = 0.03, 1.2  # before each step while events are to come, in both halves of a run: steps are quick there
UNSETTLED = 0.05  # how often an event comes while processes start
PAUSE_S = (0.02, 0.5)  # from one event to the next
EVENTS = (4, 14)  # of a run
_EXPECTED = (0, 128 + signal.SIGTERM, -signal.SIGTERM, -signal.SIGKILL)  # SIGTERM may come before its handler is there
SIGNALS = {"kill": signal.SIGKILL, "kill rank 0": signal.SIGKILL, "stop": signal.SIGSTOP, "leave": signal.SIGTERM}
ONCE = ["kill rank 0", "kill", "stop", "join"]
DRAWN = ["kill"] * 5 + ["stop", "leave"] + ["join"] * 6


@dataclass
class RunCounts:
    """What was done to the runs, and how they ended."""

    events: Counter[str] = field(default_factory=Counter)
    equal: int = 0
    over_nccl: int = 0  # views of ranks that summed between GPUs
    faults: list[str] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trainings and print how many ended as the unbroken ones."""
    parser = new_parser(__doc__)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1, help="of the first run; the others follow it")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no further run begins")
    parser.add_argument("--ranks", type=int, default=RANKS, help="at most (default 4)")
    parser.add_argument("--events", type=int, default=EVENTS[1], help="of a run, at most (default 14, at least 4)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="ranks share GPUs as they are there")
    parser.add_argument("--settings", nargs="*", default=[], help="further overrides")
    parser.add_argument("--keep", type=Path, help="folder for what a run that fails has written")
    options = parse(parser, arguments)
    import torch._dynamo  # which optimizers import
    import torch.utils.tensorboard  # noqa: F401  both once, for all forked processes

    started, count, runs = time.monotonic(), RunCounts(), 0
    with tempfile.TemporaryDirectory(prefix="ds2-ranks-") as name:
        base = Path(name)
        settings = (*training_settings(base, corpus(base / "corpus")), *STEPS)
        settings += (*(ON_GPU if options.device == "cuda" else ()), *options.settings)
        gc.freeze()  # a rank that looked through all modules would copy their memory, for a second or more
        if options.device == "cuda":  # its kernels are compiled once, not by each rank
            (base / "compiled").mkdir()
            expected(base / "compiled", settings, {step: step for step in range(1, options.ranks + 1)})
        while runs < options.runs and time.monotonic() - started < options.seconds:
            seed, runs = options.seed + runs, runs + 1
            folder, sharded = base / str(seed), f"checkpoint.sharded={seed % 2 == 0}".lower()
            try:
                one_run(folder, (sharded, *settings), options, Random(seed), count)
            except Fault as fault:
                count.faults.append(f"seed {seed}: {fault}")
                print(count.faults[-1], file=sys.stderr)
                if options.keep is not None:
                    shutil.copytree(folder, options.keep / str(seed), dirs_exist_ok=True)
            so_far = f"up to seed {seed}: {count.equal} of {runs} equal, {dict(count.events)}"
            print(so_far, file=sys.stderr, flush=True)
            shutil.rmtree(folder)
    if options.device == "cuda":
        print(f"{count.over_nccl} times ranks met whose gradients then travelled {NcclSums.path}")
    print(f"seeds {options.seed} to {options.seed + runs - 1}, {time.monotonic() - started:.0f} s")
    print(f"commit {options.commit}", *(f"- {fault}" for fault in count.faults), sep="\n")
    return 1 if count.faults else 0


def one_run(folder: Path, settings: Sequence[str], options: Namespace, draw: Random, count: RunCounts) -> None:
    """Train once with ranks that come and go, and compare."""
    run_dir = folder / "broken" / "run"
    run_dir.parent.mkdir(parents=True)
    disturbed(run_dir, settings, options, draw, count)
    ranks = ranks_of_steps(run_dir)
    expected(folder, settings, ranks)
    if leftovers := [*run_dir.glob(".*.partial"), *run_dir.glob("members/*.json.new")]:
        raise Fault(f"left {leftovers}")
    (tensors, losses, models), whole = (trained(folder / name) for name in ("broken", "whole"))
    differing = [step for step in sorted({*losses, *whole[1]}) if losses.get(step) != whole[1].get(step)]
    if differing:
        raise Fault(f"the losses of steps {differing[:9]} differ; ranks {changes(ranks)}")
    if (tensors, models) != (whole[0], whole[2]):
        raise Fault(f"the last state or the models differ; ranks {changes(ranks)}")
    count.equal += 1


def disturbed(run_dir: Path, settings: Sequence[str], options: Namespace, draw: Random, count: RunCounts) -> None:
    """Train to the end while processes are killed, stopped, asked to leave and started."""
    run = (*settings, f"comm.max_ranks={options.ranks}", f"run_dir={run_dir}")
    folder, began = run_dir.parents[1], time.monotonic()
    output = folder / "output.txt"
    slow = folder / "slow"  # while this file is there
    slow.touch()
    start_one = partial(start, run, output, slow=slow if options.device == "cuda" else None)
    running = [start_one() for _ in range(draw.randint(1, options.ranks))]
    stopped: list[tuple[float, BaseProcess]] = []  # until when, and who
    events, once = draw.randint(EVENTS[0], max(options.events, EVENTS[0])), list(ONCE)
    done = False
    while not done or running or stopped:
        time.sleep(draw.uniform(*PAUSE_S))
        for due in [entry for entry in stopped if entry[0] < time.monotonic()]:
            stopped.remove(due)
            os.kill(due[1].pid, signal.SIGCONT)
            running.append(due[1])
        statuses = {process.exitcode for process in running}
        done |= 0 in statuses
        running = [process for process in running if process.exitcode is None]
        failed = [status for status in statuses if status not in (None, *_EXPECTED)]
        if failed or time.monotonic() - began > LIMIT_S:
            for process in (*running, *(process for _, process in stopped)):
                process.kill()
                process.join()
            why = f"a rank ended with status {failed[0]}" if failed else f"not done after {LIMIT_S:.0f} s"
            raise Fault(f"{why}: {last_output(folder)}")
        if not (done or running or stopped):  # one has to finish
            running.append(start_one())
        by_number = {process.pid: process for process in running}
        ranks = [by_number[number] for number in _ranks(run_dir) if number in by_number]
        # Processes take seconds to become ranks, and seconds more until NCCL has connected them.
        settled = (
            len(ranks) == len(running) and (options.device == "cpu" or took_a_step(run_dir, len(ranks)))
        ) or draw.random() < UNSETTLED
        if not (events and ranks and settled):
            continue
        full = len(running) + len(stopped) >= options.ranks
        event = next_event(draw, once, alone=len(ranks) == 1, full=full)
        kind, number = event.removesuffix(" rank 0"), SIGNALS.get(event)
        if number is None and not full:
            running.append(start_one())
        elif number is not None:
            process = ranks[0] if event != kind else draw.choice(ranks if draw.random() < 0.9 else running)
            os.kill(process.pid, number)
            if number == signal.SIGSTOP:
                stopped.append((time.monotonic() + draw.uniform(0.1, 2 * SILENT_S), process))
                running.remove(process)
        else:
            continue
        events = max(events - 1, len(once))
        count.events[kind] += 1
        if not events:
            slow.unlink()
    count.over_nccl += output.read_text(errors="replace").count(f"travel {NcclSums.path}\n")


def next_event(draw: Random, once: list[str], *, alone: bool, full: bool) -> str:
    """Draw what happens next; what has to happen once comes first, among several ranks."""
    due = [event for event in once if event != "join" or not full]
    event = "join" if once and alone else draw.choice(due or DRAWN)
    if event in due:
        once.remove(event)
    return event


def _ranks(run_dir: Path) -> list[int]:
    """The processes that are ranks now, in order of rank."""
    views = sorted((run_dir / "members").glob("view-*.json"))
    with suppress(FileNotFoundError):  # the next one has come
        return [member["process"] for member in json.loads(views[-1].read_text())["members"]] if views else []
    return []


def took_a_step(run_dir: Path, ranks: int) -> bool:
    """Whether the last step was one of so many ranks, since they met."""
    lines = [line for line in read_log(run_dir / "log.jsonl") if line["event"] in ("start", "resume", "ranks", "train")]
    return bool(lines) and lines[-1]["event"] == "train" and lines[-1]["ranks"] == ranks


def expected(folder: Path, settings: Sequence[str], ranks: dict[int, int]) -> None:
    """Train the same steps with as many ranks each, without a rank that comes or goes."""
    run = (*settings, f"run_dir={folder / 'whole' / 'run'}")
    for world, steps in groupby(sorted(ranks), ranks.__getitem__):
        last = max(steps)
        job = [f"train.max_steps={last}", "comm=gloo" if world > 1 else "comm=single"]
        environments = variables_of_ranks(world) if world > 1 else [{}]
        for process in [start((*run, *job), folder / "whole.txt", environment) for environment in environments]:
            process.join()
            if process.exitcode:
                why = last_output(folder, "whole.txt")
                raise Fault(f"the run with {world} ranks up to step {last} ended with {process.exitcode}: {why}")


def ranks_of_steps(run_dir: Path) -> dict[int, int]:
    """How many ranks took each step of the curve; a step that is repeated counts as its last time."""
    ranks: dict[int, int] = {}
    for line in read_log(run_dir / "log.jsonl"):
        if line["event"] in ("start", "resume", "ranks"):
            ranks = {step: of for step, of in ranks.items() if step <= line["step"]}
        elif line["event"] == "train":
            ranks[line["step"]] = line["ranks"]  # not those of the last group, if who took over writes the line again
    if list(ranks) != list(range(1, len(ranks) + 1)):
        raise Fault(f"steps are missing or repeated, ranks {changes(ranks)}")
    return ranks


def changes(ranks: dict[int, int]) -> dict[int, int]:
    """The steps from which on another number of ranks took part, with that number."""
    return {step: world for step, world in ranks.items() if ranks.get(step - 1) != world}


def start(
    settings: Sequence[str], output: Path, environment: Mapping[str, str] | None = None, slow: Path | None = None
) -> BaseProcess:
    """Fork a process that trains, slowly while there is a file `slow`."""
    process = multiprocessing.get_context("fork").Process(target=_train, args=(settings, output, environment, slow))
    process.start()
    return process


def _train(settings: Sequence[str], output: Path, environment: Mapping[str, str] | None, slow: Path | None) -> None:
    with output.open("ab", 0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    logging.basicConfig(format="%(asctime)s %(process)d %(message)s", level=logging.INFO, force=True)
    os.environ.update(environment or {})
    healthy = Trainer.step

    def step(self: Trainer, *arguments: Any) -> float | None:
        if slow is not None and slow.exists():
            time.sleep(GPU_PAUSES_S[2 * self.progress.epoch > self.config.train.epochs])
        return healthy(self, *arguments)

    Trainer.step = step
    config = compose_config(list(settings))
    sys.exit(train(config, Path(config.run_dir)))
