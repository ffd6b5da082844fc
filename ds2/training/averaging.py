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
        self._followed: nn.Module | None = None

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take one step towards `model`, which keeps its device, shapes and tensors: those of the first call."""
        if model is not self._followed:
            self._follow(model)
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(self._averaged, self._current, 1 - decay)
        for averaged, current in self._copied:
            averaged.copy_(current)
        for ours, theirs in self._counting:
            ours.set_extra_state(theirs.get_extra_state())

    def _follow(self, model: nn.Module) -> None:
        """Find all tensors once: state dicts take 2 ms of the host, for which a GPU waits at the end of a step."""
        ours, theirs = (dict((*m.named_parameters(), *m.named_buffers())) for m in (self.model, model))
        pairs = [(ours[name], value) for name, value in theirs.items()]
        self._averaged = [averaged for averaged, current in pairs if current.is_floating_point()]
        self._current = [current for _, current in pairs if current.is_floating_point()]
        self._copied = [(averaged, current) for averaged, current in pairs if not current.is_floating_point()]
        modules = zip(self.model.modules(), model.modules(), strict=True)
        self._counting = [(a, b) for a, b in modules if type(b).get_extra_state is not nn.Module.get_extra_state]
        self._followed = model
