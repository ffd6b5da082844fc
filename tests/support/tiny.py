"""A model of a few thousand parameters that learns the tone corpus in seconds."""

from __future__ import annotations

from pathlib import Path

import torch

from ds2.audio.features import Features
from ds2.config.schema import Config
from ds2.model.acoustic import AcousticModel
from ds2.model.checkpoint import prepare_model
from ds2.text.alphabet import Alphabet

RATE_HZ = 16000


def tiny_overrides_in(folder: Path, manifest: Path) -> list[str]:
    """Overrides of a run below `folder` that trains and evaluates on a manifest; later ones win."""
    return [
        f"data.train=[{manifest}]",
        f"data.dev=[{manifest}]",
        f"data.work_dir={folder / 'work'}",
        "data.workers=0",
        "alphabet.symbols='abc '",
        "model=rnn_small",
        "model.convs=[{kernel:[11,5],stride:[4,2],channels:4}]",
        "model.hidden=48",
        "model.depth=2",
        "model.skip=1",
        "model.row_convs=1",
        "model.row_conv_context=2",
        "optim=adamw",
        "optim.learning_rate=0.01",
        "optim.warmup_steps=0",
        "batching.utterances=4",
        "train.epochs=4",
        "train.log_every_steps=1",
        "device=cpu",
        f"run_dir={folder / 'run'}",
    ]


def write_untrained(config: Config, path: Path) -> Path:
    """Write a model that was never trained but writes letters: its classifier is made decisive."""
    torch.manual_seed(3)
    features = Features(config.features, RATE_HZ)
    alphabet = Alphabet.from_config(config.alphabet)
    model = AcousticModel(config.model, features.bins, len(alphabet), config.features.step_s)
    with torch.no_grad():
        model.classifier.weight.mul_(20)
    prepare_model(path, model, features, alphabet, config, {})()
    return path
