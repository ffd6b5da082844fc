"""Filter banks against kaldi-native-fbank, which sherpa-onnx computes its features with; edges, chunks, refusals."""

from __future__ import annotations

from dataclasses import replace

import kaldi_native_fbank
import numpy as np
import pytest
import torch
from support.spectra import RATE, rounding, speech_like

from ds2.audio.features import Features
from ds2.audio.stream import SampleBlocks
from ds2.config.schema import ConfigError, FeaturesConfig
from ds2.training.state import _same_features

CONFIG = FeaturesConfig(kind="kaldi_fbank", window_s=0.025)


def kaldi(waveform: np.ndarray, kind: str = "kaldi_fbank") -> torch.Tensor:
    """(F, T) as sherpa-onnx computes them up to 2.0.0, and from 2.0.1 on; of all frames whose samples are there."""
    options = kaldi_native_fbank.FbankOptions()
    options.frame_opts.dither, options.frame_opts.snip_edges, options.frame_opts.samp_freq = 0.0, False, RATE
    options.mel_opts.num_bins, options.mel_opts.low_freq, options.mel_opts.high_freq = 80, 20.0, -400.0
    if kind == "nemo_fbank":
        options.frame_opts.window_type, options.frame_opts.remove_dc_offset = "hann", False
        options.mel_opts.is_librosa, options.mel_opts.low_freq, options.mel_opts.high_freq = True, 0.0, RATE / 2
    bank = kaldi_native_fbank.OnlineFbank(options)
    bank.accept_waveform(RATE, waveform.tolist())
    return torch.tensor(np.stack([bank.get_frame(t) for t in range(bank.num_frames_ready)], 1))


@pytest.mark.parametrize("kind", ["kaldi_fbank", "nemo_fbank"])
def test_equals_kaldi_native_fbank(kind: str) -> None:
    features, waveform = Features(replace(CONFIG, kind=kind), RATE), speech_like(24000)
    got, lengths = features(torch.from_numpy(waveform)[None], torch.tensor([24000]))
    wanted = kaldi(waveform, kind)
    assert lengths.tolist() == [wanted.shape[1]] == [149] and got.shape == (1, 80, 149)
    allowed = rounding(features, waveform, wanted)
    assert ((got[0] - wanted).abs() <= allowed).all()
    assert float(allowed.median()) < 1e-3  # the bound says something


@pytest.mark.parametrize("samples", [0, 119, 279, 280, 281, 439, 440, 4000])
def test_as_many_frames_as_kaldi_before_its_last_ones(samples: int) -> None:
    features = Features(CONFIG, RATE)
    bank = kaldi_native_fbank.FbankOptions()
    bank.frame_opts.snip_edges = False
    online = kaldi_native_fbank.OnlineFbank(bank)
    online.accept_waveform(RATE, [0.1] * samples)
    found = features.frames(samples)
    assert found == online.num_frames_ready == int(features.frames(torch.tensor(samples)))
    assert not found or features.frames(features.samples(found) - 1) == found - 1


@pytest.mark.parametrize("cuts", [[1] * 50 + [119, 1, 300, 5000], [1700, 0, 2300, 1474], [5474]])
def test_a_stream_in_pieces_has_the_features_of_the_whole(cuts: list[int]) -> None:
    features, waveform = Features(CONFIG, RATE), speech_like(sum(cuts))
    features.estimate([waveform])
    whole, _ = features(torch.from_numpy(waveform)[None], torch.tensor([len(waveform)]))
    stream, heard = SampleBlocks(features, 8), list[np.ndarray]()
    for piece in np.split(waveform, np.cumsum(cuts)[:-1]):
        heard += stream.accept(piece)
    heard.append(stream.finish())
    windows = [torch.tensor([features.windows(len(samples))]) for samples in heard]
    found = [
        features.of_windows(torch.from_numpy(samples)[None], count)
        for samples, count in zip(heard, windows, strict=True)
        if count > 0
    ]
    assert {block.shape[2] for block in found[:-1]} <= {8} and stream.samples == len(waveform)
    raw = features.std[:, None] * whole[0] + features.mean[:, None]
    allowed = rounding(features, waveform, raw) / features.std[:, None]
    assert ((torch.cat(found, 2)[0] - whole[0]).abs() <= allowed).all()


def test_padding_and_batch_mates_change_nothing() -> None:
    features = Features(CONFIG, RATE)
    lengths = [4000, 100, 1234]
    waveforms = torch.full((3, 4100), float("nan"))
    for row, length in enumerate(lengths):
        waveforms[row, :length] = torch.from_numpy(speech_like(length, row))
    batched, frames = features(waveforms, torch.tensor(lengths))
    assert frames.tolist() == [24, 0, 6]
    for row, length in enumerate(lengths):
        wave = speech_like(length, row)
        alone, _ = features(torch.from_numpy(wave)[None], torch.tensor([length]))
        allowed = rounding(features, wave, alone[0]) if frames[row] else 0.0
        assert ((batched[row, :, : frames[row]] - alone[0]).abs() <= allowed).all()
        assert not batched[row, :, frames[row] :].any()


def test_statistics_count_the_mirrored_start() -> None:
    features = Features(CONFIG, RATE)
    waveforms = [speech_like(4000 + 100 * seed, seed) for seed in range(3)]
    assert features.estimate(waveforms) == sum(features.frames(len(wave)) for wave in waveforms)
    found = [features(torch.from_numpy(wave)[None], torch.tensor([len(wave)]))[0][0] for wave in waveforms]
    every = torch.cat(found, 1).double()
    torch.testing.assert_close(every.mean(1), torch.zeros(80, dtype=torch.float64), rtol=0, atol=1e-4)


def test_features_of_other_kinds_are_not_the_same() -> None:
    assert _same_features(Features(CONFIG, RATE), Features(CONFIG, RATE))
    assert not _same_features(Features(CONFIG, RATE), Features(FeaturesConfig(kind="log_mel", window_s=0.025), RATE))


@pytest.mark.parametrize(
    ("mels", "rate", "message"), [(400, RATE, "features.mels=400"), (80, 800, "data.sample_rate_hz=800")]
)
def test_filters_that_cannot_be_are_refused(mels: int, rate: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Features(FeaturesConfig(kind="kaldi_fbank", window_s=0.025, mels=mels), rate)
