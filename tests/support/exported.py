"""Exported models as a client runs them, and what the model they were made of says of the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import onnxruntime
import torch
from torch import Tensor
from torch.nn import functional

from ds2.export.model import NEVER, Exported
from ds2.model.checkpoint import LoadedModel

Function = Callable[..., Sequence[Tensor]]
_HELD_BACK = 30  # frames, more than any model of the tests


def in_onnxruntime(path: Path) -> Callable[..., list[Tensor]]:
    """The function of an exported file, on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_inputs()]

    def run(*inputs: Tensor) -> list[Tensor]:
        arrays = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
        return [torch.from_numpy(x) for x in session.run(None, arrays)]

    return run


def sound(samples: int, seed: int = 0) -> Tensor:
    """(1, N) noise that rises and falls."""
    generator = torch.Generator().manual_seed(seed)
    loudness = torch.arange(samples).div(1500.0).sin().abs()
    return 0.1 * loudness * torch.randn(1, samples, generator=generator)


def log_energies(loaded: LoadedModel, samples: Tensor) -> Tensor:
    """(1, F, T) before the mean is taken off and the deviation divided by, float64."""
    features, _ = loaded.features(samples, torch.tensor([samples.shape[1]]))
    return features.double() * loaded.features.std.double()[:, None] + loaded.features.mean.double()[:, None]


def of_energies(loaded: LoadedModel, energies: Tensor) -> Tensor:
    """Log-probs (T, V) of log energies (1, F, T) by the model in their dtype."""
    dtype, features = energies.dtype, loaded.features
    normalised = (energies - features.mean.to(dtype)[:, None]) / features.std.to(dtype)[:, None]
    model = loaded.model.to(dtype)
    with torch.inference_mode():
        logits, _ = model(normalised, torch.tensor([energies.shape[2]]))
    model.float()
    return logits[:, 0].log_softmax(1)


def streamed(function: Function, exported: Exported, signals: Sequence[Tensor]) -> list[Tensor]:
    """The real frames' log-probs (T, V) of signals (1, ..., N), a stream each, run in one batch to their ends.

    Past its end a stream gets NaN, which a model must not look at, until all that was held back must have come.
    """
    chunk = exported.chunk
    state = list(exported.example(len(signals), signals[0].dtype).values())[2:]
    streams: list[list[Tensor]] = [[] for _ in signals]
    start = after = 0
    while after < _HELD_BACK:
        parts = [signal[..., start : start + chunk] for signal in signals]
        lengths = torch.tensor([part.shape[-1] for part in parts])
        inputs = torch.cat([functional.pad(part, (0, chunk - part.shape[-1]), value=torch.nan) for part in parts])
        log_probs, frames, *state = function(inputs, lengths, *state)
        for row, own in enumerate(log_probs):
            real = own[:, 1] > NEVER
            assert int(real.sum()) == int(frames[row])
            assert not own[~real, 0].any() and (own[~real, 1:] == NEVER).all()
            streams[row].append(own[real])
        start += chunk
        after += 0 if lengths.any() else log_probs.shape[1]
    return [torch.cat(rows) for rows in streams]
