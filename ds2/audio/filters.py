"""Triangular filters over the bins of a spectrum, on Slaney's and on HTK's mel scale; float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ds2.config.schema import ConfigError


def mel_filters(mels: int, window_samples: int, sample_rate_hz: int) -> Tensor:
    """Return triangular mel filters (bins, mels) float64 from 0 Hz to half the rate, each summing to 1.

    The mel scale is Slaney's (linear up to 1 kHz, logarithmic above). It suits spectra that are not zero-padded: HTK's
    puts its lowest filters closer together than the bins of a 20 ms window.

    Raises:
        ConfigError: a filter would cover no bin.
    """
    weights, _ = _slaney(mels, window_samples, sample_rate_hz)
    return weights / weights.sum(0)


def nemo_filters(mels: int, points: int, sample_rate_hz: int) -> Tensor:
    """Return the same filters (bins, mels), but each of area 1 over Hz, as librosa and NeMo have them; raises too."""
    weights, widths_hz = _slaney(mels, points, sample_rate_hz)
    return weights * (2.0 / widths_hz)


def kaldi_filters(mels: int, points: int, sample_rate_hz: int) -> Tensor:
    """Return Kaldi's filters (bins, mels): straight over HTK's mel scale, 1 at their centres.

    They reach from 20 Hz to 400 Hz below half the rate.

    Raises:
        ConfigError: a filter would cover no bin, or the rate leaves no room for filters.
    """
    low_hz, high_hz = 20.0, sample_rate_hz / 2 - 400.0
    if high_hz <= low_hz:
        raise ConfigError(
            f"features.kind=kaldi_fbank at data.sample_rate_hz={sample_rate_hz}: its filters reach from {low_hz:g} Hz "
            "to 400 Hz below half the rate; take a higher rate"
        )
    low, high = (1127.0 * math.log1p(hz / 700.0) for hz in (low_hz, high_hz))
    corners = torch.linspace(low, high, mels + 2, dtype=torch.float64)
    bin_hz = torch.arange(points // 2 + 1, dtype=torch.float64) * (sample_rate_hz / points)
    weights = _triangles(1127.0 * torch.log1p(bin_hz / 700.0), corners)
    weights[-1] = 0.0  # half the rate itself is left out
    return _covering(weights, points, sample_rate_hz)


def _slaney(mels: int, points: int, sample_rate_hz: int) -> tuple[Tensor, Tensor]:
    """Filters (bins, mels), straight over Hz and 1 at their centres, and their widths in Hz."""
    corner_hz = _hz_from_mel(torch.linspace(0.0, _mel_from_hz(sample_rate_hz / 2), mels + 2, dtype=torch.float64))
    bin_hz = torch.arange(points // 2 + 1, dtype=torch.float64) * (sample_rate_hz / points)
    return _covering(_triangles(bin_hz, corner_hz), points, sample_rate_hz), corner_hz[2:] - corner_hz[:-2]


def _triangles(bins: Tensor, corners: Tensor) -> Tensor:
    low, centre, high, at = corners[:-2], corners[1:-1], corners[2:], bins[:, None]
    return torch.minimum((at - low) / (centre - low), (high - at) / (high - centre)).clamp(min=0.0)


def _covering(weights: Tensor, points: int, sample_rate_hz: int) -> Tensor:
    """The filters (bins, mels), if each covers a bin; of tensors without values that is not known."""
    empty = 0 if weights.is_meta else int((weights.sum(0) <= 0).sum())
    if empty:
        raise ConfigError(
            f"features.mels={weights.shape[1]}: {empty} filters lie between the bins of a {points}-sample window at "
            f"{sample_rate_hz} Hz; set fewer mels or a longer features.window_s"
        )
    return weights


_LINEAR_HZ_PER_MEL = 200.0 / 3.0
_LOG_START_HZ = 1000.0
_LOG_START_MEL = _LOG_START_HZ / _LINEAR_HZ_PER_MEL
_MEL_PER_LOG_HZ = 27.0 / math.log(6.4)


def _mel_from_hz(hz: float) -> float:
    if hz < _LOG_START_HZ:
        return hz / _LINEAR_HZ_PER_MEL
    return _LOG_START_MEL + math.log(hz / _LOG_START_HZ) * _MEL_PER_LOG_HZ


def _hz_from_mel(mel: Tensor) -> Tensor:
    logarithmic = _LOG_START_HZ * torch.exp((mel - _LOG_START_MEL) / _MEL_PER_LOG_HZ)
    return torch.where(mel < _LOG_START_MEL, mel * _LINEAR_HZ_PER_MEL, logarithmic)
