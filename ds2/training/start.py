"""The first state of a run: its saved trainer state, another model's weights, or fresh weights."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from ds2.audio.features import Features
from ds2.config.schema import Config, ConfigError
from ds2.data.loader import SpeechLoader
from ds2.model.acoustic import AcousticModel
from ds2.model.checkpoint import LoadedModel, load_model
from ds2.system.tensor_file import CheckpointError
from ds2.text.alphabet import Alphabet
from ds2.training.optim import longest_prefix, no_such_weights, starts
from ds2.training.state import Parts, Progress, TrainState, read_state, state_file

log = logging.getLogger(__name__)
_NAMED_AT_MOST = 12
_STATISTICS_UTTERANCES = 1000  # drawn for the mean and deviation of the features


def initial_state(
    state: TrainState, loader: SpeechLoader, alphabet: Alphabet, config: Config, run_dir: Path
) -> tuple[Parts, Progress]:
    """Read the state of a run folder or, where it holds no run, make the initial state.

    Args:
        state: the fresh one of this process; its tensors are changed.
        loader: of the training utterances, from which feature statistics are estimated.
        alphabet: of the run.
        config: of the run.
        run_dir: its folder.

    Raises:
        CheckpointError: the state cannot be read, or the folder holds another run.
        ConfigError: the state is of another model, or no weight of `checkpoint.init_from` fits.
        AudioError: audio cannot be read.
    """
    if config.checkpoint.resume and state_file(run_dir).is_file():
        return read_state(run_dir, config, state)
    if any(run_dir.glob("*.safetensors")):
        raise CheckpointError(
            f"{run_dir} holds the checkpoints of another run: resume it (checkpoint.resume=true), "
            "give another run_dir, or move the folder away"
        )
    loaded = load_model(config.checkpoint.init_from) if config.checkpoint.init_from else None
    if loaded is not None:
        copy_weights(state.model, alphabet, loaded)
    if loaded is not None and _same_features(state.features, loaded.features):
        state.features.load_state_dict(loaded.features.state_dict())
    elif config.features.normalise == "corpus":
        chosen = np.random.default_rng(config.train.seed).permutation(len(loader.utterances))
        drawn = chosen[:_STATISTICS_UTTERANCES]
        shown = tqdm(drawn, desc="feature statistics", unit="utt", disable=None)
        state.features.estimate(torch.from_numpy(loader.audio[int(i)]) for i in shown)
    return state.tensors(), state.progress


def copy_weights(model: AcousticModel, alphabet: Alphabet, source: LoadedModel) -> None:
    """Copy the weights of another model into a fresh one: those of the same name and shape, labels by their symbols.

    Rows of the classifier whose symbol the other alphabet lacks, and weights that do not fit, stay as they were drawn;
    the log names them.

    Args:
        model: changed in place.
        alphabet: of `model`.
        source: the model to start from.

    Raises:
        ConfigError: nothing fits.
    """
    mine, theirs = model.state_dict(), source.model.state_dict()
    if alphabet.symbols != source.alphabet.symbols:
        labels = {symbol: label for label, symbol in enumerate(source.alphabet.symbols)}
        shared = [(row, labels[symbol]) for row, symbol in enumerate(alphabet.symbols) if symbol in labels]
        rows, sources = (list(column) for column in zip(*shared, strict=True))
        for name in ("classifier.weight", "classifier.bias"):
            moved = mine[name].clone()
            if moved.shape[1:] == theirs[name].shape[1:]:
                moved[rows] = theirs[name][sources].to(moved)
            theirs[name] = moved
        new = [symbol for symbol in alphabet.symbols if symbol not in labels]
        log.info("labels: %d as in the model to start from, %d new: %s", len(rows), len(new), " ".join(map(repr, new)))
    fitting = {name: value for name, value in theirs.items() if name in mine and mine[name].shape == value.shape}
    if not fitting:
        raise ConfigError("no weight of checkpoint.init_from fits this model: leave out model=... to take its own")
    model.load_state_dict({**mine, **fitting})
    fresh = [name for name in mine if name not in fitting]
    if fresh:
        log.warning(
            "%d of %d weights of the model to start from fit; these start from nothing: %s", len(fitting), len(theirs),
            ", ".join(fresh[:_NAMED_AT_MOST]) + (", ..." if len(fresh) > _NAMED_AT_MOST else ""),
        )  # fmt: skip


def freeze(model: AcousticModel, prefixes: Sequence[str]) -> None:
    """Freeze the weights whose names start with one of `prefixes`; running statistics still change.

    Raises:
        ConfigError: a prefix that no weight has, or nothing left to train.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(longest_prefix(name, prefixes) is None)
    unused = [p for p in prefixes if not any(starts(name, p) for name, _ in model.named_parameters())]
    if unused:
        raise ConfigError(f"train.freeze={unused}: {no_such_weights(model)}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"train.freeze={list(prefixes)} leaves nothing to train: freeze fewer parts")
    if prefixes:
        frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
        log.info("train.freeze: %s of %s parameters stay as they are", f"{frozen:,}", f"{model.parameter_count:,}")


def _same_features(mine: Features, theirs: Features) -> bool:
    """Return whether statistics of the one hold for features of the other."""
    computed = [(f.window_samples, f.step_samples, f.sample_rate_hz, f.bins, f.kind) for f in (mine, theirs)]
    return computed[0] == computed[1]
