"""SpecAugment: masks over bins and frames, drawn by seed, epoch and utterance, laid on features on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds2.audio.augment import of_view, utterance_rng
from ds2.config.schema import AugmentConfig, FeaturesConfig


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

    Widths are drawn evenly from 0 to the largest, positions evenly from those that fit. A time mask covers at most
    `augment.time_fraction` of its utterance.

    Args:
        lengths: (B,) int64 on the CPU, frames.
        bins: F, of the features.
        augment: counts and largest widths.
        features: the step, in seconds.
        seed, epoch: of the run.
        indices: (B,) position of each utterance in the training set.
        view: number of the view of each utterance: another has other masks.
    Returns:
        the masks, or None where the config has none.
    """
    if not augment.frequency_masks and not augment.time_masks:
        return None
    draws = np.stack([_mask_draws(augment, seed, epoch, index, view) for index in indices])
    frames = lengths.numpy()[:, None]
    widest_time = np.minimum(round(augment.time_width_s / features.step_s), np.floor(augment.time_fraction * frames))
    frequency, time = np.split(draws, [augment.frequency_masks], axis=1)
    return SpectrogramMasks(
        _placed(frequency, np.full_like(frames, bins), np.full_like(frames, min(augment.frequency_width, bins))),
        _placed(time, frames, widest_time),
    )


def apply_masks(features: Tensor, masks: SpectrogramMasks | None) -> Tensor:
    """Return features with the masked bins and frames set to 0, which is the corpus mean of normalised features.

    A handful of kernels a batch, however many masks.

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


def _mask_draws(config: AugmentConfig, seed: int, epoch: int, index: int, view: int) -> NDArray[np.float64]:
    return utterance_rng(seed, epoch, index, of_view("masks", view)).random(
        (config.frequency_masks + config.time_masks, 2)
    )


def _placed(draws: NDArray[np.float64], extent: NDArray[np.int64], widest: NDArray[np.float64]) -> Tensor:
    """Turn draws (B, M, 2) in [0, 1) into (first, width) within (B, 1) extents."""
    width = np.floor(draws[..., 0] * (widest + 1))
    first = np.floor(draws[..., 1] * (extent - width + 1))
    return torch.from_numpy(np.stack([first, width], axis=-1).astype(np.int64))


def _covered(masks: Tensor, extent: int) -> Tensor:
    """Return (B, extent) bool: which positions any of the masks (B, M, 2) covers."""
    position = torch.arange(extent, device=masks.device)
    first, width = masks.unsqueeze(-1).unbind(2)
    return ((position >= first) & (position < first + width)).any(1)
