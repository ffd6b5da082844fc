"""Damage every kind of input of ds2 by seed, and count how ds2 reacts.

    python tools/fuzz.py inputs                                a few cases a reader: less than a minute
    python tools/fuzz.py inputs --cases 2000 --seed 7          longer
    python tools/fuzz.py inputs --only 'model file' --case 31  one case again, with its traceback

Each case damages one file and reads it in a forked process. Right outcomes: `named`, an error that a command prints as
one line; `same`, the reader returned what was written; `read`, it returned something else, and the format has no
checksum that could detect it. Faults: `wrong`, something else although the format has checksums; `traceback`, another
error; `died`; `hang`, longer than 30 s; `memory`, 1 GiB more than before. The exit status is 1 if there are faults.
"""

import logging
import multiprocessing
import os
import random
import shutil
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch
from dispatch import new_parser, parse
from fuzzing import files, server
from fuzzing.files import Target

from ds2.system import UserError

TARGETS = {target.name: target for target in (*files.TARGETS, *server.TARGETS)}
FAULTS = ("wrong", "traceback", "died", "hang", "memory")
HANG_S = 30.0
MEMORY_KIB = 1 << 20
_SHOWN = 300  # characters of a fault


@dataclass(frozen=True)
class Outcome:
    """How ds2 reacted to one case."""

    target: str
    case: int
    damage: str
    kind: str
    detail: str = ""

    def __str__(self) -> str:
        again = f"python tools/fuzz.py inputs --only {self.target!r} --case {self.case}"
        return f"{self.target}, {self.damage}: {self.kind}: {self.detail[:_SHOWN]} ({again})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases and print how many of each reader ended how."""
    parser = new_parser(__doc__)
    parser.add_argument("--cases", type=int, default=12, help="a reader (default 12)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", choices=list(TARGETS), help="these readers")
    parser.add_argument("--case", type=int, help="this case alone, in this process")
    options = parse(parser, arguments)
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)  # children are forked: no threads may have started
    targets = [TARGETS[name] for name in options.only or TARGETS]
    if options.case is not None:
        with tempfile.TemporaryDirectory(prefix="ds2-fuzz-") as folder:
            print(_Reader(targets[0], Path(folder), options.seed).run(options.case, raises=True))
        return 0
    started = time.monotonic()
    total, faults = Counter[str](), list[Outcome]()
    for target in targets:
        outcomes = list(run(target, options.cases, options.seed))
        counts = Counter(outcome.kind for outcome in outcomes)
        print(f"{target.name}: {dict(counts)}", flush=True)
        total += counts
        faults += [outcome for outcome in outcomes if outcome.kind in FAULTS]
    print(f"{total.total()} cases: {dict(total)}")
    print(f"seed {options.seed}, {time.monotonic() - started:.0f} s, commit {options.commit}")
    for fault in faults:
        print(f"- {fault}")
    return 1 if faults else 0


class _Reader:
    """A target with its undamaged files, and a folder in which one of them is damaged."""

    def __init__(self, target: Target, folder: Path, seed: int) -> None:
        self.target, self.folder, self.undamaged, self.seed = target, folder / "case", folder / "undamaged", seed
        self.folder.mkdir()  # where the files are made is where they are read: some hold paths
        target.make(self.folder)
        shutil.copytree(self.folder, self.undamaged)
        paths = sorted(self.undamaged.glob(target.only))
        self.files = [path.relative_to(self.undamaged) for path in paths if path.is_file()]
        self._expected: Any = None

    def run(self, case: int, *, raises: bool = False) -> Outcome:
        """Damage one file and read it."""
        if self._expected is None:  # read in this process: a reader may start threads, of which a fork takes none along
            self._expected = (self.target.read(self.folder),)
        draw = random.Random(f"{self.seed} {self.target.name} {case}")
        shutil.rmtree(self.folder)
        shutil.copytree(self.undamaged, self.folder)
        file, damage = draw.choice(self.files), draw.choice(self.target.damages)
        (self.folder / file).write_bytes(damage(draw, (self.undamaged / file).read_bytes()))
        name = damage.__name__.strip("_")
        before = _memory_kib("VmRSS", reset=True)
        try:
            same = (self.target.read(self.folder),) == self._expected
            kind, detail = "same" if same else "wrong" if self.target.checked else "read", ""
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
    """Read `cases` damaged files in a forked process; after each case that ends the process, fork another one."""
    with tempfile.TemporaryDirectory(prefix="ds2-fuzz-") as folder:
        reader = _Reader(target, Path(folder), seed)
        done = 0
        while done < cases:
            for outcome in _forked(reader, range(done, cases)):
                yield outcome
                done = outcome.case + 1


def _forked(reader: _Reader, cases: range) -> Iterator[Outcome]:
    context = multiprocessing.get_context("fork")
    source, sink = context.Pipe(duplex=False)
    child = context.Process(target=_work, args=(reader, cases, sink))
    child.start()
    sink.close()
    try:
        for case in cases:
            if not source.poll(HANG_S):
                yield Outcome(reader.target.name, case, "?", "hang", f"over {HANG_S:g} s")
                return
            try:
                outcome: Outcome = source.recv()
            except EOFError:
                yield Outcome(reader.target.name, case, "?", "died")
                return
            yield outcome
            if outcome.kind == "memory":
                return
    finally:
        child.kill()
        child.join()


def _work(reader: _Reader, cases: range, sink: Connection) -> NoReturn:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # decoders write there
    for case in cases:
        sink.send(reader.run(case))
    os._exit(0)
