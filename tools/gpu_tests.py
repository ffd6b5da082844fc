"""Run the tests that need a GPU, note which commit passed them, and say where the kernels have changed since.

    python tools/gpu_tests.py run              all of them, then tools/fuzz.py kernels with a fixed seed, on all GPUs
    python tools/gpu_tests.py run --two-gpus   those that need two GPUs
    python tools/gpu_tests.py check            what has not passed as it is now; `make lint` shows it, and never fails

`tests/gpu_passes.tsv` has a line for each kind of GPU and set of tests: the last pass, with digests of the CUDA sources
and of the Python that launches them. A run with a failure changes no line.
"""

import argparse
import csv
import datetime
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from xml.etree import ElementTree

from dispatch import new_parser, parse

from ds2.system.machine import usable_cores

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "gpu_passes.tsv"
FUZZ = ("kernels", "--seed", "0", "--seconds", "20")
ALL, TWO_GPUS = "gpu", "two_gpus"


@dataclass(frozen=True)
class Pass:
    """The last time that a set of tests passed on a kind of GPU."""

    gpu: str
    tests: str  # gpu, or two_gpus
    commit: str
    date: str  # UTC
    passed: str
    skipped: str
    seconds: str
    csrc: str  # digest of the CUDA sources
    python: str  # digest of the Python that makes, plans and launches kernels


def digests(root: Path = ROOT) -> dict[str, str]:
    """Return digests of `csrc` and of the `python` of ds2_ops, over names and contents."""
    package = root / "ops" / "ds2_ops"
    sums = {"csrc": hashlib.sha256(), "python": hashlib.sha256()}
    for file in sorted(package.rglob("*")):
        if not file.is_file() or "__pycache__" in file.parts:
            continue
        name = file.relative_to(package)
        part = sums["csrc" if name.parts[0] == "csrc" else "python"]
        part.update(name.as_posix().encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return {name: part.hexdigest()[:12] for name, part in sums.items()}


def read(path: Path) -> list[Pass]:
    """Return all lines of a record; none where there is no file."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [Pass(**row) for row in csv.DictReader(file, delimiter="\t")]


def note(path: Path, new: Pass) -> None:
    """Write a pass in place of the one before, of the same GPU and tests."""
    others = [old for old in read(path) if (old.gpu, old.tests) != (new.gpu, new.tests)]
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, [column.name for column in fields(Pass)], delimiter="\t", lineterminator="\n")
        table.writeheader()
        table.writerows(asdict(line) for line in sorted([*others, new], key=lambda line: (line.gpu, line.tests)))


def notices(lines: Iterable[Pass], now: dict[str, str]) -> list[str]:
    """Return what has changed since the last passes, one line each."""
    lines = list(lines)
    if not lines:
        return ["no pass of the GPU tests is on record: run make test-gpu on a machine with a GPU"]
    parts = {"csrc": "CUDA sources", "python": "the Python that launches kernels"}
    changed = [(line, [text for part, text in parts.items() if getattr(line, part) != now[part]]) for line in lines]
    return [
        f"{' and '.join(texts)} in ops/ds2_ops changed since {line.gpu} passed `make "
        f"{'test-two-gpus' if line.tests == TWO_GPUS else 'test-gpu'}` at {line.commit[:7]}, {line.date}"
        for line, texts in changed
        if texts
    ]


def counts(report: Path) -> tuple[int, int]:
    """Return how many tests of a JUnit report passed and were skipped."""
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    tests, failures, errors, skipped = (
        sum(int(suite.get(name, "0")) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    )
    return tests - failures - errors - skipped, skipped


def visible_gpus(count: int) -> list[str]:
    """Return the names of the GPUs that torch counts, as CUDA_VISIBLE_DEVICES has them or would have them."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(index) for index in range(count)] if names is None else names.split(",")[:count]


def run(options: argparse.Namespace) -> int:
    """Run the tests and note the pass; returns the exit status."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("the GPU tests need a CUDA GPU, which torch does not find here")
    began, before = time.monotonic(), digests()
    with tempfile.TemporaryDirectory(prefix="ds2-gpu-tests-") as folder:
        report = Path(folder) / "report.xml"
        mark = f"gpu and {TWO_GPUS}" if options.two_gpus else "gpu"
        gpus = visible_gpus(torch.cuda.device_count())
        processes = str(min(14 * len(gpus), usable_cores()))
        parallel = () if options.two_gpus else ("-n", processes, "--dist", "worksteal")  # or each takes both GPUs
        path = os.pathsep.join((str(ROOT), str(ROOT / "ops"), os.environ.get("PYTHONPATH", "")))
        environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        # -v: a run that is cut off, as where machines are lent by the minute, has named its failures by then.
        tests = [sys.executable, "-m", "pytest", "-v", "-m", mark, *parallel, f"--junitxml={report}"]
        status = subprocess.run(tests, cwd=ROOT, env=environment, check=False).returncode
        if not options.two_gpus:
            fuzz = [sys.executable, str(ROOT / "tools" / "fuzz.py"), *FUZZ, "--workers", processes]
            status = subprocess.run(fuzz, cwd=ROOT, env=environment, check=False).returncode or status
        passed, skipped = counts(report) if report.is_file() else (0, 0)
    seconds = time.monotonic() - began
    print(f"GPU tests: {passed} passed, {skipped} skipped, {seconds:.1f} s in all, status {status}")
    if status or not passed or digests() != before:
        print(f"{RECORD.relative_to(ROOT)} stays as it was: it has complete passes only")
        return status or int(not passed)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    facts = (options.commit, date, str(passed), str(skipped), f"{seconds:.0f}")
    gpu = " as ".join(filter(None, (torch.cuda.get_device_name(0), os.environ.get("DS2_OPS_CAPABILITY"))))
    note(RECORD, Pass(gpu, TWO_GPUS if options.two_gpus else ALL, *facts, **before))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command of the command line."""
    parser = new_parser(__doc__)
    parser.add_argument("command", choices=["run", "check"])
    parser.add_argument("--two-gpus", action="store_true", help="only the tests that need two GPUs")
    options = parser.parse_args(arguments)
    if options.command == "check":
        for notice in notices(read(RECORD), digests()):
            print(f"notice: {notice}")
        return 0
    return run(parse(parser, arguments))


if __name__ == "__main__":
    sys.exit(main())
