"""What TensorBoard shows of a run: dev loss beside train loss, utterances that stay, settings with their scores."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.run_log import events
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from ds2.config.schema import Config
from ds2.training.dev_set import RankResults
from ds2.training.loop import train
from ds2.training.metrics import RunLog
from ds2.training.trainer import Trainer


def board(run_dir: Path) -> EventAccumulator:
    found = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"images": 0, "audio": 0, "tensors": 0})
    found.Reload()
    return found


def test_a_run_shows_losses_scores_times_and_the_same_utterances(tiny_config: Callable[..., Config]) -> None:
    config = tiny_config("train.epochs=3")
    run_dir = Path(config.run_dir)
    train(config, run_dir)
    shown = board(run_dir)
    tags = shown.Tags()
    assert {"loss/train", "loss/dev", "score/dev_wer", "timing/forward_s", "timing/step_s", "score/best_wer"} <= {
        *tags["scalars"]
    }
    assert min(tags["scalars"]).startswith("loss/")  # cards stand in the order of their names
    assert not any(t.startswith("train/forward") for t in tags["scalars"])
    utterances = [f"utterance_{number}" for number in (1, 2, 3, 4)]
    assert set(tags["audio"]) == {f"{u}/audio" for u in utterances}
    assert set(tags["images"]) == {f"{u}/{kind}" for u in utterances for kind in ("spectrogram", "alignment")}
    assert len(shown.Images("utterance_1/alignment")) == 3 and len(shown.Images("utterance_1/spectrogram")) == 1
    logged = [event["loss"] for event in events(run_dir, "dev")]
    assert [e.value for e in shown.Scalars("loss/dev")] == pytest.approx(logged)
    assert "_hparams_/experiment" in shown.summary_metadata
    settings = HParamsPluginData.FromString(
        shown.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    ).session_start_info.hparams
    assert settings["train.epochs"].number_value == 3 and settings["device"].string_value == "cpu"
    assert not {"augment.noise_probability", "data.test"} & {*settings}  # as they are by default, or empty


def test_the_dev_loss_is_the_training_loss_of_the_same_utterances(tiny_config: Callable[..., Config]) -> None:
    config = tiny_config()
    trainer = Trainer(config, Path(config.run_dir))
    log = RunLog(Path(config.run_dir), writes=False)
    trainer.evaluate(log)  # forgets what it saw
    trainer.model.eval()
    expected = []
    with torch.inference_mode():
        for batch in trainer.loader.epoch([[index] for index in range(10)], 1):
            expected.append(float(trainer.passes.losses(trainer.inputs(batch, 1))[0].sum()))
    logged: list[float] = []
    scalars = log.scalars
    log.scalars = lambda group, step, values: logged.append(values["loss"]) or scalars(group, step, values)  # type: ignore[method-assign, func-returns-value]
    trainer.evaluate(log)
    assert logged == [pytest.approx(sum(expected) / 10, rel=1e-5)]


def test_a_transcript_that_cannot_fit_has_no_part_in_the_loss(tiny_config: Callable[..., Config]) -> None:
    config = tiny_config()
    trainer = Trainer(config, Path(config.run_dir))
    dev, log, observed, comm = trainer.dev, RunLog(Path(config.run_dir), writes=False), RankResults(), trainer.comm
    logits = torch.zeros(3, 2, 5)
    dev._labels[0], dev._labels[1] = [1, 1, 1], [1]  # three equal labels need five frames
    dev.observe(observed, comm, [0, 1], logits, torch.tensor([3, 3]))
    loss = dev.log(log, 1, [""] * 10, observed, comm)
    assert loss == pytest.approx(-torch.tensor(6 / 125).log().item())  # six of 5^3 paths write one label


def test_a_long_evaluation_says_how_far_it_is(
    tiny_config: Callable[..., Config], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, seconds = tiny_config(), count(0, 61)
    trainer, log = Trainer(config, Path(config.run_dir)), RunLog(Path(config.run_dir), writes=False)
    caplog.set_level("INFO")
    monkeypatch.setattr("ds2.system.terminal.time", SimpleNamespace(monotonic=lambda: next(seconds)))
    trainer.evaluate(log)
    assert f"evaluating the dev set: 10 of {len(trainer.dev.utterances)} utterances, 0 min left" in caplog.messages


def test_a_run_that_never_begins_to_align_gets_advice(
    tiny_config: Callable[..., Config], caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_config()
    trainer, log = Trainer(config, Path(config.run_dir)), RunLog(Path(config.run_dir), writes=False)
    assert trainer.evaluate(log)["cer"] > 0.75  # not trained at all
    assert "begun to align" not in caplog.text
    trainer.progress.step = 2000
    trainer.evaluate(log)
    assert "after 2000 steps: this run has not begun to align" in caplog.text
    assert "optim.layer_rates={weight_hh:0.3}" in caplog.text
