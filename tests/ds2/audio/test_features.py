"""Features against a direct float64 computation; padding, chunks, silence, statistics."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ds2.audio.features import MIN_STD, POWER_FLOOR, Features, mel_filters
from ds2.config.schema import ConfigError, FeaturesConfig

RATE = 16000


def noise(*shape: int, seed: int = 0, scale: float = 0.1) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def direct_log_power(waveform: torch.Tensor, window_s: int = 320, step: int = 160) -> torch.Tensor:
    """(F, T) float64 by a written-out discrete Fourier transform of each frame."""
    n = torch.arange(window_s, dtype=torch.float64)
    window = 0.5 - 0.5 * torch.cos(2 * math.pi * n / window_s)
    phase = 2 * math.pi / window_s * torch.outer(torch.arange(window_s // 2 + 1, dtype=torch.float64), n)
    columns = []
    for start in range(0, waveform.numel() - window_s + 1, step):
        frame = waveform[start : start + window_s].double() * window
        power = (phase.cos() @ frame).square() + (phase.sin() @ frame).square()
        columns.append((power / window.square().sum() + POWER_FLOOR).log())
    return torch.stack(columns, dim=1)


def assert_same_but_for_rounding(got: torch.Tensor, wanted: torch.Tensor, features: Features) -> None:
    """Equal within what float32 transforms of any processor, two at most, may round away; both (B, F, T), normalised.

    A fast transform errs in all bins alike, by about 0.6 u sqrt(log2 N) of their root mean square (Schatzman, "Accuracy
    of the discrete Fourier transform and the fast Fourier transform", SIAM J. Sci. Comput. 17, 1996), 2 u here; 12 u
    are six standard deviations. The logarithm of a bin's power shows it the more, the weaker the bin is.
    """
    roundoff = torch.finfo(torch.float32).eps / 2
    log_power = wanted.double() * features.std[:, None] + features.mean[:, None]
    power = log_power.exp()
    weakness = (power.mean(1, keepdim=True) / power).sqrt()
    allowed = 2 * (2 * 12 * roundoff * weakness + 4 * roundoff * (1 + log_power.abs())) / features.std[:, None]
    assert ((got.double() - wanted.double()).abs() <= allowed).all()


def test_spectrogram_equals_direct_transform() -> None:
    features = Features(FeaturesConfig(), RATE)
    waveform = noise(2000)
    got, lengths = features(waveform[None], torch.tensor([2000]))
    assert features.bins == 161
    assert lengths.tolist() == [11] and got.shape == (1, 161, 11) and got.is_contiguous() and got.dtype == torch.float32
    assert_same_but_for_rounding(got, direct_log_power(waveform)[None], features)


@pytest.mark.parametrize("kind", ["log_spectrogram", "log_mel"])
def test_padding_and_batch_mates_change_nothing(kind: str) -> None:
    features = Features(FeaturesConfig(kind=kind), RATE)
    features.estimate([noise(8000, seed=9)])
    lengths = torch.tensor([5000, 319, 1234, 8001])
    waveforms = torch.full((4, 8100), float("nan"))
    for row, length in enumerate(lengths.tolist()):
        waveforms[row, :length] = noise(length, seed=row)
    batched, frames = features(waveforms, lengths)
    assert frames.tolist() == [30, 0, 6, 49]
    for row, length in enumerate(lengths.tolist()):
        alone, _ = features(noise(length, seed=row)[None], torch.tensor([length]))
        assert_same_but_for_rounding(batched[row, None, :, : frames[row]], alone, features)
        assert not batched[row, :, frames[row] :].any()


def test_chunk_by_chunk_equals_whole() -> None:
    features = Features(FeaturesConfig(), RATE)
    waveform = noise(4000)
    whole, _ = features(waveform[None], torch.tensor([4000]))
    first = features.frames(1700)
    head, _ = features(waveform[None, :1700], torch.tensor([1700]))
    rest = waveform[None, first * features.step_samples :]
    tail, _ = features(rest, torch.tensor([rest.shape[1]]))
    assert_same_but_for_rounding(torch.cat([head, tail], dim=2), whole, features)


def test_frames_of_ints_and_tensors_agree() -> None:
    features = Features(FeaturesConfig(), RATE)
    counts = [0, 1, 319, 320, 479, 480, 16000]
    assert [features.frames(n) for n in counts] == [0, 0, 0, 1, 1, 2, 99]
    assert features.frames(torch.tensor(counts)).tolist() == [0, 0, 0, 1, 1, 2, 99]


def test_mel_power_of_white_noise_is_flat_and_a_tone_peaks_at_its_filter() -> None:
    weights = mel_filters(40, 320, RATE)
    torch.testing.assert_close(weights.sum(0), torch.ones(40, dtype=torch.float64))
    features = Features(FeaturesConfig(kind="log_mel", mels=40), RATE)
    tone = 0.5 * torch.sin(2 * math.pi * 2000 * torch.arange(RATE) / RATE)
    got, _ = features(tone[None], torch.tensor([RATE]))
    assert got.shape[1] == features.bins == 40
    # Slaney: 15 mel at 1 kHz, 27 mel a factor of 6.4; filter k is centred on mel (k + 1) / 41 of the total.
    mel, top = (15 + 27 * math.log(hz / 1000) / math.log(6.4) for hz in (2000, 8000))
    assert abs(int(got[0].mean(1).argmax()) - (41 * mel / top - 1)) <= 1


def test_digital_silence_is_finite_after_normalisation() -> None:
    features = Features(FeaturesConfig(), RATE)
    features.estimate([noise(16000, scale=0.05)])
    silence, _ = features(torch.zeros(1, 3200), torch.tensor([3200]))
    assert torch.isfinite(silence).all() and silence.min() > -30
    features.estimate([torch.zeros(3200)])
    assert torch.equal(features.std, torch.full((161,), MIN_STD))


def test_bins_that_were_empty_in_training_are_not_amplified() -> None:
    loud = noise(RATE, scale=0.05)
    spectrum = torch.fft.rfft(loud)
    spectrum[7000:] = 0.0  # Hz
    features = Features(FeaturesConfig(), RATE)
    features.estimate([torch.fft.irfft(spectrum)])
    of_loud, of_quiet = (features((gain * loud)[None], torch.tensor([RATE]))[0][0, 150:] for gain in (1.0, 0.5))
    assert float((of_loud - of_quiet).max()) <= 2 * math.log(2) + 1e-5  # the difference of their log powers


@pytest.mark.parametrize("autocast", [False, True])
def test_statistics_give_zero_mean_and_unit_deviation(autocast: bool) -> None:
    features = Features(FeaturesConfig(), RATE)
    waveforms = [noise(4000 + 160 * i, seed=i, scale=0.02 * (i + 1)) for i in range(4)]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        frames = features.estimate([waveforms[0], waveforms[1].numpy(), *waveforms[2:], np.zeros(100, np.float32)])
        normalised = [features(w[None], torch.tensor([w.numel()]))[0][0] for w in waveforms]
    every = torch.cat(normalised, dim=1).double()
    assert every.shape[1] == frames
    torch.testing.assert_close(every.mean(1), torch.zeros(161, dtype=torch.float64), rtol=0, atol=1e-4)
    torch.testing.assert_close(every.std(1, correction=0), torch.ones(161, dtype=torch.float64), rtol=0, atol=1e-4)
    assert set(features.state_dict()) == {"mean", "std"}


def test_statistics_refuse_nothing_and_nan() -> None:
    features = Features(FeaturesConfig(), RATE)
    with pytest.raises(ValueError, match="need two frames"):
        features.estimate([torch.zeros(100)])
    with pytest.raises(ValueError, match=r"waveform 1 .*NaN"):
        features.estimate([noise(4000), torch.full((4000,), float("nan"))])


@pytest.mark.parametrize(
    ("config", "rate", "message"),
    [
        (FeaturesConfig(window_s=0.02), 11025, r"features.window_s=0.02 is 220.5 samples.*0.0199"),
        (FeaturesConfig(step_s=0.0), RATE, "features.step_s"),
        (FeaturesConfig(kind="log_mel", mels=200), RATE, "features.mels=200"),
        (FeaturesConfig(kind="mfcc"), RATE, "features.kind='mfcc'"),
    ],
)
def test_impossible_settings_are_refused(config: FeaturesConfig, rate: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Features(config, rate)


def test_the_length_that_an_error_suggests_is_taken() -> None:
    with pytest.raises(ConfigError) as error:
        Features(FeaturesConfig(window_s=0.02), 11025)
    suggested_s = float(str(error.value).split("such as ")[1].split(",")[0])
    assert Features(FeaturesConfig(window_s=suggested_s, step_s=suggested_s), 11025).window_samples == 220


def test_lengths_beyond_the_waveform_and_empty_batches() -> None:
    features = Features(FeaturesConfig(), RATE)
    with pytest.raises(ValueError, match="9000"):
        features(torch.zeros(2, 8000), torch.tensor([9000, 3]))
    with pytest.raises(ValueError, match=r"\(B, N\)"):
        features(torch.zeros(8000), torch.tensor([8000]))
    empty, lengths = features(torch.zeros(0, 8000), torch.zeros(0, dtype=torch.int64))
    assert empty.shape == (0, 161, 0) and lengths.shape == (0,)


@pytest.mark.gpu
def test_gpu_equals_cpu() -> None:
    features = Features(FeaturesConfig(), RATE)
    waveforms, lengths = noise(3, 16000), torch.tensor([16000, 400, 7000])
    expected, _ = features(waveforms, lengths)
    got, _ = features.cuda()(waveforms.cuda(), lengths)
    torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["log_spectrogram", "log_mel", "kaldi_fbank", "nemo_fbank"])
def test_on_a_gpu_bits_of_blocks_do_not_depend_on_the_batch(kind: str) -> None:
    features = Features(FeaturesConfig(kind=kind), RATE).cuda()
    samples = noise(256, features.span(20)).cuda()
    samples[:128] *= torch.logspace(-3, 0, 128, device="cuda")[:, None]
    rows, lengths = torch.arange(256, device="cuda"), torch.full((256,), 20, device="cuda")
    alone = torch.cat([features.of_rows(samples, row[None], lengths[:1], torch.bfloat16) for row in rows])
    for batch in (2, 4, 8, 16, 32, 64, 128, 256):
        chosen = torch.randperm(256, device="cuda")[:batch]
        together = features.of_rows(samples, rows[chosen], lengths[:batch], torch.bfloat16)
        assert torch.equal(together, alone[chosen]), batch
