"""What commands share: the folder of a user's own recipes, and errors as messages."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ds2.config.schema import ConfigError
from ds2.system.errors import UserError
from ds2.system.stops import Stopped, stoppable

USER_ERROR = 2


def with_search_path(arguments: Sequence[str]) -> list[str]:
    """Turn `--config-dir DIR` into the Hydra override that both our check and the run understand."""
    remaining, folders = [], []
    pending = iter(arguments)
    for argument in pending:
        if argument in ("--config-dir", "-cd"):
            folders.append(next(pending, ""))
        elif argument.startswith("--config-dir="):
            folders.append(argument.split("=", 1)[1])
        else:
            remaining.append(argument)
    for folder in folders:
        if not Path(folder).is_dir():
            raise ConfigError(f"--config-dir {folder!r} is not a folder: give the one that holds your recipe/NAME.yaml")
    if folders:
        remaining.append(f"hydra.searchpath=[{','.join('file://' + str(Path(f).resolve()) for f in folders)}]")
    return remaining


def add_where(parser: argparse.ArgumentParser) -> None:
    """Declare where a model runs and in which precision."""
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    parser.add_argument(
        "--precision",
        default="auto",
        choices=["fp32", "bf16", "auto"],
        help="auto: on a GPU the precision that the model was trained in, on a CPU fp32",
    )


def report_errors(action: Callable[[], int]) -> int:
    """Run `action`; errors that a user can mend become one message and status 2, SIGTERM 143.

    Whatever else is raised keeps its traceback.
    """
    try:
        with stoppable():
            return action()
    except Stopped as stopped:
        print(f"ds2: stopped by {stopped}", file=sys.stderr)
        return stopped.status
    except (UserError, OSError) as error:
        from ds2.distributed.launch import yield_to_rank_0  # here: scoring two texts need not wait for torch

        yield_to_rank_0()
        print(f"ds2: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("ds2: interrupted", file=sys.stderr)
        return 130
