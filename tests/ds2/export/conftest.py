"""Models to export: of random weights in every shape, and a small one that learnt the words of the tone corpus."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import compose_once, tiny_overrides_in

from ds2.audio.features import Features
from ds2.config.schema import AlphabetConfig, Config, ConvConfig, FeaturesConfig, ModelConfig
from ds2.model.acoustic import AcousticModel
from ds2.model.checkpoint import LoadedModel, prepare_model
from ds2.text.alphabet import Alphabet
from ds2.training.loop import train

RATE_HZ = 16000


@pytest.fixture(scope="session")
def random_model() -> Callable[..., LoadedModel]:
    """Make a model of random weights and statistics that gives a frame every 40 ms; its settings may be others."""

    def make(kind: str = "kaldi_fbank", **settings: Any) -> LoadedModel:
        torch.manual_seed(3)
        shape = {
            "convs": [ConvConfig([11, 7], [3, 2], 4), ConvConfig([5, 5], [2, 2], 5)],
            "hidden": 24,
            "depth": 3,
            "skip": 2,
            "row_convs": 3,
            "row_conv_context": 2,
        }
        features_config = FeaturesConfig(kind=kind, window_s=0.025 if "fbank" in kind else 0.02)
        config = Config(features=features_config, model=ModelConfig(**(shape | settings)), run_dir="runs/random")
        features, alphabet = Features(config.features, RATE_HZ), Alphabet.from_config(AlphabetConfig())
        features.estimate([0.1 * torch.randn(RATE_HZ)])
        model = AcousticModel(config.model, features.bins, len(alphabet), config.features.step_s)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
            for name, buffer in model.named_buffers():
                buffer.copy_(0.3 * torch.randn_like(buffer) if name.endswith("mean") else torch.rand_like(buffer) + 0.5)
        return LoadedModel(model.eval(), features.eval(), alphabet, config, {"metrics": {}})

    return make


@pytest.fixture
def random_file(random_model: Callable[..., LoadedModel], tmp_path: Path) -> Callable[..., Path]:
    """Write such a model to a file."""

    def make(*kind: str, **settings: Any) -> Path:
        made = random_model(*kind, **settings)
        prepare_model(tmp_path / "model.safetensors", made.model, made.features, made.alphabet, made.config, {})()
        return tmp_path / "model.safetensors"

    return make


@pytest.fixture(scope="session")
def tone_run(tone_manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder whose model writes the letters of tones, in seconds."""
    folder = tmp_path_factory.mktemp("export")
    overrides = [
        *tiny_overrides_in(folder, tone_manifest),
        "features=nemo_fbank",
        "model.convs=[{kernel:[11,5],stride:[4,2],channels:4},{kernel:[5,5],stride:[2,2],channels:8}]",
        "train.epochs=25",
        "train.evaluate_every_epochs=25",
    ]
    assert train(compose_once(*overrides), folder / "run") == 0
    return folder / "run"
