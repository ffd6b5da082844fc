"""`tools/bench.py turns`: source trees that train in turns differ by time and by the bits of their gradients."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.launch import TIMEOUT_S

ROOT = Path(__file__).resolve().parents[2]
TOOL = [sys.executable, str(ROOT / "tools" / "bench.py"), "turns"]
TINY = (
    "--model", "rnn_8", "--batch", "2", "--duration", "0.5", "--turns", "3", "--steps", "2", "--warmup", "1",
    "--device", "cpu", "model.hidden=8", "model.depth=1",
)  # fmt: skip
# A step that takes 5 s longer, by a clock that no busy machine moves.
LATER = "        time.perf_counter = lambda was=time.perf_counter: was() + 5\n"


def changed(folder: Path, name: str, old: str, new: str) -> Path:
    """A copy of the sources with a change in one file."""
    for part in ("conf", "ds2", "ops"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    text = (folder / name).read_text(encoding="utf-8")
    assert text.count(old) == 1
    (folder / name).write_text(text.replace(old, new), encoding="utf-8")
    return folder


@pytest.mark.slow
def test_a_slower_tree_and_one_of_other_gradients_are_seen(tmp_path: Path) -> None:
    begin = "        self.overlap.start_step()\n"
    slower = changed(tmp_path / "slower", "ds2/training/trainer.py", begin, begin + LATER)
    mean = "objective.sum() / utterances"
    other = changed(tmp_path / "other", "ds2/training/passes.py", mean, f"1.5 * {mean}")
    trees = [str(path) for path in (ROOT, slower, other)]
    command = [*TOOL, *TINY, "--tree", *trees]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    heading, _, *rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()]
    cells = {name: [row[column] for row in rows] for column, name in enumerate(heading)}
    assert cells["tree"] == trees and cells["gradients"] == ["same", "same", "other"]
    step_ms, ratios = (list(map(float, cells[name])) for name in ("step ms", "ratio"))
    assert ratios[0] == 1.0 < ratios[1] and step_ms[1] >= 5000.0


def test_a_folder_without_sources_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        importlib.import_module("benchmarks.turns").main([*TINY, "--tree", str(tmp_path)])
    assert refused.value.code == 2 and "holds no sources" in capsys.readouterr().err
