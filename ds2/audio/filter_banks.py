"""Mel filter banks, float64: those of log_mel, and the styles of Kaldi and NeMo as kaldi-native-fbank computes them.

kaldi-native-fbank computes the features of sherpa-onnx. Samples are in [-1, 1]; there is no dither and no energy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ds2.config.schema import ConfigError

MIN_ENERGY = torch.finfo(torch.float32).eps  # of a filter of Kaldi and NeMo, before the logarithm
PREEMPHASIS = 0.97
_LINEAR_HZ_PER_MEL = 200.0 / 3.0
_LOG_START_HZ = 1000.0
_LOG_START_MEL = _LOG_START_HZ / _LINEAR_HZ_PER_MEL
_MEL_PER_LOG_HZ = 27.0 / math.log(6.4)


def mel_filters(mels: int, window_samples: int, sample_rate_hz: int) -> Tensor:
    """Return triangular mel filters (bins, mels) float64 from 0 Hz to half the rate, each summing to 1.

    The mel scale is Slaney's (linear up to 1 kHz, logarithmic above). It suits spectra that are not zero-padded: the
    lowest filters on HTK's scale are closer together than the bins of a 20 ms window.

    Raises:
        ConfigError: a filter would cover no bin.
    """
    weights, _ = _slaney(mels, window_samples, sample_rate_hz)
    return weights / weights.sum(0)


def nemo_filters(mels: int, points: int, sample_rate_hz: int) -> Tensor:
    """Return the filters of `mel_filters`, each scaled to area 1 over Hz, as in librosa and NeMo; the same errors."""
    weights, widths_hz = _slaney(mels, points, sample_rate_hz)
    return weights * (2.0 / widths_hz)


def kaldi_filters(mels: int, points: int, sample_rate_hz: int) -> Tensor:
    """Return Kaldi's filters (bins, mels): triangles over HTK's mel scale with peaks of 1.

    They cover 20 Hz to 400 Hz below half the rate.

    Raises:
        ConfigError: a filter would cover no bin, or the rate is too low for any filter.
    """
    low_hz, high_hz = 20.0, sample_rate_hz / 2 - 400.0
    if high_hz <= low_hz:
        raise ConfigError(
            f"features.kind=kaldi_fbank at data.sample_rate_hz={sample_rate_hz}: its filters cover {low_hz:g} Hz "
            "to 400 Hz below half the rate; choose a higher rate"
        )
    low, high = (1127.0 * math.log1p(hz / 700.0) for hz in (low_hz, high_hz))
    corners = torch.linspace(low, high, mels + 2, dtype=torch.float64)
    bin_hz = torch.arange(points // 2 + 1, dtype=torch.float64) * (sample_rate_hz / points)
    weights = _triangles(1127.0 * torch.log1p(bin_hz / 700.0), corners)
    weights[-1] = 0.0  # half the rate itself is left out
    return _check_bins(weights, points, sample_rate_hz)


def _slaney(mels: int, points: int, sample_rate_hz: int) -> tuple[Tensor, Tensor]:
    """Return triangles (bins, mels) over Hz with peaks of 1, and their widths in Hz."""
    corner_hz = _hz_from_mel(torch.linspace(0.0, _mel_from_hz(sample_rate_hz / 2), mels + 2, dtype=torch.float64))
    bin_hz = torch.arange(points // 2 + 1, dtype=torch.float64) * (sample_rate_hz / points)
    return _check_bins(_triangles(bin_hz, corner_hz), points, sample_rate_hz), corner_hz[2:] - corner_hz[:-2]


def _triangles(bins: Tensor, corners: Tensor) -> Tensor:
    low, centre, high, at = corners[:-2], corners[1:-1], corners[2:], bins[:, None]
    return torch.minimum((at - low) / (centre - low), (high - at) / (high - centre)).clamp(min=0.0)


def _check_bins(weights: Tensor, points: int, sample_rate_hz: int) -> Tensor:
    """Return the filters (bins, mels) if each covers a bin; meta tensors are not checked."""
    empty = 0 if weights.is_meta else int((weights.sum(0) <= 0).sum())
    if empty:
        raise ConfigError(
            f"features.mels={weights.shape[1]}: {empty} filters lie between the bins of a {points}-sample window at "
            f"{sample_rate_hz} Hz; set fewer mels or a longer features.window_s"
        )
    return weights


def _mel_from_hz(hz: float) -> float:
    if hz < _LOG_START_HZ:
        return hz / _LINEAR_HZ_PER_MEL
    return _LOG_START_MEL + math.log(hz / _LOG_START_HZ) * _MEL_PER_LOG_HZ


def _hz_from_mel(mel: Tensor) -> Tensor:
    logarithmic = _LOG_START_HZ * torch.exp((mel - _LOG_START_MEL) / _MEL_PER_LOG_HZ)
    return torch.where(mel < _LOG_START_MEL, mel * _LINEAR_HZ_PER_MEL, logarithmic)


@dataclass(frozen=True)
class Style:
    """How a filter bank of Kaldi's kind is computed.

    Attributes:
        window: number of samples W -> window (W,) float64.
        filters: number of mels, points of the transform, rate in Hz -> filters (bins, mels) float64.
        remove_mean: whether the mean of each window is subtracted.
    """

    window: Callable[[int], Tensor]
    filters: Callable[[int, int, int], Tensor]
    remove_mean: bool


def _povey(samples: int) -> Tensor:
    """Return a symmetric Hann window to the power of 0.85."""
    return torch.hann_window(samples, periodic=False, dtype=torch.float64) ** 0.85


def _hann(samples: int) -> Tensor:
    return torch.hann_window(samples, periodic=True, dtype=torch.float64)


STYLES = {"kaldi_fbank": Style(_povey, kaldi_filters, True), "nemo_fbank": Style(_hann, nemo_filters, False)}
"""Styles by `features.kind`: Kaldi's own, which icefall trains with and most models of sherpa-onnx use, and NeMo's."""


def lead_samples(window_samples: int, step_samples: int) -> int:
    """Return how many samples before the first one frame 0 begins: frames are centred on steps (snip_edges=false)."""
    return window_samples // 2 - step_samples // 2


def preemphasise(windows: Tensor, style: Style) -> Tensor:
    """Return windows (..., W) less their mean where the style says so, then x[t] - 0.97 x[t - 1], x[-1] being x[0]."""
    x = windows - windows.mean(-1, keepdim=True) if style.remove_mean else windows
    return x - PREEMPHASIS * torch.cat([x[..., :1], x[..., :-1]], -1)


def fft_samples(window_samples: int) -> int:
    """Return the points of the transform: the next power of two, to which windows are zero-padded."""
    return 1 << (window_samples - 1).bit_length()
