"""A run that did not do what its settings mean says so: without a step it fails, with noise to the end it warns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.run_log import events

from ds2.config.schema import Config
from ds2.model.pass_context import PassContext
from ds2.system import UserError
from ds2.training.inputs import Inputs
from ds2.training.loop import train
from ds2.training.passes import Passes

MakeConfig = Callable[..., Config]


def test_a_run_whose_every_step_was_skipped_fails(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy = Passes.losses

    def broken(self: Passes, inputs: Inputs, context: PassContext) -> tuple[torch.Tensor, torch.Tensor]:
        losses, objective = healthy(self, inputs, context)
        return losses * torch.nan, objective * torch.nan

    monkeypatch.setattr(Passes, "losses", broken)
    with pytest.raises(UserError, match=r"nothing was learned: 3 steps were tried, none .*ds2 data check"):
        train(tiny_config("train.epochs=1"), tmp_path / "run")
    monkeypatch.undo()
    assert len(events(tmp_path / "run", "start")) == 1


def test_a_finished_run_that_is_started_again_has_not_failed(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config("train.epochs=1")
    assert train(config, tmp_path / "run") == 0
    assert train(config, tmp_path / "run") == 0


def test_noise_that_never_ended_is_reported(
    tiny_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    noisy = ("train.epochs=2", "augment.noise_probability=0.5")
    for epochs, steps, said in ((1, 0, False), (1, 2, True), (2, 0, True), (0, 0, False)):
        caplog.clear()
        config = tiny_config(*noisy, f"augment.noisy_epochs={epochs}", f"train.max_steps={steps}")
        assert train(config, tmp_path / f"{epochs} {steps}") == 0
        assert ("no epoch was without noise" in caplog.text) == said, caplog.text


def test_a_delay_penalty_that_came_too_soon_or_never_is_named(
    tiny_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for penalty, epochs, warning in ((0.01, 0, "counts from the first step"), (0.01, 1, ""), (0.01, 2, "no epoch had")):
        caplog.clear()
        setting = f"train.delay_penalty_after_epochs={epochs}"
        config = tiny_config("train.epochs=2", "model.max_lookahead_ms=0", f"train.delay_penalty={penalty}", setting)
        assert train(config, tmp_path / str(epochs)) == 0
        warnings = [record.getMessage() for record in caplog.records if "train.delay_penalty" in record.getMessage()]
        assert len(warnings) == (warning != "") and all(warning in text for text in warnings)


def test_a_warm_up_fits_the_planned_training(
    tiny_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def rates(name: str, *overrides: str) -> list[float]:
        caplog.clear()
        config = tiny_config(
            "optim.schedule=constant", "optim.learning_rate=0.5e-3", "optim.warmup_steps=500", *overrides
        )
        assert train(config, tmp_path / name) == 0
        return [1000 * event["learning_rate"] for event in events(tmp_path / name, "train")]

    fresh = rates("fresh", "train.epochs=3")  # of 3 steps
    assert fresh == pytest.approx([0.001, 1 / 6, 1 / 3, *[0.5] * 6]) and "has 9 steps" in caplog.text
    assert "never reached" not in caplog.text
    tuned = rates("tuned", "train.max_steps=6", f"checkpoint.init_from={tmp_path / 'fresh'}")
    assert tuned == pytest.approx([0.001, *[0.5] * 5]) and "1/10" in caplog.text
    rates("stopped", "train.epochs=100", "train.max_minutes=1e-9")
    assert "never reached optim.learning_rate=0.0005: training ended after 1 of" in caplog.text
