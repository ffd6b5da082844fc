"""Ragged batches and small configurations that the tests of layers share."""

import torch
from ds2_ops.recurrent.cells import GATED
from torch import Tensor

from ds2.config.schema import ModelConfig
from ds2.model.ragged import Ragged

LENGTHS = [6, 3, 0]
GATED_CELLS = [name.removesuffix("_after") for name in GATED]  # of `model.cell`


def ragged(frames: int = 8, lengths: list[int] = LENGTHS) -> Ragged:
    return Ragged.of(torch.tensor(lengths), frames, torch.device("cpu"))


def padded(width: int, frames: int = 8) -> Tensor:
    x = torch.randn(frames, len(LENGTHS), width, dtype=torch.float64)
    return torch.where(ragged(frames).valid.t()[:, :, None], x, 0.0)


def config(**overrides: object) -> ModelConfig:
    return ModelConfig(**({"hidden": 6, "batch_norm": False} | overrides))  # type: ignore[arg-type]


def utterances(x: Tensor) -> list[Tensor]:
    """The valid frames of each utterance that has any, (T, 1, D)."""
    return [x[:length, row, None] for row, length in enumerate(LENGTHS) if length]
