"""Vocal tract length perturbation: formants move by the factor, drawn for each utterance alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial

import pytest
import torch

from ds2.audio.augment import utterance_rngs
from ds2.audio.features import Features
from ds2.audio.spec_augment import MILLION, frequency_factors, warp_frequency, warped_hz
from ds2.config.schema import AugmentConfig, FeaturesConfig

RATE_HZ = 16000


def given(*factors: float) -> torch.Tensor:
    return torch.tensor([round(factor * MILLION) for factor in factors])


def test_frequencies_are_those_of_the_paper() -> None:
    hz = torch.tensor([0.0, 1000.0, 4000.0, 4800.0, 6400.0, 8000.0], dtype=torch.float64)
    # a = 1.2: times a up to 4 kHz, which reads 4.8, and straight from there to 8 kHz; a = 0.8: times a up to 4.8 kHz.
    wanted = [
        [0.0, 1200.0, 4800.0, 8000 - 0.8 * 3200, 8000 - 0.8 * 1600, 8000.0],
        [0.0, 800.0, 3200.0, 3840.0, 8000 - 1.3 * 1600, 8000.0],
    ]
    found = warped_hz(hz, torch.tensor([1.2, 0.8], dtype=torch.float64), RATE_HZ)
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-8)


@pytest.mark.parametrize("kind", ["log_spectrogram", "log_mel", "kaldi_fbank", "nemo_fbank"])
def test_a_tone_moves_to_where_the_factor_says(kind: str) -> None:
    features = Features(FeaturesConfig(kind=kind), RATE_HZ)
    time_s = torch.arange(RATE_HZ) / RATE_HZ
    tones = torch.stack([torch.sin(2 * math.pi * hz * time_s) for hz in (2000.0, 2000.0 * 1.15, 2000.0 * 0.9)])
    plain, _ = features(tones[:1], torch.tensor([RATE_HZ]))
    moved, _ = features(tones, torch.full((3,), RATE_HZ))
    warped = warp_frequency(moved, features.centres_hz, given(1.0, 1.15, 0.9), RATE_HZ)
    assert torch.equal(warped[:1], plain)
    assert torch.equal(warp_frequency(moved, features.centres_hz, given(1.0, 1.0, 1.0), RATE_HZ), moved)
    peak = plain.mean(2).argmax(1)
    assert bool(((warped.mean(2).argmax(1) - peak).abs() <= 1).all())
    assert bool(((moved.mean(2).argmax(1) - peak).abs()[1:] > 1).all())


def test_a_single_bin_stays() -> None:
    features = torch.randn(2, 1, 3)
    assert torch.equal(warp_frequency(features, torch.tensor([500.0]), given(0.9, 1.1), RATE_HZ), features)


def test_rising_features_are_read_at_the_frequency_itself() -> None:
    features = Features(FeaturesConfig(), RATE_HZ)
    rising = features.centres_hz[None, :, None].expand(2, -1, 3)
    warped = warp_frequency(rising, features.centres_hz, given(1.1, 0.85), RATE_HZ)
    wanted = warped_hz(features.centres_hz.double(), torch.tensor([1.1, 0.85], dtype=torch.float64), RATE_HZ)
    torch.testing.assert_close(warped[:, :, 1].double(), wanted, rtol=1e-6, atol=8000 * 2.0**-20)


def test_factors_are_drawn_for_each_utterance_epoch_and_view() -> None:
    config = AugmentConfig(vtlp=[0.9, 1.1])

    def factors(seed: int, epoch: int, indices: Iterable[int], view: int = 0) -> torch.Tensor | None:
        return frequency_factors(config, partial(utterance_rngs, seed, epoch, indices, view))

    assert frequency_factors(AugmentConfig(), partial(utterance_rngs, 1, 1, [0], 0)) is None
    drawn = factors(1, 2, range(1000))
    assert drawn is not None and drawn.shape == (1000, 1)
    assert 900_000 <= int(drawn.min()) < 901_000 and 1_099_000 < int(drawn.max()) <= 1_100_000
    assert abs(float(drawn.double().mean()) - MILLION) < 5 * 0.2 * MILLION / math.sqrt(12 * 1000)
    one = factors(1, 2, [7])
    assert one is not None and torch.equal(one, drawn[7:8])
    others = [factors(2, 2, [7]), factors(1, 3, [7]), factors(1, 2, [7], view=1)]
    assert all(other is not None and not torch.equal(other, one) for other in others)
