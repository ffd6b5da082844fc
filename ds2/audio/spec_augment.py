"""Augmentation of features on the device: SpecAugment's masks, and vocal tract length perturbation.

What is drawn depends on seed, epoch and utterance alone. Shapes: B utterances, F bins, T frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds2.audio.augment import of_view, utterance_rng
from ds2.config.schema import AugmentConfig, FeaturesConfig

MILLION = 1_000_000  # warp factors are stored as integers, in millionths
_WARP_BOUND = 0.6  # of half the rate: frequencies below are multiplied; formants lie there


@dataclass(frozen=True)
class SpectrogramMasks:
    """SpecAugment masks of a batch: first bin or frame and width of each, int64 on the CPU."""

    frequency: Tensor  # (B, masks, 2)
    time: Tensor  # (B, masks, 2)


def spectrogram_masks(
    lengths: Tensor,
    bins: int,
    augment: AugmentConfig,
    features: FeaturesConfig,
    seed: int,
    epoch: int,
    indices: Sequence[int],
    view: int = 0,
) -> SpectrogramMasks | None:
    """Draw the SpecAugment masks of a batch (Park et al. 2019, section 2, without time warping).

    Widths are drawn uniformly from 0 to the largest, positions uniformly from those that fit. A time mask covers at
    most `augment.time_fraction` of its utterance.

    Args:
        lengths: (B,) int64 on the CPU, frames.
        bins: F, of the features.
        augment: counts and largest widths.
        features: the step, in seconds.
        seed, epoch: of the run.
        indices: (B,) position of each utterance in the training set.
        view: index of the view; each view of an utterance has its own masks.
    Returns:
        the masks; None where `augment` has none.
    """
    if not augment.frequency_masks and not augment.time_masks:
        return None
    draws = np.stack([_mask_draws(augment, seed, epoch, index, view) for index in indices])
    frames = lengths.numpy()[:, None]
    widest_time = np.minimum(round(augment.time_width_s / features.step_s), np.floor(augment.time_fraction * frames))
    frequency, time = np.split(draws, [augment.frequency_masks], axis=1)
    return SpectrogramMasks(
        _positions(frequency, np.full_like(frames, bins), np.full_like(frames, min(augment.frequency_width, bins))),
        _positions(time, frames, widest_time),
    )


def apply_masks(features: Tensor, masks: SpectrogramMasks | None) -> Tensor:
    """Return features with the masked bins and frames set to 0, which is the corpus mean of normalised features.

    The number of kernels does not depend on the number of masks.

    Args:
        features: (B, F, T), any device.
        masks: of the same B utterances, from `spectrogram_masks`; None leaves the features as they are.
    """
    if masks is None:
        return features
    _, bins, frames = features.shape
    covered = _covered(masks.frequency.to(features.device, non_blocking=True), bins)[:, :, None]
    covered = covered | _covered(masks.time.to(features.device, non_blocking=True), frames)[:, None, :]
    return features.masked_fill(covered, 0.0)


def warp_factors(augment: AugmentConfig, seed: int, epoch: int, indices: Sequence[int], view: int = 0) -> Tensor | None:
    """Draw the warp factor of each utterance of a batch, (B, 1) int64 in millionths; None without `augment.vtlp`.

    Vocal tract length perturbation (Jaitly and Hinton 2013) makes an utterance sound like a speaker whose vocal tract
    has another length.

    Args:
        augment: `vtlp`: least and largest factor; factors are drawn uniformly between them.
        seed, epoch: of the run.
        indices: (B,) position of each utterance in the training set.
        view: index of the view; each view of an utterance has its own factor.
    """
    if not augment.vtlp:
        return None
    low, high = augment.vtlp
    effect = of_view("vtlp", view)
    drawn = [utterance_rng(seed, epoch, index, effect).uniform(low, high) for index in indices]
    return torch.tensor([[round(factor * MILLION)] for factor in drawn], dtype=torch.int64)


def warped_hz(hz: Tensor, factors: Tensor, rate_hz: int) -> Tensor:
    """Return the frequency at which each bin is read, piecewise linear (Jaitly and Hinton 2013, section 2.1).

    A factor a maps f to a f up to the bound 0.6 S / 2 min(a, 1) / a at the rate S (the paper: 4.8 kHz at 16 kHz), and
    linearly from there to S / 2.

    Args:
        hz: (F,) from 0 to half the rate.
        factors: (B,) above 0.
        rate_hz: of the waveform.
    Returns:
        (B, F) in Hz.
    """
    half = rate_hz / 2
    factor = factors[:, None]
    reached = _WARP_BOUND * half * factor.clamp(max=1.0)
    bound = reached / factor
    above = half - (half - reached) / (half - bound) * (half - hz)
    return torch.where(hz <= bound, hz * factor, above)


def warp(features: Tensor, centres_hz: Tensor, factors: Tensor | None, rate_hz: int) -> Tensor:
    """Return features whose bins are read at warped frequencies, by linear interpolation; factor 1 changes nothing.

    Args:
        features: (B, F, T), any device; normalised, so that deviations from the corpus mean move, not the mean itself.
        centres_hz: (F,) frequencies of the bins, rising, on the same device.
        factors: (B,) int64 on the same device, in millionths; None warps nothing.
        rate_hz: of the waveform.
    """
    if factors is None:
        return features
    _, bins, frames = features.shape
    source_hz = warped_hz(centres_hz, factors / MILLION, rate_hz)
    below = (torch.searchsorted(centres_hz, source_hz, right=True) - 1).clamp(0, bins - 2)
    low, high = centres_hz[below], centres_hz[below + 1]
    share = ((source_hz - low) / (high - low)).clamp(0.0, 1.0)[:, :, None]
    rows = below[:, :, None].expand(-1, -1, frames)
    return torch.lerp(features.gather(1, rows), features.gather(1, rows + 1), share)


def _mask_draws(config: AugmentConfig, seed: int, epoch: int, index: int, view: int) -> NDArray[np.float64]:
    return utterance_rng(seed, epoch, index, of_view("masks", view)).random(
        (config.frequency_masks + config.time_masks, 2)
    )


def _positions(draws: NDArray[np.float64], extent: NDArray[np.int64], widest: NDArray[np.float64]) -> Tensor:
    """Turn draws (B, M, 2) in [0, 1) into (first, width) within (B, 1) extents."""
    width = np.floor(draws[..., 0] * (widest + 1))
    first = np.floor(draws[..., 1] * (extent - width + 1))
    return torch.from_numpy(np.stack([first, width], axis=-1).astype(np.int64))


def _covered(masks: Tensor, extent: int) -> Tensor:
    """Return (B, extent) bool: which positions any of the masks (B, M, 2) covers."""
    position = torch.arange(extent, device=masks.device)
    first, width = masks.unsqueeze(-1).unbind(2)
    return ((position >= first) & (position < first + width)).any(1)
