"""What Kaldi's filter banks have of their own: mirrored edges, frames without their mean, Povey's window, HTK's mel.

As kaldi-native-fbank computes them with the settings of sherpa-onnx and of icefall: samples in [-1, 1], no dither, no
energy, filters from 20 Hz to 400 Hz below half the rate.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ds2.config.schema import ConfigError

LEAST_ENERGY = torch.finfo(torch.float32).eps  # of a filter, before the logarithm
PREEMPHASIS = 0.97
_LOW_HZ = 20.0
_HIGH_BELOW_NYQUIST_HZ = 400.0


def lead_samples(window_samples: int, step_samples: int) -> int:
    """Samples by which frame 0 begins before the first: frames are centred on their steps (snip_edges is off)."""
    return window_samples // 2 - step_samples // 2


def povey_window(samples: int) -> Tensor:
    """A symmetric Hann window to the power of 0.85, float64."""
    return torch.hann_window(samples, periodic=False, dtype=torch.float64) ** 0.85


def emphasised(windows: Tensor) -> Tensor:
    """Windows (..., W) without their mean, each sample less 0.97 of the one before it, the first less of itself."""
    centred = windows - windows.mean(-1, keepdim=True)
    return centred - PREEMPHASIS * torch.cat([centred[..., :1], centred[..., :-1]], -1)


def fft_samples(window_samples: int) -> int:
    """Points of the transform: the next power of two; zeros fill the window up."""
    return 1 << (window_samples - 1).bit_length()


def mel_banks(mels: int, points: int, sample_rate_hz: int) -> Tensor:
    """Triangular filters (points / 2 + 1, mels) float64, straight over the mel scale and 1 at their centres.

    Raises:
        ConfigError: a filter covers no bin, or the rate leaves no room for filters.
    """
    high_hz = sample_rate_hz / 2 - _HIGH_BELOW_NYQUIST_HZ
    if high_hz <= _LOW_HZ:
        raise ConfigError(
            f"features.kind=kaldi_fbank at data.sample_rate_hz={sample_rate_hz}: its filters reach from {_LOW_HZ:g} Hz "
            f"to {_HIGH_BELOW_NYQUIST_HZ:g} Hz below half the rate; take a higher rate"
        )
    corners = torch.linspace(_mel(_LOW_HZ), _mel(high_hz), mels + 2, dtype=torch.float64)
    bins = 1127.0 * torch.log1p(torch.arange(points // 2 + 1, dtype=torch.float64) * (sample_rate_hz / points) / 700.0)
    low, centre, high = corners[:-2], corners[1:-1], corners[2:]
    mel = bins[:, None]
    weights = torch.minimum((mel - low) / (centre - low), (high - mel) / (high - centre)).clamp(min=0.0)
    weights[-1] = 0.0  # half the rate itself is left out
    empty = int((weights.sum(0) <= 0).sum())
    if empty:
        raise ConfigError(
            f"features.mels={mels}: {empty} filters lie between the bins of a {points}-point transform at "
            f"{sample_rate_hz} Hz; set fewer mels or a longer features.window_s"
        )
    return weights


def _mel(hz: float) -> float:
    return 1127.0 * math.log1p(hz / 700.0)
