"""Figures of tools/bench_rnn.py: every size of every width, kept with a plot; options that contradict each other."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/bench_rnn.py"), "--device", "cpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_figure_of_two_widths(tmp_path: Path) -> None:
    done = _run("--figure", "frames", "--hidden", "8", "16", "--contenders", "cpu", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rnn_frames.json").read_text())["rows"]
    sizes = [(row["hidden"], row["frames"]) for row in rows]
    assert sizes == [(hidden, frames) for hidden in (8, 16) for frames in (1, 3, 10, 30, 100, 300, 1000)]
    assert all(row["forward_us"][0] > 0 and row["both_us"][0] > row["forward_us"][0] for row in rows)
    assert (tmp_path / "rnn_frames.png").stat().st_size > 0


def test_a_figure_has_its_own_batches() -> None:
    done = _run("--figure", "batch", "--hidden", "8", "--batch", "4")
    assert done.returncode == 2
    assert "--figure has batches of its own" in done.stderr
