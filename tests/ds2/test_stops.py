"""Signals: saved once and agreed on however often they come, hasty only for Ctrl-C twice; an evaluation cut short."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds2.checkpoint import load
from ds2.config import Config
from ds2.train import Interrupts, train
from ds2.trainer import Trainer

MakeConfig = Callable[..., Config]


def losses(run_dir: Path) -> dict[int, float]:
    lines = map(json.loads, (run_dir / "log.jsonl").read_text().splitlines())
    return {event["step"]: event["loss"] for event in lines if event["event"] == "train"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_launchers_may_repeat_themselves(number: signal.Signals, caplog: pytest.LogCaptureFixture) -> None:
    former = signal.getsignal(number)
    with caplog.at_level(logging.WARNING), Interrupts() as interrupts:
        assert interrupts.received == 0
        for _ in range(3):
            os.kill(os.getpid(), number)
        assert interrupts.received == number
    assert caplog.text.count("saving after this step") == 1 and number.name in caplog.text
    assert signal.getsignal(number) == former


def test_ctrl_c_twice_stops_at_once_even_after_another_signal() -> None:
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_run_killed_in_its_evaluation_has_lost_no_step(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    config = tiny_config("train.epochs=2")
    train(config, whole)
    healthy = Trainer.evaluate

    def killed(self: Trainer, *arguments: Any) -> dict[str, float]:
        raise MemoryError("killed")

    monkeypatch.setattr(Trainer, "evaluate", killed)
    with pytest.raises(MemoryError):
        train(config, broken)
    progress = load(broken / "trainer.safetensors")[1]["progress"]
    assert (progress["epoch"], progress["batch"], progress["step"]) == (1, 3, 3)
    monkeypatch.setattr(Trainer, "evaluate", healthy)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert train(config, broken) == 0
    assert losses(broken) == losses(whole)
    assert "loss nan" not in caplog.text and "epoch 1: dev WER" in caplog.text
