"""The end of a step: the norm of the gradients, clipping, and the optimizer, as few launches as there are."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from ds2_ops.optimizer.update import FusedNorm, FusedUpdate, why_not
from torch import Tensor

from ds2.distributed.gradients import GradientReducer
from ds2.training.graphs import Recorder
from ds2.training.optim import clip_gradients, gradient_norm

log = logging.getLogger(__name__)


class Update:
    """Clips the gradients and lets the optimizer change the weights; from the second time on as a graph, if `graphed`.

    The first time makes the optimizer's state. From then on a GPU does it in one launch (`ds2_ops.optimizer`), which
    also rounds the weights for the next pass.

    Args:
        optimizer: on a GPU with its learning rates in tensors, where it is graphed.
        gradients: of all that it holds.
        clip_norm: 0: off.
        graphed: whether to record it.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, gradients: GradientReducer, clip_norm: float, *, graphed: bool
    ) -> None:
        self._optimizer, self._gradients, self._clip_norm = optimizer, gradients, clip_norm
        self._graphed = graphed
        self._replay: Callable[[], None] | None = None
        self._norm = torch.empty(0)
        self._fused: FusedUpdate | None = None
        reason = why_not(optimizer)
        self._fuses = reason is None
        self._norm_of: Callable[[], Tensor] = lambda: gradient_norm(gradients.buckets)
        if self._fuses:
            self._norm_of = FusedNorm(gradients.buckets)
        elif gradients.comm.device.type == "cuda":
            log.info("the optimizer's step runs on torch's kernels: %s", reason)

    @property
    def harmless(self) -> bool:
        """Whether a norm that is not finite leaves everything as it is, so that nobody need look at it first."""
        return self._fuses and bool(self._optimizer.state)

    def norm(self) -> Tensor:
        """The norm of all gradients, a scalar on their device."""
        return self._norm_of()

    def __call__(self, norm: Tensor) -> None:
        """Take a step with gradients of this norm, a scalar on their device; see `harmless`."""
        if self._replay is not None:
            self._norm.copy_(norm)
            self._replay()
            return
        if not self._optimizer.state:
            self._launch(norm)
            return
        if self._fuses:
            self._fused = self._fused or FusedUpdate(self._optimizer, self._gradients.rounded)
        if not self._graphed:
            self._launch(norm)
            return
        self._norm = norm.clone()
        with Recorder().recording() as graph:
            self._launch(self._norm)
        self._replay = graph.replay
        self._replay()

    def _launch(self, norm: Tensor) -> None:
        if self._fused is not None:
            self._fused(norm, self._clip_norm)
        else:
            clip_gradients(self._gradients.buckets, norm, self._clip_norm)
            self._optimizer.step()
        self._gradients.set_copies_current(self._fused is not None)
