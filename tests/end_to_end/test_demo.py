"""The demo trains on two ranks of one machine, where this has two cores and no GPU, and ends as its training ends."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from support.launch import started, tool
from support.paths import ROOT

from ds2.system.machine import usable_cores

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available() or usable_cores() < 2, reason="two ranks need two cores and no GPU"),
]
# The demo with a corpus of few utterances: to make all takes longer than the rest.
SMALL = (
    "import sys, demo; from ds2.data.corpora import synthetic;"
    "synthetic.UTTERANCES.update(train=4, dev=4, test=4); sys.exit(demo.main())"
)


def test_the_demo_trains_on_two_ranks_and_evaluates(tiny_overrides: list[str], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = [sys.executable, "-c", SMALL, "--run-dir", str(run_dir), *tiny_overrides, "train.epochs=1"]
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "ops", ROOT / "tools")))
    run = started(words, {"PYTHONPATH": paths})
    assert run.returncode == 0, run.stdout
    assert len(list(tmp_path.glob("work/**/train-*.wav"))) == 4
    assert "2 ranks over gloo" in run.stdout and run.stdout.count("epoch 1: dev WER") == 1
    assert (run_dir / "ranks" / "rank-0001.log").is_file()
    assert "demo: finished in" in run.stdout and (run_dir / "best.safetensors").is_file()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [("train.epoch=1", "did you mean 'train.epochs'?"), ("train.freeze=[all]", "train.freeze has ['all']")],
)  # found before and after the ranks know each other
def test_the_demo_ends_with_the_status_of_its_training_and_one_message(
    wrong: str, message: str, tiny_overrides: list[str], tmp_path: Path
) -> None:
    run = tool("demo", "--run-dir", str(tmp_path / "run"), *tiny_overrides, wrong)
    assert run.returncode == 2, run.stdout
    assert run.stdout.count(message) == 1 and "demo: finished" not in run.stdout


@pytest.mark.parametrize("by_variable", [False, True])
def test_a_folder_without_an4_is_refused(by_variable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS2_AN4", str(tmp_path) if by_variable else "")
    run = tool("demo", *(() if by_variable else ("--an4", str(tmp_path))))
    assert run.returncode == 1 and f"{tmp_path} is not an AN4 folder" in run.stdout and "etc/ and wav/" in run.stdout
