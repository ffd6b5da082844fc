"""tools/reproduce.py: a table of tiny runs continues after kill -9, on another machine, and when a row fails."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
from reproduce import Reproduction, RowFailed, noise_scale, report
from reproduce_tables import TABLES, Shape
from support.paths import ROOT


@pytest.fixture
def command(tiny_overrides: list[str], tone_manifest: Path, tmp_path: Path) -> list[str]:
    """A table of tiny models, whose depths and skips are the rows' own."""
    theirs = ("model=", "optim", "run_dir", "model.depth", "model.skip")
    mine = [override for override in tiny_overrides if not override.startswith(theirs)]
    mine += ["model.hidden=8", "data.prepare=''"]
    return [
        sys.executable, str(ROOT / "tools" / "reproduce.py"), "table3", *mine, "--out", str(tmp_path / "table"),
        "--gpus", "cpu", "--epochs", "2", "--rates", "1e-4", "--test", str(tone_manifest),
    ]  # fmt: skip


def reproduce(command: list[str], *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*command, *more], capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.mark.slow
def test_a_killed_table_goes_on_and_a_row_that_fails_is_named(command: list[str], tmp_path: Path) -> None:
    runs, results = tmp_path / "table" / "runs", tmp_path / "table" / "results"
    endless = tmp_path / "endless.jsonl"  # to read it takes until the kill, however late that comes
    os.mkfifo(endless)
    killed = [*command[:-1], str(endless), "--rows", "8 layers"]
    with subprocess.Popen(killed, cwd=ROOT, start_new_session=True) as process:
        while not (runs / "8_layers-0.0001" / "trainer.safetensors").is_file():
            assert process.poll() is None
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    assert not results.is_dir()
    (runs / "24_layers-0.0001").mkdir()
    (runs / "24_layers-0.0001" / "trainer.safetensors").write_bytes(b"damaged")
    first = reproduce(command, "--rows", "24 layers", "8 layers")
    assert first.returncode == 1, first.stderr
    assert "24 layers: ds2 train ended with 2: " in first.stdout and "trainer.safetensors" in first.stdout
    result = json.loads((results / "8_layers.json").read_text())
    assert result["epochs"] == 2 and len(result["curve"]) == 1 and list(result["tests"]) == ["tones, greedy"]
    assert "## Table 3: depth, equal width" in first.stdout
    assert "| 8 layers | 35.69 |" in first.stdout
    assert "Missing rows, 5 of 6" in first.stdout and "- 40 layers: not run" in first.stdout

    shutil.rmtree(runs)  # another machine, to which only results came along
    second = reproduce(command, "--rows", "8 layers", "40 layers", "--stop-after-minutes", "1e-9")
    assert not runs.is_dir() or not list(runs.glob("8_layers*"))
    assert "| 8 layers | 35.69 |" in second.stdout and "- 40 layers: not started, the time was up" in second.stdout


def test_the_learning_rate_of_the_lowest_cost_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = TABLES["table1"](Shape(narrow=4))
    options = Namespace(stop_after_minutes=0, rates=[0.1, 0.2, 0.3], search_epochs=2, gpus=["cpu"], at_once=1)
    reproduction = Reproduction(table, tmp_path, options)
    costs = {0.1: 80.0, 0.2: 70.0}

    def train(row: object, rate: float, epochs: int) -> Path:
        if rate not in costs:
            raise RowFailed("nothing was learned")
        run = tmp_path / f"{rate}"
        run.mkdir(exist_ok=True)
        lines = [{"event": "train", "step": 1, "epoch": 2}, {"event": "dev", "step": 1, "loss": costs[rate]}]
        (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return run

    monkeypatch.setattr(reproduction, "train", train)
    assert reproduction.best_rate(table.rows[0]) == (0.2, {"0.1": 80.0, "0.2": 70.0})
    costs.clear()
    with pytest.raises(RowFailed, match=r"no learning rate of .* trained: nothing was learned"):
        reproduction.best_rate(table.rows[0])


def test_unfinished_rows_are_reported_though_a_kill_cut_a_line_short(tmp_path: Path) -> None:
    table = TABLES["table1"](Shape(narrow=4))
    options = Namespace(stop_after_minutes=0, rates=[0.1, 0.2], search_epochs=1, gpus=["cpu"], at_once=1)
    reproduction = Reproduction(table, tmp_path, options)
    for rate, steps in ((0.1, (7,)), (0.2, (7, 14))):
        run = tmp_path / "runs" / f"no_skip-{rate}"
        run.mkdir(parents=True)
        lines = [{"event": "train", "step": step, "epoch": 1, "step_s": 60.0} for step in steps]
        lines.append({"event": "dev", "step": steps[-1], "loss": 9.0, "wer": 0.5})
        (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"event": "tra')
    unfinished = reproduction.unfinished()
    assert list(unfinished) == ["no skip"]
    text = report(table, {}, unfinished, {"skip 1": "the disk is full"})
    assert "- no skip: started, epoch 1, step 14, dev WER 50.00 %, cost 9.0" in text
    assert "- skip 1: the disk is full" in text and "- skip 2: not run" in text


def test_a_row_s_noise_scale_is_not_that_of_its_last_steps() -> None:
    assert noise_scale([{"noise_scale": scale} for scale in (100.0, None, 300.0, 1e5)] + [{}]) == 300.0
    assert noise_scale([{"noise_scale": None}, {}]) is None


def test_an_unknown_row_is_refused(command: list[str]) -> None:
    refused = reproduce(command, "--rows", "9 layers")
    assert refused.returncode == 2 and "has no row ['9 layers']" in refused.stderr


def test_a_setting_that_is_the_rows_own_is_refused(command: list[str]) -> None:
    refused = reproduce([*command, "--narrow", "9", "model.depth=8"])
    assert refused.returncode == 2 and "model.depth=8 would undo what the rows differ in" in refused.stderr


@pytest.mark.parametrize(
    "option", [("--at-once", "0"), ("--narrow", "0"), ("--narrow", "nan"), ("--epochs", "-1"), ("--rates", "nan")]
)
def test_numbers_out_of_range_are_refused(command: list[str], option: tuple[str, str]) -> None:
    refused = reproduce(command, *option)
    assert refused.returncode == 2 and f"argument {option[0]}: {option[1]!r} is not allowed" in refused.stderr


def test_results_of_another_shape_are_not_reported_as_this_one(command: list[str], tmp_path: Path) -> None:
    other = tmp_path / "table" / "results" / "8_layers.json"
    other.parent.mkdir(parents=True)
    other.write_text(json.dumps({"settings": ["model.depth=8", "model.skip=4", "model.hidden=1152"]}))
    refused = reproduce(command, "--narrow", "9")
    assert refused.returncode == 2 and "8_layers.json was trained without" in refused.stderr
    assert "model.hidden=128" in refused.stderr and "another --out" in refused.stderr
