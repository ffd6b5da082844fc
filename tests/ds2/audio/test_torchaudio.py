"""Kaldi's filter banks on a GPU against torchaudio's."""

from __future__ import annotations

import pytest
import torch
from support.oracles import torchaudio
from support.spectra import RATE, rounding, speech_like

from ds2.audio.features import Features
from ds2.config.schema import FeaturesConfig


@pytest.mark.gpu
def test_equals_torchaudio() -> None:
    oracle = torchaudio().compliance.kaldi.fbank
    features, waveform = Features(FeaturesConfig(kind="kaldi_fbank", window_s=0.025), RATE).cuda(), speech_like(24000)
    got, lengths = features(torch.from_numpy(waveform)[None].cuda(), torch.tensor([24000]))
    wanted = oracle(
        torch.from_numpy(waveform)[None], dither=0.0, snip_edges=False, num_mel_bins=80, low_freq=20.0, high_freq=-400.0
    ).t()[:, : int(lengths)]
    assert got.shape == (1, *wanted.shape) == (1, 80, 149)
    assert ((got[0].cpu() - wanted).abs() <= rounding(features.cpu(), waveform, wanted)).all()
