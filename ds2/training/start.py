"""What a run begins from: its trainer state, another model's weights, or nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from ds2.config.schema import Config, ConfigError
from ds2.data.loader import SpeechLoader
from ds2.model.checkpoint import load_model
from ds2.system.tensor_file import CheckpointError
from ds2.text.alphabet import Alphabet
from ds2.training.state import Parts, Progress, TrainState, read_state, state_file


def begin(
    state: TrainState, loader: SpeechLoader, alphabet: Alphabet, config: Config, run_dir: Path
) -> tuple[Parts, Progress]:
    """Read the state of a run folder or, where that holds no run, make the one to start from.

    Args:
        state: the fresh one of this process; its tensors are changed.
        loader: of the training utterances, from which feature statistics are estimated.
        alphabet: of the run.
        config: of the run.
        run_dir: where it is kept.

    Raises:
        CheckpointError: the state cannot be read, or the folder holds another run.
        ConfigError: the state is of another model, or `checkpoint.init_from` has another alphabet.
        AudioError: audio cannot be read.
    """
    if config.checkpoint.resume and state_file(run_dir).is_file():
        return read_state(run_dir, config, state)
    if any(run_dir.glob("*.safetensors")):
        raise CheckpointError(
            f"{run_dir} holds the checkpoints of another run: resume it (checkpoint.resume=true), "
            "give another run_dir, or move the folder away"
        )
    if config.checkpoint.init_from:
        loaded = load_model(config.checkpoint.init_from)
        if loaded.alphabet != alphabet:
            raise ConfigError(f"checkpoint.init_from={config.checkpoint.init_from} has another alphabet")
        state.model.load_state_dict(loaded.model.state_dict())
        state.features.load_state_dict(loaded.features.state_dict())
    elif config.features.normalise == "corpus":
        chosen = np.random.default_rng(config.train.seed).permutation(len(loader.utterances))
        drawn = chosen[: config.features.statistics_utterances]
        state.features.estimate(torch.from_numpy(loader.audio[int(i)]) for i in drawn)
    return state.tensors(), state.progress
