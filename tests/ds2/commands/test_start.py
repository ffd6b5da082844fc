"""Commands start, and refuse, without what they may not need: torch takes seconds to import."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (["--help"], 0),
        (["train", "--help"], 0),
        (["train", "model.hiden=3"], 2),
        (["data", "split", "none.jsonl", "--out", "parts"], 2),
        (["wer", "none.txt", "none.txt"], 2),
    ],
    ids=["help", "keys", "wrong-key", "no-manifest", "no-text"],
)
def test_no_torch_before_it_is_needed(command: list[str], status: int) -> None:
    code = f"import sys\nfrom ds2.cli import main\nprint(main({command!r}), 'torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == f"{status} False", run.stderr
