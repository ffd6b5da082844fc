"""`ds2 version`: the version and commit of this copy."""

from collections.abc import Sequence

from ds2.commands.common import Parser
from ds2.system.machine import VERSION, git_commit


def make_parser() -> Parser:
    return Parser(prog="ds2 version", description="the version and commit of this copy")


def run(arguments: Sequence[str]) -> None:
    """Print the version and commit."""
    make_parser().parse_args(arguments)
    print(f"ds2 {VERSION} (commit {git_commit()})")
