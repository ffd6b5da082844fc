"""Figures of `tools/bench.py rnn`: every size of every width, with a plot and the commit; options that contradict."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/bench.py"), "rnn", "--device", "cpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_figure_of_two_widths(tmp_path: Path) -> None:
    done = _run(
        "--figure",
        "frames",
        "--hidden",
        "8",
        "16",
        "--contenders",
        "cpu",
        "--out",
        str(tmp_path),
        "--commit",
        "abc1234",
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "rnn_frames.json").read_text())
    rows = result["rows"]
    assert result["git_commit"] == "abc1234"
    sizes = [(row["hidden"], row["frames"]) for row in rows]
    assert sizes == [(hidden, frames) for hidden in (8, 16) for frames in (1, 3, 10, 30, 100, 300, 1000)]
    assert all(row["forward_us"][0] > 0 and row["both_us"][0] > row["forward_us"][0] for row in rows)
    assert (tmp_path / "rnn_frames.png").stat().st_size > 0


def test_a_figure_has_its_own_batches() -> None:
    done = _run("--figure", "batch", "--hidden", "8", "--batch", "4", "--commit", "abc1234")
    assert done.returncode == 2
    assert "--figure has batches of its own" in done.stderr


def test_a_result_of_an_unknown_commit_is_refused() -> None:
    script = (
        "import sys; sys.path[:0] = [sys.argv[1]]; import dispatch; from benchmarks import common;"
        "dispatch.git_commit = lambda: 'unknown'; common.parse(common.new_parser(None), sys.argv[2:])"
    )
    command = [sys.executable, "-c", script, str(ROOT / "tools")]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "name it with --commit" in refused.stderr
    named = subprocess.run([*command, "--commit", "abc1234"], capture_output=True, text=True, check=False)
    assert named.returncode == 0, named.stderr
