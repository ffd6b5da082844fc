"""The server in simulated time: its promises are kept, planted faults are found, and a seed replays a run."""

from __future__ import annotations

import os
import re

import pytest
from support.launch import tool


def simulate(*arguments: str, hash_seed: int = 0) -> str:
    """Run the tool; return what it prints."""
    done = tool("fuzz", "simulation", "--workers", "1", *arguments, hash_seed=str(hash_seed))
    assert done.returncode == 0, done.stdout
    return done.stdout


def digest(output: str) -> str:
    match = re.search(r"digest ([0-9a-f]{16})", output)
    assert match
    return match[1]


def test_no_seed_breaks_a_promise_and_each_replays() -> None:
    assert digest(simulate("--seeds", "60")) == digest(simulate("--seeds", "60", hash_seed=1))


@pytest.mark.slow
def test_more_seeds() -> None:
    simulate("--first", "1000", "--seeds", os.environ.get("DS2_SIMULATION_SEEDS", "2000"))


@pytest.mark.slow
def test_planted_faults_are_found() -> None:
    printed = simulate("--faults", "--seeds", "1000")
    assert "not found" not in printed
    assert printed.count(": seed ") >= 10, printed
