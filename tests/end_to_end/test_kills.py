"""After any number of kill -9 the same command ends with what the unbroken run ends with; see tools/fuzz.py kills.

DS2_KILLS=40 kills each work so often.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.launch import tool

KILLS = os.environ.get("DS2_KILLS", "2")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the processes of a job in /proc")
@pytest.mark.parametrize(
    "works",
    [
        pytest.param(("train",), id="train"),
        pytest.param(("fine-tuning", "export", "evaluate"), id="what needs a model"),  # trained once
        pytest.param(("lm build", "lm train", "data prepare", "audio cache"), id="what needs none"),
    ],
)
def test_chains_of_kills_end_as_the_unbroken_run(works: tuple[str, ...]) -> None:
    done = tool("fuzz", "kills", "--kills", KILLS, "--only", *works)
    assert done.returncode == 0, done.stdout
    assert all(f"| {work} | {KILLS} |" in done.stdout for work in works), done.stdout
