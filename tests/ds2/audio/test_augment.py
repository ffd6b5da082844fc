"""Augmentation: what each kind does to a signal, and that draws depend on (seed, epoch, utterance) alone."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from ds2.audio.augment import augment_waveform, coloured_noise, random_segment, speed_range, utterance_rng
from ds2.config.schema import AugmentConfig

RATE = 16000
pink_noise = partial(coloured_noise, exponent=1.0)


def tone(hz: float = 500.0, samples: int = RATE) -> np.ndarray:
    return (0.1 * np.sin(2 * np.pi * hz * np.arange(samples) / RATE)).astype(np.float32)


def augmented(config: AugmentConfig, waveform: np.ndarray | None = None, index: int = 0) -> np.ndarray:
    source = tone() if waveform is None else waveform
    return augment_waveform(source, config, RATE, partial(utterance_rng, 1, 1, index), pink_noise)


def peak_hz(waveform: np.ndarray) -> float:
    return float(np.abs(np.fft.rfft(waveform * np.hanning(len(waveform)))).argmax() * RATE / len(waveform))


def test_nothing_configured_changes_nothing() -> None:
    waveform = tone()
    assert np.array_equal(augmented(AugmentConfig()), waveform)


@pytest.mark.parametrize("factor", [0.9, 1.1, 1.5])
def test_speed_shortens_and_raises_pitch(factor: float) -> None:
    fast = augmented(AugmentConfig(speed=[factor]))
    assert fast.dtype == np.float32
    assert len(fast) == pytest.approx(RATE / factor, abs=2)
    assert peak_hz(fast) == pytest.approx(500 * factor, abs=2)
    assert np.abs(fast).max() == pytest.approx(0.1, rel=0.1)


def test_the_range_of_speeds_is_that_of_the_factors() -> None:
    assert speed_range(AugmentConfig()) == (1.0, 1.0)
    assert speed_range(AugmentConfig(speed=[0.9, 1.2])) == (0.9, 1.2)


def test_every_speed_factor_is_drawn() -> None:
    config = AugmentConfig(speed=[0.9, 1.0, 1.1])
    lengths = [len(augmented(config, index=i)) for i in range(60)]
    counts = {n: lengths.count(n) for n in set(lengths)}
    assert len(counts) == 3 and min(counts.values()) >= 10


def test_gain_stays_in_its_range_and_is_not_clipped() -> None:
    gains = [
        20 * np.log10(np.abs(augmented(AugmentConfig(gain_db=[-6.0, 30.0]), index=i)).max() / 0.1) for i in range(50)
    ]
    assert min(gains) >= -6.01 and max(gains) <= 30.01
    assert max(gains) - min(gains) > 25 and max(gains) > 20


def test_noise_has_the_drawn_ratio() -> None:
    waveform = tone()
    for index in range(5):
        config = AugmentConfig(noise_probability=1.0, noise_snr_db=[12.0, 12.0])
        added = augmented(config, waveform, index) - waveform
        ratio_db = 10 * np.log10(np.mean(waveform.astype(np.float64) ** 2) / np.mean(added.astype(np.float64) ** 2))
        assert ratio_db == pytest.approx(12.0, abs=0.01)


def test_noise_comes_as_often_as_asked() -> None:
    noisy = sum(
        not np.array_equal(augmented(AugmentConfig(noise_probability=0.4), tone(samples=400), i), tone(samples=400))
        for i in range(300)
    )
    assert 90 <= noisy <= 150


def test_silence_and_silent_noise_stay_finite() -> None:
    config = AugmentConfig(noise_probability=1.0, gain_db=[0.0, 0.0], speed=[0.9])
    assert not augmented(config, np.zeros(3200, np.float32)).any()
    draws = partial(utterance_rng, 1, 1, 0)
    same = augment_waveform(
        tone(), AugmentConfig(noise_probability=1.0), RATE, draws, lambda _, n: np.zeros(n, np.float32)
    )
    assert np.array_equal(same, tone())
    assert len(augmented(config, np.zeros(0, np.float32))) == 0


def test_switching_one_kind_off_leaves_the_other_draws() -> None:
    both = augmented(AugmentConfig(gain_db=[-10.0, 10.0], speed=[0.8, 0.9, 1.1, 1.2]), index=7)
    speed = augmented(AugmentConfig(speed=[0.8, 0.9, 1.1, 1.2]), index=7)
    gain = augmented(AugmentConfig(gain_db=[-10.0, 10.0]), index=7)
    assert np.allclose(both, speed * np.float32(gain[100] / tone()[100]), rtol=1e-4)


def test_draws_depend_on_seed_epoch_utterance_and_effect_alone() -> None:
    first = utterance_rng(1, 2, 3, "waveform").random(4)
    assert np.array_equal(first, utterance_rng(1, 2, 3, "waveform").random(4))
    others = [(2, 2, 3, "waveform"), (1, 3, 3, "waveform"), (1, 2, 4, "waveform"), (1, 2, 3, "masks")]
    assert all(not np.array_equal(first, utterance_rng(*key).random(4)) for key in others)


@pytest.mark.parametrize("samples", [1, 2, 3, 1000, 65537])
def test_pink_noise_length(samples: int) -> None:
    noise = pink_noise(np.random.default_rng(0), samples)
    assert noise.shape == (samples,) and noise.dtype == np.float32 and np.isfinite(noise).all()


def test_pink_noise_falls_three_decibels_an_octave() -> None:
    spectrum = np.abs(np.fft.rfft(pink_noise(np.random.default_rng(0), 1 << 17))) ** 2
    octaves = [10 * np.log10(spectrum[1 << k : 2 << k].mean()) for k in range(8, 16)]
    assert np.diff(octaves) == pytest.approx(-3.01, abs=1.0)


def test_recorded_noise_takes_random_segments_and_repeats_short_ones() -> None:
    recordings = [np.arange(1000, dtype=np.float32), -np.arange(1, 4, dtype=np.float32)]
    starts = set()
    for seed in range(40):
        segment = random_segment(recordings, np.random.default_rng(seed), 10)
        assert len(segment) == 10
        if segment[0] >= 0:
            assert np.array_equal(np.diff(segment), np.ones(9))
            starts.add(float(segment[0]))
        else:
            assert np.array_equal(segment, np.resize([-1.0, -2.0, -3.0], 10))
    assert 10 < len(starts) < 40
    assert not random_segment([np.zeros(0, np.float32)], np.random.default_rng(0), 5).any()
