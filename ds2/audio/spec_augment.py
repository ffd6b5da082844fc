"""Augmentation of features on the device: SpecAugment's time warping and masks, and vocal tract length perturbation.

What is drawn depends on seed, epoch and utterance alone. Shapes: B utterances, F bins, T frames.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds2.audio.augment import BatchRngs
from ds2.config.schema import AugmentConfig

MILLION = 1_000_000  # factors of frequencies are integers, in millionths, so that one int64 tensor holds all draws
_WARP_BOUND = 0.6  # of half the rate: frequencies below are multiplied; formants lie there


def spectrogram_masks(lengths: Tensor, bins: int, augment: AugmentConfig, step_s: float, rngs_of: BatchRngs) -> Tensor:
    """Draw the SpecAugment masks of a batch (Park et al. 2019, section 2).

    Widths are drawn uniformly from 0 to the largest, positions uniformly from those that fit. A time mask covers at
    most `augment.time_fraction` of its utterance.

    Args:
        lengths: (B,) int64 on the CPU, frames.
        bins: F, of the features.
        step_s: from frame to frame.
    Returns:
        (B, masks, 2) int64 on the CPU: first bin and width of the masks of frequencies, then first frame and width of
        those of time.
    """
    masks = augment.frequency_masks + augment.time_masks
    if not masks:
        return torch.empty(len(lengths), 0, 2, dtype=torch.int64)
    draws = np.stack([rng.random((masks, 2)) for rng in rngs_of("masks")])
    frames = lengths.numpy()[:, None]
    widest_time = np.minimum(round(augment.time_width_s / step_s), np.floor(augment.time_fraction * frames))
    frequency = _positions(draws[:, : augment.frequency_masks], bins, min(augment.frequency_width, bins))
    return torch.cat([frequency, _positions(draws[:, augment.frequency_masks :], frames, widest_time)], 1)


def apply_masks(features: Tensor, masks: Tensor, frequency_masks: int) -> Tensor:
    """Return features with the masked bins and frames set to 0, which is the corpus mean of normalised features.

    The number of kernels does not depend on the number of masks.

    Args:
        features: (B, F, T), any device.
        masks: (B, masks, 2) on the same device, from `spectrogram_masks`; of none, the features stay as they are.
        frequency_masks: how many of them mask frequencies.
    """
    if not masks.shape[1]:
        return features
    _, bins, frames = features.shape
    frequency, time = masks[:, :frequency_masks], masks[:, frequency_masks:]
    return features.masked_fill(_covered(frequency, bins)[:, :, None] | _covered(time, frames)[:, None, :], 0.0)


def time_warps(lengths: Tensor, augment: AugmentConfig, step_s: float, rngs_of: BatchRngs) -> Tensor | None:
    """Draw the time warp of each utterance of a batch (Park et al. 2019, section 2); None without `time_warp_s`.

    A frame at least W from both ends moves by up to W, forwards or backwards; both are drawn uniformly. W is
    `augment.time_warp_s`, or less where an utterance is too short for that. Both ends stay. Views of an utterance are
    compared frame by frame, so they share the warp that is drawn for view 0.

    Args:
        lengths: (B,) int64 on the CPU, frames.
        step_s: from frame to frame.
    Returns:
        (B, 2) int64: the frame, and where it moves to; both 0 for utterances of fewer than 5 frames, which do not move.
    """
    if not augment.time_warp_s:
        return None
    draws = np.stack([rng.random(2) for rng in rngs_of("time warp")])
    frames = lengths.numpy()
    reach = np.minimum(round(augment.time_warp_s / step_s), (frames - 3) // 2).clip(0)
    frame = reach + 1 + np.floor(draws[:, 0] * (frames - 2 * reach - 2))  # from reach + 1 to frames - 2 - reach
    moved = frame - reach + np.floor(draws[:, 1] * (2 * reach + 1))
    warps = np.where(reach[:, None] > 0, np.stack([frame, moved], axis=1), 0)
    return torch.from_numpy(warps.astype(np.int64))


def warp_time(features: Tensor, lengths: Tensor, warps: Tensor | None) -> Tensor:
    """Return features with one frame of each utterance moved, and the time between it and both ends stretched.

    Frames are read by linear interpolation. The number of frames stays.

    Args:
        features: (B, F, T), any device.
        lengths: (B,) int64 on the same device, frames of each utterance.
        warps: (B, 2) int64 on the same device, from `time_warps`; None warps nothing.
    Returns:
        (B, F, T), 0 after each length.
    """
    if warps is None:
        return features
    _, bins, frames = features.shape
    at = torch.arange(frames, dtype=torch.float64, device=features.device)
    last = (lengths - 1).clamp(min=0)[:, None]
    frame, moved = warps[:, :1], warps[:, 1:]
    # Float64, and products before the division: an utterance that does not move is read at whole frames.
    before = at * frame / moved.clamp(min=1)
    after = last - (last - at).clamp(min=0) * (last - frame) / (last - moved).clamp(min=1)
    source = torch.where(at < moved, before, after)
    below = source.long().clamp(max=max(frames - 2, 0))
    above = (below + 1).clamp(max=frames - 1)
    share = (source - below).to(features.dtype)[:, None, :]
    low, high = (features.gather(2, index[:, None, :].expand(-1, bins, -1)) for index in (below, above))
    return torch.where((at < lengths[:, None])[:, None, :], torch.lerp(low, high, share), 0.0)


def frequency_factors(augment: AugmentConfig, rngs_of: BatchRngs) -> Tensor | None:
    """Draw the factor of each utterance's frequencies, (B, 1) int64 in millionths; None without `augment.vtlp`.

    Vocal tract length perturbation (Jaitly and Hinton 2013) makes an utterance sound like a speaker whose vocal tract
    has another length. Factors are drawn uniformly from the least to the largest.
    """
    if not augment.vtlp:
        return None
    low, high = augment.vtlp
    drawn = [[round(rng.uniform(low, high) * MILLION)] for rng in rngs_of("vtlp")]
    return torch.tensor(drawn, dtype=torch.int64)


def warped_hz(hz: Tensor, factors: Tensor, rate_hz: int) -> Tensor:
    """Return the frequency at which each bin is read, piecewise linear (Jaitly and Hinton 2013, section 2.1).

    A factor a maps f to a f up to the bound 0.6 S / 2 min(a, 1) / a at the rate S (the paper: 4.8 kHz at 16 kHz), and
    linearly from there to S / 2.

    Args:
        hz: (F,) from 0 to half the rate.
        factors: (B,) above 0.
    Returns:
        (B, F) in Hz.
    """
    half = rate_hz / 2
    factor = factors[:, None]
    reached = _WARP_BOUND * half * factor.clamp(max=1.0)
    bound = reached / factor
    above = half - (half - reached) / (half - bound) * (half - hz)
    return torch.where(hz <= bound, hz * factor, above)


def warp_frequency(features: Tensor, centres_hz: Tensor, factors: Tensor | None, rate_hz: int) -> Tensor:
    """Return features whose bins are read at warped frequencies, by linear interpolation; factor 1 changes nothing.

    Args:
        features: (B, F, T), any device; normalised, so that deviations from the corpus mean move, not the mean itself.
        centres_hz: (F,) frequencies of the bins, rising, on the same device.
        factors: (B,) int64 on the same device, in millionths; None warps nothing.
    """
    batch, bins, _ = features.shape
    if factors is None or bins == 1:  # nothing lies between a single bin and the next
        return features
    source_hz = warped_hz(centres_hz, factors / MILLION, rate_hz)
    below = (torch.searchsorted(centres_hz, source_hz, right=True) - 1).clamp(0, bins - 2)
    low, high = centres_hz[below], centres_hz[below + 1]
    share = ((source_hz - low) / (high - low)).clamp(0.0, 1.0)[:, :, None]
    flat = features.flatten(0, 1)
    rows = (below + bins * torch.arange(batch, device=features.device)[:, None]).flatten()
    lower, upper = (flat.index_select(0, index).view_as(features) for index in (rows, rows + 1))
    return torch.lerp(lower, upper, share)


def _positions(
    draws: NDArray[np.float64], extent: NDArray[np.int64] | int, widest: NDArray[np.float64] | int
) -> Tensor:
    """Turn draws (B, M, 2) in [0, 1) into (first, width); the extent and the largest width are numbers or (B, 1)."""
    width = np.floor(draws[..., 0] * (widest + 1))
    first = np.floor(draws[..., 1] * (extent - width + 1))
    return torch.from_numpy(np.stack([first, width], axis=-1).astype(np.int64))


def _covered(masks: Tensor, extent: int) -> Tensor:
    """Return (B, extent) bool: which positions any of the masks (B, M, 2) covers."""
    position = torch.arange(extent, device=masks.device)
    first, width = masks.unsqueeze(-1).unbind(2)
    return ((position >= first) & (position < first + width)).any(1)
