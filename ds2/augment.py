"""Seeded augmentation: speed, noise, gain on waveforms (in the loader), SpecAugment masks on features (on the device).

Every draw depends on the seed, the epoch, the utterance's index and the purpose alone, never on worker, rank or
batch: a resumed run, or one on another number of ranks, hears what the unbroken one heard.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import soxr
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds2.config.schema import AugmentConfig, FeaturesConfig

Waveform = NDArray[np.float32]
NoiseSource = Callable[[np.random.Generator, int], Waveform]
"""Draws that many samples of noise at any level."""


def utterance_rng(seed: int, epoch: int, index: int, purpose: str) -> np.random.Generator:
    """Return the generator of one utterance's draws in one epoch; streams of different arguments are independent.

    Args:
        seed, epoch, index: not negative; index is the utterance's position in the training set.
        purpose: names what is drawn, so that a new kind of draw never shifts the others.
    """
    return np.random.default_rng([seed, epoch, index, zlib.crc32(purpose.encode())])


def augment_waveform(
    waveform: Waveform, config: AugmentConfig, sample_rate_hz: int, rng: np.random.Generator, noise: NoiseSource
) -> Waveform:
    """Return the waveform after speed, noise and gain, in this order.

    Args:
        waveform: (N,) float32 in [-1, 1]; not written to.
        config: which of them, and their ranges.
        sample_rate_hz: of the waveform.
        rng: the utterance's own (`utterance_rng`). The four decisions are drawn whether used or not, so switching one
            kind of augmentation off leaves the others as they were.
        noise: source of noise, scaled here to the drawn ratio of mean powers over the whole utterance. Without speech
            or noise power (digital silence) no ratio exists and nothing is added.
    Returns:
        (N',) float32, N' = N / speed factor; gain and noise may exceed 1 in size: nothing is clipped.
    """
    speed_draw, gain_draw, noise_draw, snr_draw = rng.random(4)
    if config.speed:
        factor = config.speed[int(speed_draw * len(config.speed))]
        if factor != 1.0:
            waveform = soxr.resample(waveform, sample_rate_hz * factor, sample_rate_hz)
    if noise_draw < config.noise_probability and len(waveform):
        added = noise(rng, len(waveform))
        speech_power, noise_power = _mean_power(waveform), _mean_power(added)
        if speech_power > 0.0 and noise_power > 0.0:
            low, high = config.noise_snr_db
            snr = 10.0 ** ((low + snr_draw * (high - low)) / 10.0)
            waveform = waveform + added * np.float32(np.sqrt(speech_power / (noise_power * snr)))
    if config.gain_db:
        low, high = config.gain_db
        waveform = waveform * np.float32(10.0 ** ((low + gain_draw * (high - low)) / 20.0))
    return waveform


def pink_noise(rng: np.random.Generator, samples: int) -> Waveform:
    """Draw Gaussian noise (samples,) float32 whose power falls as 1 / frequency, about as that of rooms and crowds."""
    length = 1 << max(samples - 1, 1).bit_length()  # a power of two: the transform is quick whatever `samples` is
    bins = length // 2 + 1
    spectrum = rng.standard_normal(2 * bins, dtype=np.float32).view(np.complex64)
    spectrum[0] = 0.0
    spectrum[1:] /= np.sqrt(np.arange(1, bins, dtype=np.float32))
    return np.fft.irfft(spectrum, length)[:samples].astype(np.float32)


def recorded_noise(recordings: Sequence[Waveform], rng: np.random.Generator, samples: int) -> Waveform:
    """Draw a random segment (samples,) float32 of a random recording, repeated where it is too short.

    Args:
        recordings: at least one, each (N,) float32; read lazily, one a draw.
        rng: the utterance's own.
        samples: length wanted.
    """
    recording = recordings[int(rng.integers(len(recordings)))]
    start = int(rng.integers(max(1, len(recording) - samples + 1)))
    if len(recording) == 0:
        return np.zeros(samples, np.float32)
    return np.resize(recording[start : start + samples], samples)


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
    Returns:
        the masks, or None where the config has none.
    """
    if not augment.frequency_masks and not augment.time_masks:
        return None
    draws = np.stack([_mask_draws(augment, seed, epoch, index) for index in indices])
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


def _mask_draws(config: AugmentConfig, seed: int, epoch: int, index: int) -> NDArray[np.float64]:
    return utterance_rng(seed, epoch, index, "masks").random((config.frequency_masks + config.time_masks, 2))


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


def _mean_power(waveform: Waveform) -> float:
    return float(np.square(waveform).mean())  # not np.dot: a threaded sum's bits would depend on the machine
