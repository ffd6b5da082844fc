"""Every container's promise of length is kept, or the file is truncated; no whole file is, whatever its writer."""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile

from ds2.audio import read as audio
from ds2.audio.read import END_TOLERANCE_S, AudioError, audio_blocks, audio_info, read_audio
from ds2.system.terminal import warn_once

RATE_HZ = 16000
SECONDS = 3
CONTAINERS = ("WAV", "WAVEX", "RF64", "W64", "AIFF", "SVX", "AU", "CAF", "NIST", "FLAC", "OGG", "MP3")
UNCHECKED = ("AVR", "IRCAM", "MAT5", "VOC")


def sound(channels: int, seconds: float = SECONDS) -> np.ndarray:
    """A tone with noise, so that codecs have something to do in every frame."""
    time_s = np.arange(int(RATE_HZ * seconds)) / RATE_HZ
    noise = 0.01 * np.random.default_rng(0).standard_normal(len(time_s))
    return np.tile((0.3 * np.sin(2 * np.pi * 440 * time_s) + noise)[:, None], channels)


def written(path: Path, container: str, subtype: str, channels: int = 1) -> bytes:
    soundfile.write(path, sound(channels), RATE_HZ, format=container, subtype=subtype)
    return path.read_bytes()


def all_written(folder: Path, container: str) -> Iterator[tuple[str, Path]]:
    """Yield a file of every subtype, mono and stereo, that this libsndfile can write at this rate."""
    for subtype in soundfile.available_subtypes(container):
        for channels in (1, 2):
            path = folder / f"{subtype}-{channels}.bin"
            try:
                written(path, container, subtype, channels)
            except soundfile.LibsndfileError:
                continue
            yield path.name, path


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_file_is_whole_until_it_is_cut(container: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    unnoticed, tried = [], 0
    for name, path in all_written(tmp_path, container):
        whole = path.read_bytes()
        with caplog.at_level(logging.WARNING):
            length_s = len(read_audio(path)) / RATE_HZ
        assert abs(length_s - SECONDS) <= END_TOLERANCE_S and "not checked" not in caplog.text
        for percent in (3, 10, 30, 50, 70, 90, 95, 99, 99.9):
            path.write_bytes(whole[: int(len(whole) * percent / 100)])
            try:
                got_s = len(read_audio(path)) / RATE_HZ
            except AudioError:
                continue
            if got_s < length_s - END_TOLERANCE_S:
                unnoticed.append((name, percent, got_s))
        tried += 1
    assert tried > 0 and unnoticed == []


@pytest.mark.parametrize("endian", ["BIG", "LITTLE"])
def test_a_sun_file_of_either_byte_order_is_checked(tmp_path: Path, endian: str) -> None:
    path = tmp_path / "a.au"
    soundfile.write(path, sound(1), RATE_HZ, format="AU", subtype="PCM_16", endian=endian)
    path.write_bytes(path.read_bytes()[:-8000])
    with pytest.raises(AudioError, match="its header says 96000 bytes of samples, the file holds 88000"):
        read_audio(path)


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_an_ogg_stream_ends_with_its_last_page(tmp_path: Path, subtype: str) -> None:
    path = tmp_path / "a.ogg"
    whole = written(path, "OGG", subtype)
    path.write_bytes(whole + b"some player's tag at the end")
    assert audio_info(path).duration_s == SECONDS
    path.write_bytes(whole[: whole.rindex(b"OggS")])  # cut between two pages
    with pytest.raises(AudioError, match=r"truncated: its pages end at byte \d+ of \d+ without one that ends"):
        read_audio(path)


@pytest.mark.parametrize("container", ["OGG", "MP3", "FLAC"])
def test_joined_recordings_are_refused_as_decoders_end_with_the_first(
    tmp_path: Path, container: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.bin"
    whole = written(path, container, {"OGG": "OPUS", "MP3": "MPEG_LAYER_III", "FLAC": "PCM_16"}[container])
    path.write_bytes(whole + whole)
    joined = f"only the first is read, to byte {len(whole)} of {2 * len(whole)}"
    with pytest.raises(AudioError, match=rf"{joined}\. Copy it again, or convert what is there, e\.g\. to FLAC"):
        read_audio(path)
    list(audio_blocks(path, RATE_HZ, lenient=True))
    assert joined in caplog.text


def test_a_flac_file_behind_another_is_noticed_where_the_first_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "a.flac"
    tag = b"ID3\4\0\0\0\0\2\x10" + bytes(272)
    for frames, channels in ((RATE_HZ * SECONDS, 8), (4000, 1), (5, 1)):
        soundfile.write(path, sound(channels)[:frames], RATE_HZ)
        whole = path.read_bytes()
        for before, between in ((b"", b""), (tag, b""), (tag, tag)):
            path.write_bytes(before + whole)
            read_audio(path)
            for second in (whole, whole[: len(whole) // 2]):
                path.write_bytes(before + whole + between + second)
                with pytest.raises(AudioError, match=f"to byte {len(before + whole + between)} of"):
                    read_audio(path)
    path.write_bytes(written(path, "FLAC", "PCM_16") * 2)
    with pytest.raises(AudioError, match="only the first is read"):
        read_audio(path, duration_s=SECONDS - 0.05)
    assert len(read_audio(path, offset_s=1.0, duration_s=1.0)) == RATE_HZ  # of the first, as its header says


def test_tags_around_an_mp3_are_no_second_recording(tmp_path: Path) -> None:
    path = tmp_path / "a.mp3"
    whole = written(path, "MP3", "MPEG_LAYER_III")
    tag = b"ID3\4\0\0\0\0\2\x10" + bytes(272)  # syncsafe: 2 * 128 + 16 bytes
    for end in (b"TAG" + bytes(125), b"APETAGEX" + bytes(500)):
        path.write_bytes(tag + whole + end)
        assert audio_info(path).duration_s == SECONDS
        path.write_bytes(tag + whole + tag + whole + end)
        with pytest.raises(AudioError, match=f"only the first is read, to byte {len(tag + whole)} of"):
            audio_info(path)


@pytest.mark.parametrize("mode", ["CONSTANT", "VARIABLE"])
def test_an_mp3_that_varies_in_bit_rate_states_its_length(tmp_path: Path, mode: str) -> None:
    """Decoders guess other lengths by the rate of the first frame, and end there."""
    path = tmp_path / "a.mp3"
    samples = np.concatenate([sound(1), 0.001 * sound(1)])
    with soundfile.SoundFile(path, "w", RATE_HZ, 1, format="MP3", compression_level=0.5, bitrate_mode=mode) as file:
        file.write(samples)
    whole = path.read_bytes()
    assert audio_info(path).frames == len(samples)
    place = max(whole.find(b"Xing"), whole.find(b"Info"))
    for without in (
        whole[: place + 4] + bytes(12) + whole[place + 16 :],
        whole[:place] + bytes(20) + whole[place + 20 :],
    ):
        path.write_bytes(without)
        if mode == "CONSTANT":
            assert 0 <= audio_info(path).frames - len(samples) <= 4 * 576  # delay and padding, which that header states
        else:
            with pytest.raises(AudioError, match="varies in bit rate and states no length"):
                audio_info(path)


@pytest.mark.parametrize("seconds", [3, 100])  # of the first rate: fewer frames than are read from the start, and more
def test_the_bit_rate_of_an_mp3_may_change_late(tmp_path: Path, seconds: int) -> None:
    path, parts = tmp_path / "a.mp3", []
    for level, length_s in ((0.7, seconds), (0.5, seconds // 3)):
        with soundfile.SoundFile(
            path, "w", RATE_HZ, 1, format="MP3", compression_level=level, bitrate_mode="CONSTANT"
        ) as file:
            file.write(sound(1, length_s))
        whole = path.read_bytes()
        place = max(whole.find(b"Xing"), whole.find(b"Info"))
        parts.append(whole[:place] + bytes(20) + whole[place + 20 :])
    path.write_bytes(parts[0] + b"TAG" + bytes(125))
    assert abs(audio_info(path).duration_s - seconds) < 0.2
    path.write_bytes(b"".join(parts))
    with pytest.raises(AudioError, match="varies in bit rate and states no length"):
        audio_info(path)


def test_a_segment_of_a_truncated_file_is_refused_too(tmp_path: Path) -> None:
    path = tmp_path / "a.au"
    path.write_bytes(written(path, "AU", "PCM_16")[:-32000])
    with pytest.raises(AudioError, match="truncated: its header says 96000 bytes of samples, the file holds 64000"):
        read_audio(path, offset_s=0.1, duration_s=0.5)


STREAMED = {
    "au": (".snd", ">4sIIIII", (b".snd", 24, 0xFFFFFFFF, 3, RATE_HZ, 1)),
    "aiff": ("FORM", ">4sI4s4sIhIh10s4sIII", (b"FORM", 0x7F00002E, b"AIFF", b"COMM", 18, 1, 0x3F800000, 16,
             bytes.fromhex("400cfa00000000000000"), b"SSND", 0x7F000008, 0, 0)),
}  # fmt: skip


@pytest.mark.parametrize("kind", STREAMED)
def test_a_header_written_to_a_pipe_promises_nothing(tmp_path: Path, kind: str) -> None:
    _, layout, values = STREAMED[kind]
    path = tmp_path / f"a.{kind}"
    samples = (sound(1)[:, 0] * 32767).astype(layout[0] + "i2")
    path.write_bytes(struct.pack(layout, *values) + samples.tobytes())
    np.testing.assert_array_equal(read_audio(path), samples.astype(np.float32) / 32768)


@pytest.mark.parametrize("container", UNCHECKED)
def test_other_containers_are_reported_as_unchecked(
    container: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    path = tmp_path / "a.bin"
    written(path, container, "PCM_16")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert audio_info(path).frames == SECONDS * RATE_HZ
    assert caplog.text.count(f"{container} files are not checked for truncation") == 1


def test_a_header_that_leads_nowhere_promises_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for content in (b"", b"RIFF", b"caff\0\1\0\0" + struct.pack(">4sQ", b"free", 2**64 - 5), b"FORM" + bytes(200_000)):
        path.write_bytes(content)
        with path.open("rb") as file:
            for container in ("WAV", "AIFF", "W64", "CAF", "NIST", "MP3"):
                assert audio.describe_damage(file.fileno(), container) == ""


def test_a_page_that_decoders_would_leave_out_is_named(tmp_path: Path) -> None:
    for subtype in ("OPUS", "VORBIS"):
        whole = bytearray(written(tmp_path / "a.ogg", "OGG", subtype))
        pages = [at for at in range(len(whole)) if whole[at : at + 4] == b"OggS"]
        for at, after in zip(pages, [*pages[1:], len(whole)], strict=True):
            damaged = whole.copy()
            damaged[(at + 27 + after) // 2] ^= 1
            (tmp_path / "a.ogg").write_bytes(damaged)
            for read in (read_audio, audio_info):
                with pytest.raises(AudioError, match=rf"damaged: the checksum of its page at byte {at} |not readable"):
                    read(tmp_path / "a.ogg")
