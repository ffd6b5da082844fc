"""Exponential moving average of a model's weights and running statistics."""

from __future__ import annotations

import copy
from typing import Generic, TypeVar

import torch
from torch import nn

Model = TypeVar("Model", bound=nn.Module)


class WeightAverage(Generic[Model]):
    """A copy of a model that follows it: average <- d average + (1 - d) model, d = min(decay, (1 + n) / (10 + n)).

    The growing d lets the average forget the random start in the first n updates. Floating-point buffers (running
    statistics of batch normalisation) are averaged like weights; other buffers are copied.
    """

    def __init__(self, model: Model, decay: float) -> None:
        """Start the average at the present weights; `decay` lies in (0, 1)."""
        self.decay = decay
        self.updates = 0
        self.model: Model = copy.deepcopy(model)
        self.model.requires_grad_(False).eval()

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take one step towards `model`, which keeps its device and shapes."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        averaged = self.model.state_dict(keep_vars=True)
        current = model.state_dict(keep_vars=True)
        floating = [name for name, value in current.items() if value.is_floating_point()]
        torch._foreach_lerp_([averaged[n].data for n in floating], [current[n].data for n in floating], 1 - decay)
        for name, value in current.items():
            if not value.is_floating_point():
                averaged[name].copy_(value)
