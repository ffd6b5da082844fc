"""A stored position in an epoch, after data or batching have changed."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

from ds2.config.schema import Config
from ds2.data.manifest import Utterance
from ds2.system.tensor_file import load, save
from ds2.training.loop import train
from ds2.training.position import plan_fingerprint, settle
from ds2.training.state import Progress

MakeConfig = Callable[..., Config]
UTTERANCES = [Utterance(Path(f"/x/{i}.wav"), 1.0 + i, "a") for i in range(6)]
PLAN = [[0, 1], [2, 3], [4, 5]]


def at(batch: int, plan: str = "") -> Progress:
    return Progress(epoch=2, batch=batch, step=9, plan=plan, batches=3)


def test_the_same_plan_keeps_the_position_wherever_the_audio_lies(caplog: pytest.LogCaptureFixture) -> None:
    progress = at(2, plan_fingerprint(PLAN, UTTERANCES))
    moved = [Utterance(Path(f"/elsewhere/{i}.wav"), 1.0 + i, "corrected") for i in range(6)]
    settle(progress, PLAN, moved)
    assert progress.batch == 2 and not caplog.text


@pytest.mark.parametrize("plan", [[[0, 1, 2], [3, 4, 5]], [[0, 1], [2, 3]], [[2, 3], [0, 1], [4, 5]]])
def test_another_plan_begins_the_epoch_again_and_says_so(
    plan: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    progress = at(2, plan_fingerprint(PLAN, UTTERANCES))
    settle(progress, plan, UTTERANCES)
    assert (progress.epoch, progress.batch, progress.step, progress.batches) == (2, 0, 9, len(plan))
    assert "epoch 2 begins again: it was stopped after batch 2 of another plan" in caplog.text
    assert progress.plan == plan_fingerprint(plan, UTTERANCES)


def test_an_epoch_that_had_ended_stays_ended_under_another_plan(caplog: pytest.LogCaptureFixture) -> None:
    progress = at(3, plan_fingerprint(PLAN, UTTERANCES))
    settle(progress, [[0, 1, 2, 3, 4, 5]], UTTERANCES)
    assert progress.batch == 1 and not caplog.text


def test_a_state_without_a_plan_keeps_a_position_that_exists() -> None:
    old = Progress(epoch=2, batch=3)
    settle(old, PLAN, UTTERANCES)
    assert old.batch == 3
    beyond = Progress(epoch=2, batch=4)
    settle(beyond, PLAN, UTTERANCES)
    assert beyond.batch == 0


@pytest.mark.parametrize("noted", [True, False], ids=["as-written", "of-before-plans-were-noted"])
def test_a_run_goes_on_with_larger_batches_and_ends(
    tiny_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture, noted: bool
) -> None:
    run_dir = tmp_path / "run"
    train(tiny_config("train.max_steps=2"), run_dir)  # 2 of 3 batches
    if not noted:
        tensors, metadata = load(run_dir / "trainer.safetensors")
        del metadata["progress"]["plan"], metadata["progress"]["batches"]
        save(run_dir / "trainer.safetensors", tensors, metadata)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert train(tiny_config("batching.utterances=10", "train.epochs=2"), run_dir) == 0
    assert caplog.text.count("begins again") == 1
    with safe_open(run_dir / "trainer.safetensors", "pt") as opened:
        progress = json.loads(opened.metadata()["ds2"])["progress"]
    assert (progress["epoch"], progress["step"]) == (3, 4)
