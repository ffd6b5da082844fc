"""Dropout of inputs, by utterance: the same in any batch, rank, padding and device."""

import torch
from torch import Tensor, nn

_MULTIPLIER = -7046029254386353131  # 2^64 over the golden ratio, as a signed integer: steps that fill 64 bits evenly
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

    def forward(self, x: Tensor, keys: Tensor | None, first: int = 0) -> Tensor:
        """Drop inputs.

        Args:
            x: (T, B, D) of any floating type.
            keys: (B,) int64 on the device of `x`; None draws them from torch's generator.
            first: t of the first frame of `x`.
        """
        if not self.training or self.rate == 0:
            return x
        if keys is None:
            keys = torch.randint(2**62, x.shape[1:2], device=x.device)
        return torch.where(self._keep_mask(keys, first, x.shape), x / (1 - self.rate), 0.0)

    def _keep_mask(self, keys: Tensor, first: int, shape: torch.Size) -> Tensor:
        """(T, B, D) bool. Integers overflow on purpose: modulo 2^64 and 2^32."""
        frames, _, width = shape
        time = torch.arange(first, first + frames, device=keys.device)[:, None]
        rows = _low_32_bits(_hash(_hash(keys + self.layer * 2**20) + time))
        columns = _low_32_bits(_hash(torch.arange(width, device=keys.device)))
        bits = rows[:, :, None] + columns
        bits *= _FIRST
        bits ^= bits >> 15
        bits *= _SECOND
        return bits >= round(self.rate * 2**32) - 2**31


def _hash(numbers: Tensor) -> Tensor:
    """A hash of int64: two rounds of multiplication and folding the high half onto the low one."""
    for _ in range(2):
        numbers = (numbers + 1) * _MULTIPLIER
        numbers = numbers ^ ((numbers >> 32) & 0xFFFFFFFF)
    return numbers


def _low_32_bits(numbers: Tensor) -> Tensor:
    return ((numbers & 0xFFFFFFFF) - 2**31).to(torch.int32)
