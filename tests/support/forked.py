"""Processes that start in milliseconds: each is forked from one that has imported ds2 and computed nothing."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

from ds2.cli import main
from ds2.lm import recurrent_training

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
