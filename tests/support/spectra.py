"""A waveform with what speech has, and how far apart two computations of its log energies may be."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ds2.audio.features import Features

RATE = 16000


def speech_like(samples: int, seed: int = 0) -> np.ndarray:
    """Harmonics over noise that rises and falls, with an offset and a stretch of digital silence; 16-bit samples."""
    rng, time = np.random.default_rng(seed), np.arange(samples) / RATE
    tones = sum(np.sin(2 * np.pi * 130 * k * time + k) / k for k in range(1, 20))
    loudness = np.abs(np.sin(2 * np.pi * 1.7 * time))
    sound = 0.1 * loudness * tones + 0.003 * rng.standard_normal(samples) + 0.01
    sound[samples // 2 : samples // 2 + samples // 8] = 0.0
    return (np.round(sound * 32768) / 32768).astype(np.float32)


def rounding(features: Features, waveform: np.ndarray, log_energy: Tensor) -> Tensor:
    """How far apart two float32 computations of (F, T) may be, of a waveform (N,).

    A fast transform of 2^9 points errs in all bins alike, by a normal number of 0.6 u sqrt(9) of their root mean
    square (see test_features.py), 12 u being six of its deviations; removing the mean and pre-emphasis add roundings
    of the samples, at most 2 u of the largest each, which no bin shows more than their sum's root mean square. An
    energy sum(w p) whose amplitudes are off by e moves by at most 2 e sqrt(sum(w) energy) + sum(w) e^2.
    """
    u = torch.finfo(torch.float32).eps / 2
    padded = features.add_lead(torch.from_numpy(waveform)[None]).double()[0]
    windows = padded.unfold(0, features.window_samples, features.step_samples)
    scale = (windows * features.window.amax()).square().sum(-1).sqrt()  # bounds the root mean square over bins
    error = (12 + 4) * u * scale
    of_filters = torch.ones(features.bins) if features.mel_weights is None else features.mel_weights.sum(0)
    weight, energy = of_filters.double()[:, None], log_energy.double().exp()
    moved = 2 * error * (weight * energy).sqrt() + weight * error**2
    return 2 * (torch.log1p(moved / energy) + 4 * u * (1 + log_energy.abs()))
