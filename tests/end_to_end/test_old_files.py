"""Files of versions before a setting existed: models load and runs resume with the setting's default."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from ds2.config.schema import Config
from ds2.model.checkpoint import load_model
from ds2.system.tensor_file import load
from ds2.training.loop import train

# What the first version's files hold; every key that came later must be allowed to be missing.
FIRST_VERSION = {
    "data": "train dev test corpus prepare work_dir sample_rate_hz min_duration_s max_duration_s on_bad_utterance "
    "cache workers",
    "alphabet": "symbols case replace unknown pieces pieces_file",
    "features": "kind window_s step_s mels normalise statistics_utterances",
    "augment": "speed gain_db noise_probability noise_snr_db noise frequency_masks frequency_width time_masks "
    "time_width_s time_fraction",
    "batching": "utterances audio_s sortagrad buckets longest_first",
    "model": "convs cell nonlinearity clip hidden depth skip skip_first row_convs row_conv_context bidirectional "
    "batch_norm batch_norm_momentum dropout max_lookahead_ms backend",
    "optim": "name learning_rate momentum betas weight_decay schedule anneal warmup_steps clip_norm",
    "train": "epochs max_minutes max_steps precision accumulate average_decay early_stop_epochs max_skipped_steps "
    "evaluate_every_epochs evaluate_from_epoch log_every_steps seed",
    "checkpoint": "every_minutes every_steps keep_last init_from resume",
    "comm": "backend batch_norm overlap bucket_mib timeout_s",
    "decode": "method beam lm alpha beta unknown_score lexicon hot_words hot_word_bonus label_min_log_prob prune nbest "
    "threads times confidence",
}
PROGRESS = "epoch batch step skipped infeasible best_wer best_cer best_epoch elapsed_s audio_s"


def as_the_first_version_wrote(path: Path) -> None:
    """Rewrite a file without what its format gained later: other settings, other counters, a digest."""
    with safe_open(path, "pt") as file:
        stored = json.loads(file.metadata()["ds2"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    config = stored["config"]
    old: dict[str, Any] = {
        name: {key: config[name][key] for key in keys.split()} for name, keys in FIRST_VERSION.items()
    }
    convs = [{key: conv[key] for key in ("kernel", "stride", "channels")} for conv in config["model"]["convs"]]
    old["model"]["convs"] = convs
    kept = {"format": 1, "kind": stored["kind"], "config": {**old, "run_dir": "x", "device": "auto"}}
    if "progress" in stored:
        kept["progress"] = {name: stored["progress"][name] for name in PROGRESS.split()}
    else:
        metrics = {name: value for name, value in stored["metrics"].items() if name != "precision"}
        alphabet = {name: stored["alphabet"][name] for name in ("symbols", "case", "replace", "unknown")}
        kept |= {"alphabet": alphabet, "metrics": metrics}
    save_file(tensors, path, {"ds2": json.dumps(kept)})


@pytest.fixture
def old_run(tiny_config: Callable[..., Config]) -> Iterator[Config]:
    config = tiny_config("train.epochs=3", "train.max_steps=3")
    assert train(config, Path(config.run_dir)) == 0
    for path in Path(config.run_dir).glob("*.safetensors"):
        as_the_first_version_wrote(path)
    yield config


def test_a_model_of_the_first_version_loads(old_run: Config) -> None:
    loaded = load_model(old_run.run_dir)
    assert loaded.config.alphabet == old_run.alphabet
    assert loaded.trained_precision == "auto"


def test_a_run_of_the_first_version_resumes(old_run: Config) -> None:
    assert load(Path(old_run.run_dir) / "trainer.safetensors")[1]["progress"]["step"] == 3
    old_run.train.max_steps = 5
    assert train(old_run, Path(old_run.run_dir)) == 0
    assert load(Path(old_run.run_dir) / "trainer.safetensors")[1]["progress"]["step"] == 5
