"""Processes that start in milliseconds: forked from one that has only imported ds2, or from the test."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ds2.cli import main
from ds2.lm import recurrent_training
from ds2.training.run_folder import sole_use

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["ds2.commands.lm", "ds2.lm.recurrent_training", "torch._dynamo"]
)  # which optimizers import


def exit_status(function: Callable[..., None], *arguments: Any) -> int:
    """Call a function of `tests/support` in a process of its own.

    Returns:
        The status of the process; -N if signal N ended it.
    """
    process = FORKS.Process(target=function, args=arguments)
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def kill_lm_training(steps: int, command: list[str]) -> None:
    """Run `ds2 lm train`; SIGKILL ends this process after so many steps."""
    original, remaining = recurrent_training.pad_texts, [steps]

    def pad_texts(*arguments: Any) -> Any:
        remaining[0] -= 1
        if remaining[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)

    recurrent_training.pad_texts = pad_texts
    raise SystemExit(main(command))


@contextmanager
def used_elsewhere(run_dir: Path, comm: Any) -> Iterator[BaseProcess]:
    """Another process, forked from this one, in which `comm`'s job uses a run folder until it is killed."""
    fork = multiprocessing.get_context("fork")
    held = fork.Event()

    def hold() -> None:
        with sole_use(run_dir, comm):
            held.set()
            time.sleep(3600)

    process = fork.Process(target=hold)
    process.start()
    try:
        held.wait()
        yield process
    finally:
        process.kill()
        process.join()
