"""Rooms, colours, voices and codecs: what each does to a signal, measured."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from ds2.audio.augment import (
    apply_codec,
    augment_waveform,
    babble,
    coloured_noise,
    convolve,
    room_response,
    utterance_rng,
)
from ds2.config.schema import CODECS, AugmentConfig, Config
from ds2.data.loader import SpeechLoader
from ds2.data.manifest import read_manifests

RATE = 16000
pink_noise = partial(coloured_noise, exponent=1.0)


def speechlike(samples: int = RATE, seed: int = 1) -> np.ndarray:
    """Pink noise whose loudness comes and goes four times a second, a twentieth of full scale."""
    noise = pink_noise(np.random.default_rng(seed), samples)
    swell = 1 + np.sin(2 * np.pi * 4 * np.arange(samples) / RATE)
    return (0.05 * swell * noise / noise.std()).astype(np.float32)


@pytest.mark.parametrize("rt60_s", [0.15, 0.5])
def test_a_room_falls_by_sixty_decibels_in_its_time_and_keeps_the_energy(rt60_s: float) -> None:
    responses = np.stack([room_response(np.random.default_rng(seed), RATE, (rt60_s, rt60_s)) for seed in range(60)])
    assert responses.dtype == np.float32 and responses.shape[1] == round(rt60_s * RATE)
    np.testing.assert_allclose(np.square(responses).sum(1), 1, rtol=1e-4)
    assert (np.abs(responses).argmax(1) == 0).all() and not responses[:, 1:32].any()
    early, late = (np.square(responses[:, part]).mean() for part in (slice(32, 232), slice(-232, -32)))
    between_s = (responses.shape[1] - 264) / RATE
    # each power is a mean of 12,000 squared Gaussians, in rooms of unlike loudness: 3 standard deviations are 0.3 dB
    assert 10 * np.log10(early / late) == pytest.approx(60 * between_s / rt60_s, abs=0.3)


@pytest.mark.parametrize(("samples", "taps"), [(0, 5), (1, 5), (70000, 9600), (400, 20000), (32768, 1)])
def test_convolution_block_by_block_is_that_of_numpy(samples: int, taps: int) -> None:
    rng = np.random.default_rng(3)
    waveform, response = (rng.standard_normal(n).astype(np.float32) for n in (samples, taps))
    found = convolve(waveform, response)
    assert found.dtype == np.float32 and len(found) == samples
    if samples:
        size = 1 << (samples + taps).bit_length()
        spectra = [np.fft.rfft(part.astype(np.float64), size) for part in (waveform, response)]
        exact = np.fft.irfft(spectra[0] * spectra[1], size)[:samples]
        # rounding of transforms of 2^n: about n times the unit roundoff of the norm, Higham 2002, theorem 24.2
        bound = 16 * 6e-8 * np.linalg.norm(waveform) * np.linalg.norm(response)
        assert np.abs(found - exact).max() <= bound


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0])
def test_noise_falls_as_its_colour_says(exponent: float) -> None:
    spectrum = np.abs(np.fft.rfft(coloured_noise(np.random.default_rng(0), 1 << 17, exponent))) ** 2
    octaves = [10 * np.log10(spectrum[1 << k : 2 << k].mean()) for k in range(8, 16)]
    assert np.diff(octaves) == pytest.approx(-3.01 * exponent, abs=1.0)


def test_babble_is_made_of_several_utterances_at_equal_power() -> None:
    voices = [speechlike(8000, seed) * (10.0 if seed else 0.01) for seed in range(3)] + [np.zeros(0, np.float32)]
    one, four = (babble(voices, np.random.default_rng(5), RATE, count) for count in (1, 4))
    assert np.square(one).mean() == pytest.approx(1, rel=1e-3)
    assert 1 < np.square(four).mean() < 16
    assert np.array_equal(four, babble(voices, np.random.default_rng(5), RATE, 4))


@pytest.mark.parametrize("rate_hz", [8000, RATE, 44100])  # below 32 kHz an mp3 file does not say how late it is
@pytest.mark.parametrize("codec", CODECS)
def test_a_codec_keeps_length_place_and_most_of_the_sound(codec: str, rate_hz: int) -> None:
    waveform = speechlike(RATE + 7)
    decoded = apply_codec(waveform, codec, rate_hz)
    assert decoded.dtype == np.float32 and decoded.shape == waveform.shape and not np.array_equal(decoded, waveform)
    size = 1 << 16
    lags = np.fft.irfft(np.fft.rfft(decoded, size) * np.conj(np.fft.rfft(waveform, size)), size)
    assert int(np.abs(lags).argmax()) in {0, 1, 2, size - 1, size - 2} or codec == "gsm"
    assert lags.max() > 0.5 * np.linalg.norm(decoded) * np.linalg.norm(waveform)
    assert len(apply_codec(np.zeros(0, np.float32), codec, rate_hz)) == 0


def test_telephones_take_away_what_lies_above_four_kilohertz() -> None:
    white = coloured_noise(np.random.default_rng(0), RATE, 0.0) * np.float32(20)
    heard = np.abs(np.fft.rfft(apply_codec(white, "alaw", RATE))) ** 2
    assert heard[4300:].mean() < 1e-4 * heard[300:3700].mean()


def test_kinds_come_as_often_as_asked_and_leave_the_other_draws() -> None:
    def augmented(config: AugmentConfig, index: int) -> np.ndarray:
        return augment_waveform(speechlike(3200), config, RATE, partial(utterance_rng, 1, 1, index), pink_noise)

    plain = [augmented(AugmentConfig(gain_db=[-6.0, 6.0]), index) for index in range(100)]
    both = AugmentConfig(gain_db=[-6.0, 6.0], room_probability=0.3, codec_probability=0.3, codecs=["alaw"])
    changed = sum(not np.array_equal(augmented(both, index), plain[index]) for index in range(100))
    assert 35 <= changed <= 67  # 1 - 0.7^2 = 51 of 100, three standard deviations are 15
    assert np.array_equal(augmented(both, 3), augmented(both, 3))


def test_noise_may_be_voices_of_the_corpus(tiny_config: Callable[..., Config]) -> None:
    config = tiny_config("augment.noise_probability=1", "augment.babble_share=0.5", "augment.noise_snr_db=[0,0]")
    utterances = read_manifests(config.data.train)
    cpu = torch.device("cpu")
    loaders = [SpeechLoader(utterances, config.data, cpu, None, augment, 1) for augment in (None, config.augment)]
    clean, noisy, again = (next(iter(loaders[number].epoch([list(range(10))], 1))) for number in (0, 1, 1))
    assert torch.equal(noisy.waveforms, again.waveforms)
    ratio = (noisy.waveforms - clean.waveforms).square().sum(1) / clean.waveforms.square().sum(1)
    torch.testing.assert_close(ratio, torch.ones(10), rtol=1e-3, atol=0)
