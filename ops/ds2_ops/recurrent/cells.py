"""The nonlinearities of the recurrence, each with its name in csrc/recurrent/cells.cuh."""

import torch
from torch import Tensor

CELLS = {"relu": "Relu", "clipped_relu": "ClippedRelu", "tanh": "Tanh"}


def activate(pre: Tensor, nonlinearity: str, clip: float) -> Tensor:
    """f of the recurrence; `clip` bounds "clipped_relu"."""
    if nonlinearity == "tanh":
        return torch.tanh(pre)
    if nonlinearity == "relu":
        return torch.relu(pre)
    return torch.clamp(pre, 0.0, clip)
