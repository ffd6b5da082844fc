"""Kaldi's filter banks, resampling and edit distances against torchaudio's."""

from __future__ import annotations

import numpy as np
import pytest
import soxr
import torch
from support.oracles import torchaudio
from support.spectra import RATE, rounding, speech_like

from ds2.audio.features import Features
from ds2.config.schema import FeaturesConfig
from ds2.scoring.wer import align, count_edits


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_filter_banks_are_torchaudio_s(device: str) -> None:
    oracle = torchaudio().compliance.kaldi.fbank
    features, waveform = Features(FeaturesConfig(kind="kaldi_fbank", window_s=0.025), RATE), speech_like(24000)
    got, lengths = features.to(device)(torch.from_numpy(waveform)[None].to(device), torch.tensor([24000]))
    wanted = oracle(
        torch.from_numpy(waveform)[None], dither=0.0, snip_edges=False, num_mel_bins=80, low_freq=20.0, high_freq=-400.0
    ).t()[:, : int(lengths)]
    assert got.shape == (1, *wanted.shape) == (1, 80, 149)
    assert ((got[0].cpu() - wanted).abs() <= rounding(features.cpu(), waveform, wanted)).all()


@pytest.mark.parametrize("rate_hz", [8000, 44100, 48000])
def test_soxr_resamples_better_than_torchaudio(rate_hz: int) -> None:
    resample = torchaudio().functional.resample
    tone, wanted = (np.sin(2 * np.pi * 3000 * np.arange(rate) / rate).astype("f") for rate in (rate_hz, RATE))

    def error(resampled: np.ndarray) -> float:
        inner = slice(RATE // 8, -RATE // 8)
        return float(np.square(resampled[:RATE][inner] - wanted[inner]).mean())

    ours, theirs = soxr.resample(tone, rate_hz, RATE, quality="HQ"), resample(torch.from_numpy(tone), rate_hz, RATE)
    assert error(ours) < 1e-10 < error(theirs.numpy())  # the bound is 97 dB below the tone


def test_edit_distances_are_torchaudio_s() -> None:
    distance, rng = torchaudio().functional.edit_distance, np.random.default_rng(0)
    for _ in range(100):
        reference, hypothesis = (rng.integers(0, 4, rng.integers(1, 12)).tolist() for _ in range(2))
        assert count_edits(align(reference, hypothesis)).errors == distance(reference, hypothesis)
