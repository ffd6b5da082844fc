"""Damage every kind of input of ds2 by seed and count what becomes of it.

    python tools/fuzz.py                                a few cases a reader: less than a minute
    python tools/fuzz.py --cases 2000 --seed 7          longer; the table is what docs/results/reliability.md shows
    python tools/fuzz.py --only 'model file' --case 31  one case again, with its traceback

Each case damages one file and reads it in a process of its own kind. Outcomes that are right: `named`, an error that a
command prints as one line; `same`, what was read is what was written; `read`, something else was read, where nothing in
the format could tell. Faults: `wrong`, something else although checksums must tell; `traceback`, another error; `died`;
`hang`, longer than 30 s; `memory`, 1 GiB more than before. The exit status is 1 if there are any.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import select
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import fuzz_files
import fuzz_serving
import fuzz_targets
import torch
from fuzz_targets import Target

from ds2.system.errors import UserError
from ds2.system.machine import git_commit

TARGETS = {**fuzz_targets.TARGETS, **fuzz_files.TARGETS, **fuzz_serving.TARGETS}
RIGHT, FAULTS = ("named", "same", "read"), ("wrong", "traceback", "died", "hang", "memory")
HANG_S = 30.0
MEMORY_KIB = 1 << 20
_SHOWN = 300  # characters of a fault


@dataclass(frozen=True)
class Outcome:
    """What became of one case."""

    target: str
    case: int
    damage: str
    kind: str
    detail: str = ""

    def __str__(self) -> str:
        again = f"python tools/fuzz.py --only {self.target!r} --case {self.case}"
        return f"{self.target}, {self.damage}: {self.kind}: {self.detail[:_SHOWN]} ({again})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases and print the table of counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=12, help="a reader (default 12)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", choices=list(TARGETS), help="these readers")
    parser.add_argument("--case", type=int, help="this case alone, in this process")
    parser.add_argument("--faults", type=Path, help="write each fault there as a line")
    given = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)  # children are forked: no threads may have started
    targets = [TARGETS[name] for name in given.only or TARGETS]
    if given.case is not None:
        with tempfile.TemporaryDirectory(prefix="ds2-fuzz-") as folder:
            print(_Bench(targets[0], Path(folder), given.seed).run(given.case, raises=True))
        return 0
    started = time.monotonic()
    outcomes = []
    for target in targets:
        outcomes += run(target, given.cases, given.seed)
        print(f"{target.name}: {dict(Counter(o.kind for o in outcomes if o.target == target.name))}", file=sys.stderr)
    faults = [outcome for outcome in outcomes if outcome.kind in FAULTS]
    if given.faults:
        given.faults.write_text("".join(f"{fault}\n" for fault in faults), encoding="utf-8", errors="replace")
    print(f"{len(outcomes)} cases, seed {given.seed}, {time.monotonic() - started:.0f} s, commit {git_commit()}\n")
    print(table(outcomes))
    for fault in faults:
        print(f"- {fault}")
    return 1 if faults else 0


def table(outcomes: Sequence[Outcome]) -> str:
    """The counts as a Markdown table."""
    lines = [f"| input | cases | {' | '.join(RIGHT + FAULTS)} |", "|---|" + "---:|" * (1 + len(RIGHT + FAULTS))]
    names = list(dict.fromkeys(outcome.target for outcome in outcomes))
    for name in [*names, "all"]:
        counts = Counter(outcome.kind for outcome in outcomes if name in (outcome.target, "all"))
        cells = " | ".join(str(counts[kind]) for kind in RIGHT + FAULTS)
        lines.append(f"| {name} | {sum(counts.values())} | {cells} |")
    return "\n".join(lines) + "\n"


class _Bench:
    """The whole files of a target, and a folder in which one of them is damaged."""

    def __init__(self, target: Target, folder: Path, seed: int) -> None:
        self.target, self.folder, self.whole, self.seed = target, folder / "case", folder / "whole", seed
        self.folder.mkdir()  # where the files are made is where they are read: some hold paths
        target.make(self.folder)
        shutil.copytree(self.folder, self.whole)
        self.files = [path.relative_to(self.whole) for path in sorted(self.whole.glob(target.only)) if path.is_file()]
        self._expected: Any = None

    def run(self, case: int, *, raises: bool = False) -> Outcome:
        """Damage one file and read it."""
        if self._expected is None:  # read in this process: a reader may start threads, of which a fork takes none along
            self._expected = (self.target.read(self.folder),)
        draw = random.Random(f"{self.seed} {self.target.name} {case}")
        shutil.rmtree(self.folder)
        shutil.copytree(self.whole, self.folder)
        file, damage = draw.choice(self.files), draw.choice(self.target.damages)
        (self.folder / file).write_bytes(damage(draw, (self.whole / file).read_bytes()))
        name = damage.__name__.strip("_")
        before = _memory_kib("VmRSS", reset=True)
        try:
            kind, detail = self._read()
        except (UserError, OSError) as error:
            kind, detail = "named", str(error)
        except Exception as error:
            if raises:
                raise
            last = traceback.extract_tb(error.__traceback__)[-1]
            kind, detail = "traceback", f"{type(error).__name__}: {error} at {Path(last.filename).name}:{last.lineno}"
        if (grown := _memory_kib("VmHWM") - before) > MEMORY_KIB:
            kind, detail = "memory", f"{grown >> 10} MiB, then {kind}: {detail}"
        return Outcome(self.target.name, case, name, kind, detail)

    def _read(self) -> tuple[str, str]:
        got = self.target.read(self.folder)
        if (got,) == self._expected:
            return "same", ""
        return ("wrong", "the damage was not seen") if self.target.checked else ("read", "")


def _memory_kib(line: str, *, reset: bool = False) -> int:
    """A value of /proc/self/status, 0 where there is none; `reset` begins a new high-water mark."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return int(status.split(f"{line}:")[1].split()[0])


def run(target: Target, cases: int, seed: int) -> Iterator[Outcome]:
    """Read so many damaged files in a forked process, and in another one after each that it does not survive."""
    with tempfile.TemporaryDirectory(prefix="ds2-fuzz-") as folder:
        bench = _Bench(target, Path(folder), seed)
        done = 0
        while done < cases:
            for outcome in _forked(bench, range(done, cases)):
                yield outcome
                done = outcome.case + 1


def _forked(bench: _Bench, cases: range) -> Iterator[Outcome]:
    source, sink = os.pipe()
    child = os.fork()
    if not child:
        os.close(source)
        _work(bench, cases, sink)
    os.close(sink)
    pending, case = b"", cases.start
    try:
        with os.fdopen(source, "rb", buffering=0) as results:
            while case < cases.stop:
                if not select.select([results], [], [], HANG_S)[0]:
                    yield Outcome(bench.target.name, case, "?", "hang", f"over {HANG_S:g} s")
                    return
                part = results.read(1 << 16)
                if not part:
                    yield Outcome(bench.target.name, case, "?", "died", "")
                    return
                *lines, pending = (pending + part).split(b"\n")
                for line in lines:
                    outcome = Outcome(*json.loads(line))
                    yield outcome
                    case = outcome.case + 1
                    if outcome.kind == "memory":
                        return
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def _work(bench: _Bench, cases: range, sink: int) -> NoReturn:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # decoders write there
    for case in cases:
        o = bench.run(case)
        os.write(sink, json.dumps([o.target, o.case, o.damage, o.kind, o.detail[:_SHOWN]]).encode() + b"\n")
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
