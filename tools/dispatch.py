"""Commands of a tool, each in a module that is imported only when it runs; launchers; the commit of a result."""

import argparse
import importlib
import json
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds2.system.machine import git_commit, quick_imports


def dispatch(package: str, commands: Sequence[str], description: str | None) -> int | None:
    """Run the command that the first word of the command line names; `description` is what `--help` shows.

    The package has a module for each, with _ for -, whose `main(arguments)` parses the rest and returns the status.
    """
    command, *arguments = sys.argv[1:] or [""]
    if command in commands:
        sys.argv[0] += f" {command}"  # argparse names the program by it
        with quick_imports():
            module = importlib.import_module(f"{package}.{command.replace('-', '_')}")
        return module.main(arguments)
    parser = plain_parser(description)
    parser.add_argument("command", choices=commands)
    parser.parse_args()  # shows the help, or says that the command is missing or unknown
    return 2


def plain_parser(description: str | None) -> argparse.ArgumentParser:
    """Make a parser whose help shows a docstring as it is."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def new_parser(description: str | None) -> argparse.ArgumentParser:
    """Make a parser with `--commit`, for source trees without git."""
    parser = plain_parser(description)
    parser.add_argument("--commit", default="", help="commit of this source tree, where it is not a git repository")
    return parser


MPI_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # which Open MPI refuses else


def mpirun() -> str:
    """The mpirun that is installed beside this Python, or else the one on the path."""
    installed = Path(sys.executable).with_name("mpirun")
    return str(installed) if installed.is_file() else shutil.which("mpirun") or "mpirun"


def variables_of_ranks(world: int) -> list[dict[str, str]]:
    """Return the variables of each rank on this machine, as torchrun sets them, with a port that is free now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [{**group, "RANK": str(rank)} for rank in range(world)]


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line; `commit` becomes that of the source tree, and a tree of an unknown commit is an error."""
    options = parser.parse_intermixed_args(arguments)
    options.commit = options.commit or git_commit()
    if options.commit == "unknown":
        parser.error("the commit is unknown, as these sources are not in a git repository: name it with --commit")
    return options


def read_result(path: Path) -> dict[str, Any]:
    """Read a result, a JSON object; raises ValueError where it does not name its commit."""
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if result.get("git_commit", "unknown") == "unknown":
        raise ValueError(f"{path} does not name the commit that it was measured at: add git_commit, or measure again")
    return result
