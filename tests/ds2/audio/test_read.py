"""Audio of every format and rate becomes the same mono waveform; segments and blocks are parts of the whole."""

from __future__ import annotations

import functools
import logging
import re
import traceback
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr
from numpy.typing import NDArray

from ds2.audio import read as audio
from ds2.audio.read import AudioError, audio_blocks, audio_info, read_audio, reads_cheaply
from ds2.system.terminal import warn_once

SECONDS = 3
FORMATS = {
    "wav": ("WAV", "PCM_16", 1e-4),
    "wav8": ("WAV", "PCM_U8", 2e-2),
    "wav24": ("WAV", "PCM_24", 1e-4),
    "wavfloat": ("WAV", "FLOAT", 1e-4),
    "flac": ("FLAC", "PCM_16", 1e-4),
    "sph": ("NIST", "PCM_16", 1e-4),
    "ogg": ("OGG", "VORBIS", 5e-2),
    "opus": ("OGG", "OPUS", 2e-1),
    "mp3": ("MP3", "MPEG_LAYER_III", 1e-1),
}


def chirp(rate_hz: int, seconds: float = SECONDS) -> NDArray[np.float64]:
    """A sweep from 200 to 1500 Hz, the same at each rate; no two moments are alike."""
    time_s = np.arange(int(rate_hz * seconds)) / rate_hz
    return 0.5 * np.sin(2 * np.pi * (200 + 650 / SECONDS * time_s) * time_s)


def write(folder: Path, name: str, rate_hz: int) -> Path:
    container, subtype, _ = FORMATS[name]
    path = folder / f"{name}{rate_hz}.bin"  # the extension says nothing: content decides
    soundfile.write(path, chirp(rate_hz), rate_hz, subtype=subtype, format=container)
    return path


def relative_error(got: NDArray[np.float32], expected: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean((got - expected) ** 2) / np.mean(expected**2)))


@pytest.mark.parametrize("rate_hz", [8000, 16000, 48000])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_and_rate_reads_as_the_sound_it_was(tmp_path: Path, name: str, rate_hz: int) -> None:
    path = write(tmp_path, name, rate_hz)
    waveform = read_audio(path)
    assert waveform.dtype == np.float32 and waveform.shape == (SECONDS * 16000,)
    middle = slice(1600, -1600)  # codecs and filters need the sound around an edge
    assert relative_error(waveform[middle], chirp(16000)[middle]) < FORMATS[name][2] + (1e-2 if rate_hz != 16000 else 0)
    info = audio_info(path)
    assert (info.sample_rate_hz, info.channels, info.duration_s) == (rate_hz, 1, SECONDS)


@pytest.mark.parametrize("name", FORMATS)
def test_a_segment_is_the_part_of_the_whole(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audio, "_BLOCK_FRAMES", 1000)
    path = write(tmp_path, name, 16000)
    whole, part = read_audio(path), read_audio(path, offset_s=1.1, duration_s=0.7)
    np.testing.assert_array_equal(part, whole[17600:28800])


@pytest.mark.parametrize("name", ["mp3", "opus", "flac"])
@pytest.mark.parametrize("rate_hz", [16000, 48000])
def test_reading_in_blocks_changes_nothing(
    tmp_path: Path, name: str, rate_hz: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, name, rate_hz)
    whole = read_audio(path)
    monkeypatch.setattr(audio, "_BLOCK_FRAMES", 777)
    blocks = list(audio_blocks(path))
    assert len(blocks) > 10 and max(map(len, blocks)) <= 2 * 777
    np.testing.assert_allclose(np.concatenate(blocks), whole, atol=1e-6)


@pytest.mark.parametrize("suffix", [".raw", ".PCM"])
def test_raw_is_16_bit_little_endian_mono_at_the_asked_rate(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(np.array([0, 16384, -32768], "<i2").tobytes())
    np.testing.assert_array_equal(read_audio(path, 8000), np.array([0, 0.5, -1], np.float32))
    assert audio_info(path, 8000).sample_rate_hz == 8000


def test_channels_are_averaged_and_that_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    soundfile.write(tmp_path / "a.wav", np.stack([np.full(160, 0.5), np.full(160, 0.25)], 1), 16000, subtype="FLOAT")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            np.testing.assert_array_equal(read_audio(tmp_path / "a.wav"), np.full(160, 0.375, np.float32))
    assert [record.message for record in caplog.records] == [
        "audio with 2 channels is averaged to one channel (logged once)"
    ]


def test_a_lower_rate_than_the_models_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    soundfile.write(tmp_path / "a.wav", np.full(800, 0.5), 8000)
    with caplog.at_level(logging.WARNING):
        for rate_hz in (8000, 16000, 16000):
            assert sum(map(len, audio_blocks(tmp_path / "a.wav", rate_hz, lenient=True))) == rate_hz // 10
    assert [record.message for record in caplog.records] == [
        "audio at 8000 Hz has no sound above 4000 Hz: a model for 16000 Hz makes more errors in it (logged once)"
    ]


def test_a_little_over_full_scale_is_clipped(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.array([1.5, -2.0, 0.5]), 16000, subtype="FLOAT")
    np.testing.assert_array_equal(read_audio(tmp_path / "a.wav"), np.array([1 - 2**-15, -1, 0.5], np.float32))


def test_a_segment_may_end_a_little_late_but_not_much(tmp_path: Path) -> None:
    path = write(tmp_path, "wav", 16000)
    assert len(read_audio(path, offset_s=1.0, duration_s=2.09)) == 32000
    with pytest.raises(AudioError, match=r"from 1 s to 3\.2 s goes past the end of the file, which is 3\.000 s"):
        read_audio(path, offset_s=1.0, duration_s=2.2)


@pytest.mark.parametrize("segment", [(-1.0, None), (0.0, 0.0), (0.0, -1.0), (0.0, float("nan"))])
def test_a_senseless_segment_is_refused(tmp_path: Path, segment: tuple[float, float | None]) -> None:
    with pytest.raises(AudioError, match="must be at least 0"):
        read_audio(write(tmp_path, "wav", 16000), 16000, *segment)


@pytest.mark.parametrize("channels", [2, 6])
def test_channels_are_averaged_in_float32_and_rounded_then(tmp_path: Path, channels: int) -> None:
    rng = np.random.default_rng(channels)
    samples = rng.uniform(-0.5, 0.5, (1000, channels)).astype(np.float32)
    soundfile.write(tmp_path / "many.wav", samples, 16000, subtype="FLOAT")
    total = functools.reduce(np.add, samples.T)  # a sum rounds after each channel
    assert np.array_equal(
        read_audio(tmp_path / "many.wav", 16000), np.rint(total / np.float32(channels) * 32768) / 32768
    )


@pytest.mark.parametrize(
    ("gains", "warns"),
    [((1.0, -1.0), True), ((1.0, *[0.0] * 31), True), ((1.0, 0.0), False), ((1.0, 1.0), False), ((0.0, 0.0), False)],
)
def test_channels_whose_average_loses_the_sound_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, gains: tuple[float, ...], warns: bool
) -> None:
    soundfile.write(tmp_path / "a.wav", chirp(16000)[:, None] * np.array(gains), 16000)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            read_audio(tmp_path / "a.wav")
    assert caplog.text.count("choose the channel with the voice by `ds2 transcribe --channel") == int(warns)


def test_a_channel_can_be_chosen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    channels = np.random.default_rng(0).integers(-16384, 16384, (1000, 3)).astype(np.float32) / 32768
    soundfile.write(tmp_path / "a.wav", channels, 16000, subtype="FLOAT")
    with caplog.at_level(logging.WARNING):
        for channel in (1, 2, 3):
            assert np.array_equal(read_audio(tmp_path / "a.wav", channel=channel), channels[:, channel - 1])
    assert not caplog.text
    for read in (read_audio, reads_cheaply):
        with pytest.raises(AudioError, match=r"a\.wav: has no channel 4, its channels are 1 to 3; 0 averages them"):
            read(tmp_path / "a.wav", 16000, channel=4)


def test_the_loudest_of_channels_that_cancel_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gains = np.zeros(32)
    gains[20] = 1.0
    soundfile.write(tmp_path / "a.wav", chirp(16000)[:, None] * gains, 16000)
    with caplog.at_level(logging.WARNING):
        read_audio(tmp_path / "a.wav")
    assert "--channel 21` or data.channel=21, which is the loudest" in caplog.text


@pytest.mark.parametrize("frames", [30_000, 1_100_000])  # libvorbis puts all on the stack, 4 bytes each
def test_segments_of_vorbis_are_those_of_the_whole_file(tmp_path: Path, frames: int) -> None:
    path = tmp_path / "a.ogg"
    soundfile.write(path, 0.1 * np.random.default_rng(0).standard_normal(frames), 16000)
    whole = read_audio(path)
    for first in (0, frames // 5, frames - 1_044_481, frames - 4000, frames - 100):
        if first >= 0:
            np.testing.assert_array_equal(read_audio(path, 16000, first / 16000, 100 / 16000), whole[first:][:100])


@pytest.mark.parametrize(
    ("suffix", "subtype"),
    [("wav", "PCM_16"), ("flac", "PCM_16"), ("mp3", "MPEG_LAYER_III"), ("ogg", "VORBIS"), ("ogg", "OPUS")],
)
def test_what_can_be_decoded_of_a_truncated_file_is_a_lenient_readers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, suffix: str, subtype: str
) -> None:
    path = tmp_path / f"a.{suffix}"
    soundfile.write(path, 0.3 * np.sin(np.arange(20 * 16000) * 0.1), 16000, subtype=subtype)
    whole = read_audio(path)
    with caplog.at_level(logging.WARNING):
        assert np.array_equal(np.concatenate(list(audio_blocks(path, lenient=True))), whole) and not caplog.text
        path.write_bytes(path.read_bytes()[: path.stat().st_size * 3 // 5])
        with pytest.raises(AudioError):
            read_audio(path)
        part = np.concatenate(list(audio_blocks(path, lenient=True)))
    assert 5 < len(part) / 16000 < 12.5
    np.testing.assert_allclose(part[: 4 * 16000], whole[: 4 * 16000], atol=1e-6)
    assert re.search(r"a\.\w+: (truncated|damaged).*; what can be decoded is used", caplog.text)


@pytest.mark.parametrize(("gain", "warns"), [(0.001, True), (0.1, False), (0.0, True)])
def test_a_lenient_reader_warns_of_quiet_sound(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, gain: float, warns: bool
) -> None:
    soundfile.write(tmp_path / "a.wav", gain * chirp(16000), 16000, subtype="FLOAT")
    with caplog.at_level(logging.WARNING):
        list(audio_blocks(tmp_path / "a.wav", lenient=True))
    assert ("too quiet to be recognised well" in caplog.text) == warns


def test_less_than_a_sample_of_the_result_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    soundfile.write(tmp_path / "a.wav", [0.5], 48000)
    assert not list(audio_blocks(tmp_path / "a.wav", 16000, lenient=True)) and not caplog.text
    with pytest.raises(AudioError, match=r"a\.wav: is shorter than a sample at 16000 Hz"):
        read_audio(tmp_path / "a.wav", 16000)


def test_the_resampler_ends_with_an_error(tmp_path: Path) -> None:
    broken = np.zeros(8000, np.float32)
    broken[7000] = np.nan
    soundfile.write(tmp_path / "a.wav", broken, 8000, subtype="FLOAT")
    with pytest.raises(AudioError, match="holds NaN") as caught:
        read_audio(tmp_path / "a.wav")
    frames = [frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    assert any(frame.f_code.co_name == "audio_blocks" for frame in frames)
    assert not any(isinstance(value, soxr.ResampleStream) for frame in frames for value in frame.f_locals.values())
