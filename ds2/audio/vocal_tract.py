"""Vocal tract length perturbation: an utterance as of a speaker whose throat has another length (Jaitly, Hinton 2013).

Shapes: B utterances, F bins, T frames.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds2.audio.augment import of_view, utterance_rng
from ds2.config.schema import AugmentConfig

MILLION = 1_000_000  # factors travel as whole numbers
_STRAIGHT = 0.6  # of half the rate: what lies below is multiplied, formants above all


def warp_factors(augment: AugmentConfig, seed: int, epoch: int, indices: Sequence[int], view: int = 0) -> Tensor | None:
    """Draw the factor of every utterance of a batch, in millionths, (B, 1) int64; None where the config has none.

    Args:
        augment: `vtlp`, the least and the largest; they are drawn evenly.
        seed, epoch: of the run.
        indices: (B,) position of each utterance in the training set.
        view: number of the view of each utterance: another has another factor.
    """
    if not augment.vtlp:
        return None
    low, high = augment.vtlp
    purpose = of_view("vtlp", view)
    drawn = [utterance_rng(seed, epoch, index, purpose).uniform(low, high) for index in indices]
    return torch.tensor([[round(factor * MILLION)] for factor in drawn], dtype=torch.int64)


def warped_hz(hz: Tensor, factors: Tensor, rate_hz: int) -> Tensor:
    """Where bins are read (section 2.1): at a times their frequency up to a bound, then straight to half the rate.

    The bound is 0.6 S / 2 min(a, 1) / a, at the rate S; the paper has 4.8 kHz at 16 kHz.

    Args:
        hz: (F,) from 0 to half the rate.
        factors: (B,) above 0.
        rate_hz: of the waveform.
    Returns:
        (B, F) in Hz.
    """
    half = rate_hz / 2
    factor = factors[:, None]
    reached = _STRAIGHT * half * factor.clamp(max=1.0)
    bound = reached / factor
    above = half - (half - reached) / (half - bound) * (half - hz)
    return torch.where(hz <= bound, hz * factor, above)


def warp(features: Tensor, centres_hz: Tensor, factors: Tensor | None, rate_hz: int) -> Tensor:
    """Return features whose bins are read at other frequencies, straight lines between bins; 1 leaves them as they are.

    Normalised features are wanted: what moves is how an utterance differs from the mean of the corpus, not that mean.

    Args:
        features: (B, F, T), any device.
        centres_hz: (F,) frequencies of the bins, rising, on the same device.
        factors: (B,) int64 on the same device, in millionths; None: none are warped.
        rate_hz: of the waveform.
    """
    if factors is None:
        return features
    _, bins, frames = features.shape
    wanted = warped_hz(centres_hz, factors / MILLION, rate_hz)
    below = (torch.searchsorted(centres_hz, wanted, right=True) - 1).clamp(0, bins - 2)
    low, high = centres_hz[below], centres_hz[below + 1]
    share = ((wanted - low) / (high - low)).clamp(0.0, 1.0)[:, :, None]
    rows = below[:, :, None].expand(-1, -1, frames)
    return torch.lerp(features.gather(1, rows), features.gather(1, rows + 1), share)
