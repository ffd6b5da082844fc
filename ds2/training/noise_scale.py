"""The gradient noise scale: up to about which batch more utterances a step, or more GPUs, save steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_MEMORY = 0.9  # of a window's estimates in those that are logged


class NoiseScale:
    """Estimates tr(S) / |G|^2 in utterances, G the gradient and S its covariance from utterance to utterance.

    A batch far below it halves the steps when it is doubled, one far above it hardly saves any (McCandlish et al. 2018,
    section 2.2). Over a window of k steps, of batches of b utterances with gradients g,

        E[mean of |g|^2] = |G|^2 + tr(S) / b   and   E[|mean of g|^2] = |G|^2 + tr(S) / (k b)

    (appendix A.1), solved for both, each averaged over windows before they are divided. The weights move within a
    window, which counts as noise: at high learning rates the estimate is somewhat too large.

    Args:
        gradients: the tensors that hold a step's gradients of the mean loss, before clipping.
    """

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        self._gradients = list(gradients)
        self._sum = [torch.zeros_like(gradient) for gradient in gradients]
        self._squares: list[float] = []
        self._utterances = 0
        self._noise = self._signal = 0.0

    def add(self, norm: float, utterances: int) -> None:
        """Count a step whose gradient has this norm, of a batch of so many utterances."""
        torch._foreach_add_(self._sum, self._gradients)
        self._squares.append(norm**2)
        self._utterances += utterances

    def end_window(self) -> float:
        """The estimate, NaN where none can be made yet: the gradient drowns in noise; reads the device once."""
        k = len(self._squares)
        if k > 1:
            batch, square = self._utterances / k, sum(self._squares) / k
            of_mean = float(torch.stack(torch._foreach_norm(self._sum)).square().sum()) / k**2
            self._noise = _MEMORY * self._noise + batch * (square - of_mean) * k / (k - 1)
            self._signal = _MEMORY * self._signal + (k * of_mean - square) / (k - 1)
            torch._foreach_zero_(self._sum)
            self._squares, self._utterances = [], 0
        return self._noise / self._signal if self._signal > 0 else float("nan")
