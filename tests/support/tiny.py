"""A model of a few thousand parameters that learns the tone corpus in seconds."""

from __future__ import annotations

import copy
import functools
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from ds2.audio.features import Features
from ds2.commands.compose import _compose, compose_config, parse_override, read_config
from ds2.config.convert import declared_settings
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


def compose_once(*overrides: str) -> Config:
    """As `compose_config`, for tests of something else: Hydra, which takes a tenth of a second, only chooses groups."""
    return copy.deepcopy(_config(*overrides))


@functools.cache
def _config(*overrides: str) -> Config:
    parsed = [(text, parse_override(text)) for text in overrides]
    settings = [override for _, override in parsed if _is_setting(override)]
    choices = [text for text, override in parsed if override not in settings]
    if any("." in choice.partition("=")[0] for choice in choices):  # of an entry, say, of a list that is set too
        return compose_config(overrides)
    tree = copy.deepcopy(_composed(*choices))
    for override in settings:
        *sections, name = override.key_or_group.split(".")
        functools.reduce(dict.__getitem__, sections, tree)[name] = override.value()
    return read_config(OmegaConf.create(tree), overrides)[0]


@functools.cache
def _composed(*choices: str) -> Any:
    return OmegaConf.to_container(_compose(choices))


def _is_setting(override: Override) -> bool:
    """Whether an override replaces the value of a setting; mappings are merged, and sections are chosen."""
    setting = declared_settings().get(override.key_or_group)
    return setting is not None and not is_dataclass(setting[1]) and not isinstance(override.value(), dict)


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
