"""One command of ds2 as a process, this file, that ends with the table, and when the table's time is up."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from reproduce_log import so_far

from ds2 import cli
from ds2.system.signals import die_with_parent

_LINES_OF_AN_ERROR = 3
_SAVING_S = 12  # that a run has to save when the time is up, and anything else to end


class RowFailed(Exception):
    """A command of a row did not end well; says which and how."""


class TimeUp(RowFailed):
    """A command was stopped, or not begun, for want of time."""


def run_command(arguments: Sequence[str], gpu: str, run_dir: Path, stop_at: float) -> None:
    """Run a command of ds2 on a GPU; it ends with this process, and when the time is up.

    Args:
        arguments: of ds2.
        gpu: its number, or cpu.
        run_dir: of the run; `output.txt` there gets what the command prints.
        stop_at: when it is stopped, by `time.monotonic`.

    Raises:
        RowFailed: its status was not 0.
        TimeUp: it was stopped, or not begun.
    """
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu} if gpu != "cpu" else None
    run_dir.mkdir(parents=True, exist_ok=True)
    log = run_dir / "output.txt"
    with log.open("a", encoding="utf-8") as output:
        left_s = stop_at - time.monotonic()
        if left_s <= 0:
            raise TimeUp("not begun, the time was up")
        with subprocess.Popen(
            [sys.executable, __file__, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        ) as process:
            try:
                status = process.wait(None if left_s == float("inf") else left_s)
            except subprocess.TimeoutExpired:
                _end(process)
                raise TimeUp(f"stopped when the time was up: {so_far(run_dir)}") from None
    if status:
        said = [line for line in log.read_text(encoding="utf-8").splitlines() if line.strip()]
        raise RowFailed(f"ds2 {arguments[0]} ended with {status}: {' | '.join(said[-_LINES_OF_AN_ERROR:])} ({log})")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_SAVING_S)
    except subprocess.TimeoutExpired:  # it goes on from its last save
        process.kill()


if __name__ == "__main__":
    die_with_parent()  # a run must not outlive the table
    sys.exit(cli.main())
