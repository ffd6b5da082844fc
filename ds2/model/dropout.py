"""Dropout of inputs and of residual branches, by utterance: the same in any batch, rank, padding and device."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_MULTIPLIER = -7046029254386353131  # 2^64 over the golden ratio, as a signed integer: steps that fill 64 bits evenly
_FIRST_BRANCH = 2**20  # the numbers of branches follow those of layers
_FIRST, _SECOND = -2048144789, -1028477387  # multipliers of MurmurHash3's 32-bit finalizer (Appleby), signed


class UtteranceDropout(nn.Module):
    """Zeroes inputs with probability `rate` and divides the rest by 1 - rate (Srivastava et al. 2014), in training.

    Whether x[t, b, d] is kept is a hash of (key of utterance b, layer, t, d): a function, not the next draw of a
    generator, so that nothing but the key decides it. The hash is of 32 bits: `rate` is met to 2^-32.

    Args:
        rate: from 0 to below 1; 0 leaves the input as it is.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.layer = 0  # its number in the model: equal keys give other masks in other layers

    def forward(self, x: Tensor, keys: Tensor | None, share: Tensor | None = None, first: int = 0) -> Tensor:
        """Drop inputs.

        Args:
            x: (T, B, D) of any floating type.
            keys: (B,) int64 on the device of `x`; None draws them from torch's generator.
            share: (B,) float64 there, 0 to 1: times it, the rate is that of utterance b. None: 1.
            first: t of the first frame of `x`.
        """
        if not self.training or self.rate == 0:
            return x
        if keys is None:
            keys = torch.randint(2**62, x.shape[1:2], device=x.device)
        if share is None:
            return torch.where(self._keep_mask(keys, first, x.shape), x / (1 - self.rate), 0.0)
        rates = (self.rate * share)[:, None]
        keep = self._keep_mask(keys, first, x.shape, rates)
        return torch.where(keep, (x / (1 - rates).float()).to(x.dtype), 0.0)

    def _keep_mask(self, keys: Tensor, first: int, shape: torch.Size, rates: Tensor | None = None) -> Tensor:
        """(T, B, D) bool, by one rate or (B, 1) float64. Integers overflow on purpose: modulo 2^64 and 2^32."""
        frames, _, width = shape
        time = torch.arange(first, first + frames, device=keys.device)[:, None]
        rows = _low_32_bits(_hash(_hash(keys + self.layer * 2**20) + time))
        columns = _low_32_bits(_hash(torch.arange(width, device=keys.device)))
        bits = rows[:, :, None] + columns
        bits *= _FIRST
        bits ^= bits >> 15
        bits *= _SECOND
        if rates is None:
            return bits >= round(self.rate * 2**32) - 2**31
        return bits >= ((rates * 2**32).round().long() - 2**31).to(torch.int32)


class BranchDropout(nn.Module):
    """Leaves a residual branch out with probability `rate` an utterance, and divides it by 1 - rate elsewhere.

    Stochastic depth (Huang et al. 2016) by utterance; whether a branch is kept is a hash of (key, branch).

    Args:
        rate: from 0 to below 1; 0 leaves the branch as it is.
        branch: its number in the model.
    """

    def __init__(self, rate: float, branch: int = 0) -> None:
        super().__init__()
        self.rate, self.branch = rate, branch

    def forward(self, y: Tensor, keys: Tensor | None) -> Tensor:
        """Drop rows of a branch's output (T, B, H); keys as :meth:`UtteranceDropout.forward`."""
        if not self.training or self.rate == 0:
            return y
        if keys is None:
            keys = torch.randint(2**62, y.shape[1:2], device=y.device)
        keep = _low_32_bits(_hash(keys + (_FIRST_BRANCH + self.branch) * 2**20)) >= round(self.rate * 2**32) - 2**31
        return y * (keep / (1 - self.rate)).to(y.dtype)[:, None]


def _hash(numbers: Tensor) -> Tensor:
    """A hash of int64: two rounds of multiplication and folding the high half onto the low one."""
    for _ in range(2):
        numbers = (numbers + 1) * _MULTIPLIER
        numbers = numbers ^ ((numbers >> 32) & 0xFFFFFFFF)
    return numbers


def _low_32_bits(numbers: Tensor) -> Tensor:
    return ((numbers & 0xFFFFFFFF) - 2**31).to(torch.int32)
