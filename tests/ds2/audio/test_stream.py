"""Samples of a source cut into blocks: every window's once, wherever the pieces end."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import soundfile

from ds2.audio.features import Features
from ds2.audio.read import read_audio
from ds2.audio.stream import Pcm, Resampler, SampleBlocks
from ds2.config.schema import FeaturesConfig
from ds2.data.audio_cache import AudioStore
from ds2.data.manifest import Utterance

RATE_HZ = 1000


@pytest.mark.parametrize(("window", "step"), [(20, 10), (10, 10)])
@pytest.mark.parametrize("longest", [1, 30, 400])
def test_blocks_hold_the_samples_of_their_windows(window: int, step: int, longest: int) -> None:
    config, draw = FeaturesConfig(window_s=window / RATE_HZ, step_s=step / RATE_HZ), random.Random(1)
    rooms = np.zeros((200, 3 * step + window), np.float32)
    blocks, samples = (
        SampleBlocks(Features(config, RATE_HZ), 4, rooms.__getitem__),
        np.arange(1, 1234, dtype=np.float32),
    )
    found, at = list[np.ndarray](), 0
    while at < len(samples):
        end = at + draw.randint(0, longest)
        found += blocks.accept(samples[at:end])
        at = end
    starts = range(0, len(samples) - rooms.shape[1] + 1, 4 * step)
    assert blocks.samples == len(samples) and len(found) == len(starts)
    for number, (block, start) in enumerate(zip(found, starts, strict=True)):
        assert block.base is rooms and (rooms[number] == samples[start : start + rooms.shape[1]]).all()
    assert (blocks.finish() == samples[4 * step * len(found) :]).all()


@pytest.mark.parametrize("rate_hz", [16000, 44100])
@pytest.mark.parametrize("channels", [1, 2])
def test_training_files_and_streams_have_the_same_samples(tmp_path: Path, rate_hz: int, channels: int) -> None:
    sound = np.random.default_rng(rate_hz).normal(0, 0.4, (rate_hz, channels)).astype(np.float32)
    soundfile.write(tmp_path / "a.wav", sound, rate_hz, subtype="FLOAT")
    file, mono = read_audio(tmp_path / "a.wav"), sound.sum(1) / np.float32(channels)
    (training,) = AudioStore([Utterance(tmp_path / "a.wav", 1.0, "a")], 16000)
    live = Resampler(rate_hz, 16000)
    stream = np.concatenate([*map(live.accept, np.array_split(mono, 7)), live.finish()])
    assert np.array_equal(file * 32768, np.rint(file * 32768))
    assert np.array_equal(file, training) and np.array_equal(file, stream)
    if rate_hz == 16000:
        assert np.array_equal(file, Pcm("<f4").accept(mono.astype("<f4").tobytes()))
