"""The loop as a whole: it learns, resumes exactly, stops cleanly, and names what goes wrong."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.launch import SUPPORT, TIMEOUT_S
from support.run_log import events, losses

from ds2.audio.read import AudioError
from ds2.cli import main
from ds2.config.schema import Config, ConfigError
from ds2.data.manifest import ManifestError
from ds2.model.checkpoint import load_model
from ds2.system import UserError
from ds2.system.tensor_file import CheckpointError, load
from ds2.training.loop import train
from ds2.training.metrics import RunLog
from ds2.training.run_folder import RunFiles
from ds2.training.trainer import Trainer

MakeConfig = Callable[..., Config]
RANK_JOB = SUPPORT / "rank_job.py"


def test_overfits_ten_utterances_to_no_character_error(tiny_config: MakeConfig) -> None:
    config = tiny_config("train.epochs=30", "train.evaluate_every_epochs=10", "optim.schedule=constant")
    run_dir = Path(config.run_dir)
    assert train(config, run_dir) == 0
    assert min(float(str(e["cer"])) for e in events(run_dir, "dev")) == 0.0
    assert load_model(run_dir).metadata["metrics"]["cer"] == 0.0


def test_a_run_folder_holds_what_a_person_needs(tiny_config: MakeConfig) -> None:
    config = tiny_config("train.epochs=3", "checkpoint.keep_last=2")
    run_dir = Path(config.run_dir)
    train(config, run_dir)
    names = {p.name for p in run_dir.iterdir()}
    assert names == {
        "lock", "best.safetensors", "last.safetensors", "epoch-0002.safetensors", "epoch-0003.safetensors",
        "trainer.safetensors", "config.yaml", "corpus.json", "log.jsonl", "tensorboard",
    }  # fmt: skip
    loaded = load_model(run_dir / "last.safetensors")
    assert loaded.config.model == config.model and loaded.metadata["metrics"]["git_commit"]
    first = events(run_dir, "train")[0]
    assert {"loss", "learning_rate", "gradient_norm", "audio_s_per_s", "data_s", "forward_s", "backward_s"} <= set(
        first
    )


def test_a_resume_says_what_changed_in_the_audio(
    tiny_config: MakeConfig, tone_manifest: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = Path(shutil.copytree(tone_manifest.parent, tmp_path / "copy")) / tone_manifest.name
    overrides = [f"data.train=[{copy}]", f"data.dev=[{copy}]"]
    with caplog.at_level("INFO"):
        for epochs in (1, 2, 3):
            config = tiny_config(*overrides, f"train.epochs={epochs}")
            train(config, Path(config.run_dir))
            if epochs == 2:
                for wav in copy.parent.glob("*.wav"):
                    content = wav.read_bytes()
                    wav.write_bytes(content[:44] + content[:43:-1])
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("corpus")]
    assert len(lines) == 2  # the first start compares nothing
    assert "unchanged" in lines[0] and "10 of 10 sampled recordings have other content" in lines[1]


def test_short_epochs_may_go_by_without_a_save(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("train.epochs=5", "train.evaluate_every_epochs=100")
    often, seldom = (tiny_config(*settings, f"checkpoint.every_epochs={n}", f"run_dir={tmp_path}/{n}") for n in (1, 2))
    told: list[tuple[str, int, int]] = []
    for name in ("save", "keep_last"):
        original = getattr(RunFiles, name)

        def spy(self: RunFiles, *given: Any, name: str = name, original: Any = original, **options: Any) -> None:
            told.append((name, self.state.progress.epoch, self.state.progress.batch))
            original(self, *given, **options)

        monkeypatch.setattr(RunFiles, name, spy)
    train(seldom, Path(seldom.run_dir))
    assert [epoch for name, epoch, _ in told if name == "keep_last"] == [2, 4, 5]
    assert [epoch for name, epoch, batch in told if name == "save" and batch == 0] == [3, 5, 6]
    train(often, Path(often.run_dir))
    found = [load_model(Path(config.run_dir) / "last.safetensors").model.state_dict() for config in (often, seldom)]
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "extra",
    [
        ("optim=sgd", "optim.learning_rate=1e-3", "model.cell=lstm"),
        (
            "train.average_decay=0.9",
            "train.accumulate=2",
            "batching.utterances=2",
            "model.dropout=0.2",
            "augment.speed=[0.9,1.0]",
            "augment.time_masks=1",
            "augment.noise_probability=0.5",
            "augment.gain_db=[-6,6]",
        ),
        ("train.objective=ctc_crf", "train.denominator_order=3", "train.consistency=0.2", "augment.time_masks=1"),
    ],
    ids=["sgd-lstm", "adamw-averaged-accumulated-augmented", "ctc-crf"],
)
def test_stopped_mid_epoch_and_resumed_is_the_unbroken_run(
    tiny_config: MakeConfig, tmp_path: Path, extra: tuple[str, ...], device: str
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    extra = ("train.epochs=2", *extra, f"device={device}")
    train(tiny_config(*extra), whole)
    for steps in (1, 4, 0):  # in both epochs, then to the end
        train(tiny_config(*extra, f"train.max_steps={steps}"), broken)
    assert losses(broken) == losses(whole)
    a, b = load(whole / "trainer.safetensors"), load(broken / "trainer.safetensors")
    assert all(torch.equal(a[0][name], b[0][name]) for name in a[0])
    progress = [metadata["progress"] | {"elapsed_s": 0} for _, metadata in (a, b)]
    assert progress[0] == progress[1]


def test_a_kill_in_the_evaluation_that_ends_training_within_an_epoch_loses_neither_scores_nor_models(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    config = tiny_config("train.max_steps=2")
    assert train(config, whole) == 0
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(Trainer, "evaluate", lambda *_: 1 // 0)
        train(config, broken)
    assert not (broken / "last.safetensors").exists()
    for scored in (1, 1):  # the third start has nothing left to do
        assert train(config, broken) == 0
        assert len(events(broken, "dev")) == scored == len(events(whole, "dev"))
    for name in ("last", "best", "trainer"):
        a, b = load(whole / f"{name}.safetensors")[0], load(broken / f"{name}.safetensors")[0]
        assert all(torch.equal(a[key], b[key]) for key in a | b), name


def test_a_kill_between_the_first_model_and_the_state_after_it_leaves_a_run_that_goes_on(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config("data.dev=[]", "train.epochs=2", "checkpoint.every_minutes=0")
    save = RunFiles.save

    def killed_after_the_model(files: RunFiles, **options: bool) -> None:
        files.wait()
        if (tmp_path / "run" / "last.safetensors").is_file():
            raise ZeroDivisionError
        save(files, **options)

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(RunFiles, "save", killed_after_the_model)
        train(config, tmp_path / "run")
    assert train(config, tmp_path / "run") == 0
    assert load(tmp_path / "run" / "trainer.safetensors")[1]["progress"]["epoch"] == 3


@pytest.mark.slow
def test_killed_at_random_steps_and_started_again_is_the_unbroken_run(
    tiny_config: MakeConfig, tiny_overrides: list[str], tmp_path: Path
) -> None:
    extra = ["train.epochs=12", "checkpoint.every_steps=1", "augment.speed=[0.9,1.0,1.1]", "data.workers=2"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(tiny_config(*extra), whole)
    kills = 0
    for wait_steps in (3, 2, 5, 1000):
        seen = len(losses(broken)) if (broken / "log.jsonl").is_file() else 0
        # The run waits ten steps on, for a test that comes late on a busy machine.
        job = ["hang", "0", str(seen + wait_steps + 10), *tiny_overrides, *extra, f"run_dir={broken}"]
        process = subprocess.Popen(
            [sys.executable, str(RANK_JOB), *job], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while process.poll() is None:
            now = len(losses(broken)) if (broken / "log.jsonl").is_file() else 0
            if now >= seen + wait_steps:
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.01)
        process.wait(timeout=TIMEOUT_S)
    assert kills >= 3 and process.returncode == 0
    assert losses(broken) == losses(whole)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_ends_cleanly(tiny_overrides: list[str], tmp_path: Path, number: signal.Signals) -> None:
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "ds2.cli", "train", *tiny_overrides, "train.epochs=100000"]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ}, text=True
    )
    while not (run_dir / "best.safetensors").is_file():
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 128 + number
    assert "Traceback" not in errors and number.name in errors
    assert load(run_dir / "trainer.safetensors")[1]["progress"]["step"] > 0


def test_a_loss_that_is_not_finite_skips_the_step_and_stops_after_the_limit(
    tiny_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_config("train.max_skipped_steps=2", "batching.sortagrad=false")
    trainer = Trainer(config, Path(config.run_dir))
    healthy = trainer.passes.losses
    before = [p.detach().clone() for p in trainer.model.parameters()]

    def poisoned(inputs, context):  # type: ignore[no-untyped-def]
        values, objective = healthy(inputs, context)
        poison = torch.tensor([float("nan")] + [0.0] * (len(values) - 1))
        return values + poison, objective + poison

    monkeypatch.setattr(trainer.passes, "losses", poisoned)
    batches = trainer.prepared(trainer.loader.epoch(trainer.plan(), 1))
    bad = trainer.utterances[trainer.plan()[0][0]].name
    assert trainer.step(batches, trainer.plan()[:1]) is None
    assert bad in caplog.text and trainer.progress.skipped == 1 and trainer.progress.step == 0
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    assert trainer.step(batches, trainer.plan()[:1]) is None
    with pytest.raises(UserError, match=r"3 steps were not finite.*max_skipped_steps=2.*learning_rate"):
        trainer.step(batches, trainer.plan()[:1])


def test_out_of_memory_names_the_batch_and_the_settings(
    tiny_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config()
    trainer = Trainer(config, Path(config.run_dir))

    def fails(batch, context):  # type: ignore[no-untyped-def]
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trainer.passes, "losses", fails)
    with pytest.raises(
        UserError, match=r"epoch 1, batch 1: 4 utterances, the longest .* s\. Lower batching\.utterances=4"
    ):
        trainer.step(trainer.epoch(trainer.plan()), trainer.plan()[:1])


def test_unusable_utterances_are_named_and_either_stop_or_are_left_out(
    tiny_config: MakeConfig, tone_manifest: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [json.loads(line) for line in tone_manifest.read_text().splitlines()]
    lines[0]["text"], lines[1]["text"], lines[2]["text"] = "ab?", "ab" * 40 + "?", ""
    bad = tone_manifest.with_name("bad.jsonl")
    bad.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = tiny_config(f"data.train=[{bad}]")
    with pytest.raises(ManifestError) as caught:
        Trainer(config, Path(config.run_dir))
    for fragment in (
        "3 of 10",
        "'?'",
        "CTC needs 80 for 80 labels",
        "has no labels",
        "bad.jsonl:1",
        "on_bad_utterance=skip",
        "U+003F QUESTION MARK",
        "punctuation: drop",
    ):
        assert fragment in str(caught.value)
    trainer = Trainer(tiny_config(f"data.train=[{bad}]", "data.on_bad_utterance=skip"), Path(config.run_dir))
    assert len(trainer.utterances) == 7 and "3 of 10 training utterances left out" in caplog.text


def test_unreadable_dev_audio_is_found_before_the_first_step(
    tiny_config: MakeConfig, tone_manifest: Path, tmp_path: Path
) -> None:
    lines = [json.loads(line) for line in tone_manifest.read_text().splitlines()]
    (tmp_path / "broken.wav").write_bytes(b"no audio")
    lines[3]["audio_filepath"] = str(tmp_path / "broken.wav")
    dev = tone_manifest.with_name("broken_dev.jsonl")
    dev.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = tiny_config(f"data.dev=[{dev}]")
    with pytest.raises(AudioError, match=r"broken\.wav(.|\n)*take them out of the manifest; `ds2 data check`"):
        Trainer(config, Path(config.run_dir))


def test_workers_start_once_and_end_with_the_run(tiny_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    others = set(multiprocessing.active_children())
    seen = []
    evaluate = Trainer.evaluate

    def watched(trainer: Trainer, board: RunLog) -> dict[str, float]:
        scores = evaluate(trainer, board)
        seen.append(set(multiprocessing.active_children()) - others)
        return scores

    monkeypatch.setattr(Trainer, "evaluate", watched)
    config = tiny_config("data.workers=1", "train.epochs=3")
    train(config, Path(config.run_dir))
    assert len(seen[0]) == 2  # one of the training set, one of the dev set
    assert seen == [seen[0]] * 3
    assert not any(worker.is_alive() for worker in seen[0])


def test_resuming_with_another_model_is_refused(tiny_config: MakeConfig) -> None:
    config = tiny_config("train.max_steps=1")
    run_dir = Path(config.run_dir)
    train(config, run_dir)
    with pytest.raises(ConfigError, match=r"trained with model\.hidden=48, not 32.*init_from"):
        train(tiny_config("model.hidden=32"), run_dir)
    with pytest.raises(CheckpointError, match=r"holds a run: checkpoint\.resume=true goes on with it"):
        train(tiny_config("checkpoint.resume=false"), run_dir)
    (run_dir / "trainer.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"models without their trainer state: run_dir=NEW checkpoint\.init_from="
    ):
        train(config, run_dir)


def test_init_from_starts_at_the_weights_of_a_model_file(tiny_config: MakeConfig, tmp_path: Path) -> None:
    train(tiny_config("train.max_steps=2"), tmp_path / "first")
    started = Trainer(tiny_config(f"checkpoint.init_from={tmp_path / 'first'}"), tmp_path / "second")
    source = load_model(tmp_path / "first").model.state_dict()
    assert all(torch.equal(value, source[name]) for name, value in started.model.state_dict().items())
    assert started.progress.step == 0


def test_an_unwritable_run_folder_is_found_before_the_first_step(tiny_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CheckpointError, match=r"cannot be written.*run_dir=\.\.\."):
        train(tiny_config(), tmp_path / "file" / "run")


def test_early_stop_ends_training_and_a_second_start_does_nothing(tiny_config: MakeConfig) -> None:
    config = tiny_config("train.epochs=50", "train.early_stop_epochs=2", "optim.learning_rate=1e-9")
    run_dir = Path(config.run_dir)
    train(config, run_dir)
    done = load(run_dir / "trainer.safetensors")[1]["progress"]
    assert done["epoch"] <= 5
    train(config, run_dir)
    assert load(run_dir / "trainer.safetensors")[1]["progress"] == done


def test_a_sweep_trains_every_value_in_a_folder_of_its_own(
    tiny_overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv[:])
    sweep = ["--multirun", "model.hidden=32,48", "train.max_steps=1"]
    assert main(["train", *tiny_overrides, *sweep]) == 0
    folder = tmp_path / "run-sweep"
    jobs = ("model.hidden=32", "model.hidden=48")
    assert [load_model(folder / job).config.model.hidden for job in jobs] == [32, 48]
    table = (folder / "ranking.txt").read_text()
    assert all(job in table for job in jobs) and (folder / "ranking.png").is_file()
    assert load_model(folder / jobs[1]).config.run_dir == str(folder / jobs[1])


def test_a_signal_ends_the_sweep_and_not_its_run_alone(
    tiny_overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv[:])
    began: list[int] = []

    def stopped_train(config: Config, run_dir: Path) -> int:
        began.append(config.model.hidden)
        return 128 + signal.SIGTERM

    monkeypatch.setattr("ds2.training.loop.train", stopped_train)
    status = main(["train", *tiny_overrides, "--multirun", "model.hidden=32,48,64"])
    assert (status, began) == (128 + signal.SIGTERM, [32])
    assert "stopped before model.hidden=48, model.hidden=64: the same command goes on" in capsys.readouterr().out


def test_values_of_a_sweep_that_would_share_a_folder_are_refused(
    tiny_overrides: list[str],
    tone_manifest: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv[:])
    others = f"data.dev=[{tone_manifest}],[{tone_manifest.parent}//{tone_manifest.name}]"
    assert main(["train", *tiny_overrides, "--multirun", others, "train.max_steps=1"]) == 2
    assert "of this sweep have one folder" in capsys.readouterr().err
    assert (tmp_path / "run-sweep" / "ranking.txt").read_text().splitlines()[2].split()[1] == "-"
