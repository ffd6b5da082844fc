"""Starts scripts under the mpirun or torchrun of this Python's environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import dispatch

from support.paths import ROOT

SUPPORT = Path(__file__).parent
TIMEOUT_S = 1200  # a last resort against jobs that hang, far above what a busy machine takes


def mpirun(
    ranks: int, script: str, *arguments: str, options: tuple[str, ...] = (), timeout_s: float = TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """Run `script` of this folder on so many ranks of this host; standard error is joined to standard output."""
    command = [*mpirun_command(ranks, *options), str(SUPPORT / script), *arguments]
    return started(command, dispatch.MPI_AS_ROOT, timeout_s)


def mpirun_command(ranks: int, *options: str) -> list[str]:
    """The words before a script: mpirun, its options, this Python."""
    launcher = dispatch.mpirun()
    assert shutil.which(launcher), "the tests of several ranks need mpirun: pip install -e '.[dev]'"
    return [launcher, "-n", str(ranks), "--oversubscribe", *options, sys.executable]


def tool(name: str, *arguments: str, hash_seed: str = "random") -> subprocess.CompletedProcess[str]:
    """Run tools/NAME.py in a process of its own; standard error is joined to standard output."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "ops", os.environ.get("PYTHONPATH", ""))))
    command = [sys.executable, str(ROOT / "tools" / f"{name}.py"), *arguments]
    return started(command, {"PYTHONPATH": path, "PYTHONHASHSEED": hash_seed}, timeout_s=None)


def torchrun(
    ranks: int, script: str, *arguments: str, options: tuple[str, ...] = (), timeout_s: float = TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """The same under torchrun, on a port of its own; it ends with 1 whatever status its ranks had."""
    alone = () if options else ("--standalone",)
    command = [sys.executable, "-m", "torch.distributed.run", *alone, "--nproc-per-node", str(ranks), *options]
    return started([*command, str(SUPPORT / script), *arguments], {}, timeout_s)


def started(
    command: list[str], environment: dict[str, str], timeout_s: float | None = TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """Run a command with further variables; standard error is joined to standard output."""
    return subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, encoding="utf-8", errors="replace", timeout=timeout_s, check=False,
    )  # fmt: skip
