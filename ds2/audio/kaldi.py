"""Filter banks as kaldi-native-fbank computes them for sherpa-onnx: mirrored edges, pre-emphasis, zero-padded windows.

Samples in [-1, 1], no dither, no energy. Two styles of settings: Kaldi's own, which icefall trains with and sherpa-onnx
has for most models, and NeMo's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ds2.audio.filters import kaldi_filters, nemo_filters

LEAST_ENERGY = torch.finfo(torch.float32).eps  # of a filter, before the logarithm
PREEMPHASIS = 0.97


@dataclass(frozen=True)
class Style:
    """What differs.

    Attributes:
        window: of W samples, float64.
        filters: (bins, mels) float64 of mels, points of the transform, rate in Hz.
        centred: whether the mean of a window is taken off.
    """

    window: Callable[[int], Tensor]
    filters: Callable[[int, int, int], Tensor]
    centred: bool


def _povey(samples: int) -> Tensor:
    """A symmetric Hann window to the power of 0.85."""
    return torch.hann_window(samples, periodic=False, dtype=torch.float64) ** 0.85


def _hann(samples: int) -> Tensor:
    return torch.hann_window(samples, periodic=True, dtype=torch.float64)


STYLES = {"kaldi_fbank": Style(_povey, kaldi_filters, True), "nemo_fbank": Style(_hann, nemo_filters, False)}
"""By `features.kind`."""


def lead_samples(window_samples: int, step_samples: int) -> int:
    """Samples by which frame 0 begins before the first: frames are centred on their steps (snip_edges is off)."""
    return window_samples // 2 - step_samples // 2


def emphasised(windows: Tensor, style: Style) -> Tensor:
    """Windows (..., W), centred where the style is; each sample less 0.97 of the one before, the first of itself."""
    x = windows - windows.mean(-1, keepdim=True) if style.centred else windows
    return x - PREEMPHASIS * torch.cat([x[..., :1], x[..., :-1]], -1)


def fft_samples(window_samples: int) -> int:
    """Points of the transform: the next power of two; zeros fill the window up."""
    return 1 << (window_samples - 1).bit_length()
