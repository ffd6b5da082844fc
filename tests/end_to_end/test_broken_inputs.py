"""Broken input: each kind of broken audio and manifest has a named error or a stated, counted handling."""

from __future__ import annotations

import json
import logging
import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile

from ds2.audio.read import AudioError, EmptyAudioError, audio_blocks, audio_info, read_audio
from ds2.data.manifest import ManifestError, read_manifest
from ds2.system import UserError

RATE_HZ = 16000
TONE = 0.3 * np.sin(2 * np.pi * 440 * np.arange(RATE_HZ) / RATE_HZ)


def wav_header(data_bytes: int, *, rate_hz: int = RATE_HZ, channels: int = 1, bits: int = 16) -> bytes:
    block = channels * bits // 8
    header = struct.pack("<4sI4s4sIHHIIHH", b"RIFF", min(data_bytes + 36, 2**32 - 1), b"WAVE", b"fmt ", 16, 1, channels,
                         rate_hz, rate_hz * block, block, bits)  # fmt: skip
    return header + struct.pack("<4sI", b"data", data_bytes)


def encoded(folder: Path, container: str, subtype: str, samples: np.ndarray = TONE) -> bytes:
    path = folder / "encoded"
    soundfile.write(path, samples, RATE_HZ, format=container, subtype=subtype)
    return path.read_bytes()


def cut(container: str, subtype: str, fraction: float = 0.5) -> Callable[[Path], bytes]:
    def make(folder: Path) -> bytes:
        whole = encoded(folder, container, subtype)
        return whole[: int(len(whole) * fraction)]

    return make


BROKEN_AUDIO: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "empty": (lambda _: b"", "empty"),
    "zero length": (lambda _: wav_header(0), "no samples"),
    "truncated opus": (
        lambda f: encoded(f, "OGG", "OPUS", np.tile(TONE, 5))[:-9000],
        r"truncated: its page at byte \d+ ends at byte \d+, the file at \d+",
    ),
    "never completed header": (lambda _: wav_header(0) + bytes(32000), "no samples, or its header was never completed"),
    "wrong magic": (lambda _: b"RIFX is not what this says" * 100, "not readable as audio"),
    "text": (lambda _: b"hello\n" * 1000, "not readable as audio"),
    "web page": (lambda _: b"<!DOCTYPE html><title>404</title>" + b" " * 4096, "not readable as audio"),
    "header cut": (lambda _: wav_header(1000)[:30], "not readable as audio|no samples"),
    "truncated wav": (cut("WAV", "PCM_16"), r"truncated: its header says \d+ bytes of samples, the file holds \d+"),
    "truncated flac": (cut("FLAC", "PCM_16"), "not readable as audio|truncated"),
    "truncated mp3": (cut("MP3", "MPEG_LAYER_III"), "truncated: decoding ends"),
    "truncated vorbis": (cut("OGG", "VORBIS"), "not readable as audio|no samples"),
    "NaN": (
        lambda f: encoded(f, "WAV", "FLOAT", np.where(np.arange(RATE_HZ) == 9000, np.nan, TONE)),
        "NaN or infinite",
    ),
    "all NaN": (lambda f: encoded(f, "WAV", "FLOAT", np.full(100, np.nan)), "NaN or infinite"),
    "infinity": (lambda f: encoded(f, "WAV", "FLOAT", np.full(100, np.inf)), "NaN or infinite"),
    "floats on the scale of 16 bits": (
        lambda f: encoded(f, "WAV", "FLOAT", TONE * 32768),
        "samples of 98.*within -1..1",
    ),
    "header promises 1.9 GB": (lambda _: wav_header(0x70000000) + bytes(3200), "truncated: its header says 1879048192"),
    "absurd rate": (lambda _: wav_header(3200, rate_hz=2**31 - 1) + bytes(3200), "2147483647 Hz; allowed are"),
    "rate of 1 Hz": (lambda _: wav_header(3200, rate_hz=1) + bytes(3200), "at 1 Hz; allowed are"),
    "absurd channels": (
        lambda _: wav_header(65000, channels=1000) + bytes(65000),
        "1000 channels|not readable as audio",
    ),
}


@pytest.mark.parametrize("case", BROKEN_AUDIO)
def test_broken_audio_is_a_named_error(tmp_path: Path, case: str) -> None:
    make, reason = BROKEN_AUDIO[case]
    path = tmp_path / "broken.wav"
    path.write_bytes(make(tmp_path))
    with pytest.raises(AudioError, match=reason) as caught:
        read_audio(path)
    assert str(path) in str(caught.value)


def test_files_without_samples_are_told_apart(tmp_path: Path) -> None:
    for content in (b"", wav_header(0)):
        (tmp_path / "a.wav").write_bytes(content)
        for read in (read_audio, audio_info):
            with pytest.raises(EmptyAudioError):
                read(tmp_path / "a.wav")


def test_odd_bytes_are_no_raw_audio(tmp_path: Path) -> None:
    (tmp_path / "a.raw").write_bytes(b"123")
    with pytest.raises(AudioError, match="3 bytes cannot be headerless 16-bit"):
        read_audio(tmp_path / "a.raw")


def test_paths_that_are_no_audio_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.wav")
    loop = tmp_path / "loop.wav"
    loop.symlink_to(loop)
    cases = {
        tmp_path: "is a folder",
        tmp_path / "none.wav": "No such file",
        tmp_path / "pipe.wav": "is a device or pipe",
        loop: "symbolic links",
        tmp_path / "nul\0.wav": "null",
    }
    for path, reason in cases.items():
        with pytest.raises(AudioError, match=reason) as caught:
            read_audio(path)
        assert str(path) in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_permission(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    soundfile.write(path, TONE, RATE_HZ)
    path.chmod(0)
    with pytest.raises(AudioError, match="Permission denied"):
        read_audio(path)


def test_permission_error_of_the_system_becomes_an_audio_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("ds2.audio.read.os.open", refuse)
    with pytest.raises(AudioError, match=r"a\.wav: Permission denied"):
        read_audio(tmp_path / "a.wav")


@pytest.mark.parametrize("size", [0xFFFFFFFF, 0xFFFFFFFF - 44, 0x7FFFFFFF, 0x7FFFF000, 0x7F000000])
def test_a_header_from_a_pipe_states_no_true_size_and_is_read_to_the_end(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(wav_header(size) + (TONE * 32767).astype("<i2").tobytes())
    assert len(read_audio(path)) == RATE_HZ


def test_stereo_and_8_bit_are_read_as_mono(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.stack([TONE, TONE], 1), RATE_HZ, subtype="PCM_U8")
    np.testing.assert_allclose(read_audio(tmp_path / "a.wav"), TONE, atol=1 / 100)


def test_a_very_long_file_is_refused_whole_and_read_in_bounded_memory_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "long.flac"  # half an hour of silence: small on disk
    with soundfile.SoundFile(path, "w", 8000, 1, "PCM_16", format="FLAC") as file:
        for _ in range(30):
            file.write(np.zeros(8000 * 60, np.int16))
    monkeypatch.setattr("ds2.audio.read.MAX_READ_S", 600.0)
    tracemalloc.start()
    try:
        with pytest.raises(AudioError, match="longer than 600 s; read segments"):
            read_audio(path)
        assert tracemalloc.get_traced_memory()[1] < 700 * RATE_HZ * 4 * 1.5
        tracemalloc.reset_peak()
        assert sum(len(block) for block in audio_blocks(path)) == 1800 * RATE_HZ
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


GOOD = {"audio_filepath": "a.wav", "duration": 1.0, "text": "a"}


def line(**changes: object) -> bytes:
    record = {key: value for key, value in (GOOD | changes).items() if value is not ...}
    return json.dumps(record).encode() + b"\n"


BROKEN_MANIFESTS: dict[str, tuple[bytes, str]] = {
    "bad JSON": (b'{"audio_filepath": "a.wav",\n', ":2: not JSON"),
    "not an object": (b"[1]\n", ":2: a JSON list; expected one object"),
    "nested without end": (b"[" * 100_000 + b"\n", ":2: not JSON"),
    "no audio_filepath": (line(audio_filepath=...), ":2: without audio_filepath; every line needs"),
    "no duration and text": (line(duration=..., text=None), ":2: without duration, text"),
    "path of a wrong type": (line(audio_filepath=7), ":2: audio_filepath is 7; expected a string"),
    "empty path": (line(audio_filepath=" "), ":2: audio_filepath is ' '; expected a path"),
    "NUL in path": (line(audio_filepath="a\0.wav"), ":2: audio_filepath is .*; expected a path"),
    "text of a wrong type": (line(audio_filepath="b", text=["a"]), r":2: text is \['a'\]; expected a string"),
    "half a surrogate pair": (line(audio_filepath="b", text="\ud800"), ":2: text is .*surrogate"),
    "negative duration": (line(duration=-1), ":2: duration is -1; expected seconds"),
    "NaN duration": (line(duration=float("nan")), ":2: duration is nan; expected seconds"),
    "infinite duration": (line(duration=float("inf")), ":2: duration is inf; expected seconds"),
    "huge duration": (line(duration=1e300), r":2: duration is 1e\+300; expected seconds, from 0 to 604800"),
    "least duration": (line(duration=5e-324), ":2: duration is 5e-324; expected seconds, 0 or at least 1e-06"),
    "duration of 5000 digits": (b'{"audio_filepath": "b", "text": "", "duration": 1' + b"0" * 5000 + b"}\n", ":2: "),
    "duration as text": (line(duration="1.0"), ":2: duration is '1.0'; expected a number"),
    "boolean duration": (line(duration=True), ":2: duration is True; expected a number"),
    "negative offset": (line(offset=-0.5), ":2: offset is -0.5; expected seconds"),
    "duplicate": (line(text="other"), r":2: a was listed before, at .*\.jsonl:1"),
    "duplicate by another spelling": (line(audio_filepath="b/../a.wav"), ":2: a was listed before"),
    "not UTF-8": (b'{"audio_filepath": "b", "duration": 1, "text": "\xe9"}\n', ":2: byte 49 is not UTF-8"),
}


@pytest.mark.parametrize("case", BROKEN_MANIFESTS)
def test_a_broken_manifest_line_is_named(tmp_path: Path, case: str) -> None:
    content, reason = BROKEN_MANIFESTS[case]
    path = tmp_path / "m.jsonl"
    path.write_bytes(line() + content)
    with pytest.raises(ManifestError, match=reason) as caught:
        read_manifest(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\n \r\n", b"\xef\xbb\xbf"])
def test_an_empty_manifest_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.jsonl").write_bytes(content)
    with pytest.raises(ManifestError, match=r"m\.jsonl: holds no utterances"):
        read_manifest(tmp_path / "m.jsonl")


def test_utf_16_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_bytes(line().decode().encode("utf-16"))
    with pytest.raises(UserError, match="UTF-16; save the file as UTF-8"):
        read_manifest(tmp_path / "m.jsonl")


@pytest.mark.parametrize("name", ["none.jsonl", ""])
def test_a_missing_manifest_or_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"No such file|Is a directory"):
        read_manifest(tmp_path / name)


def test_audio_as_a_manifest_is_named(tmp_path: Path) -> None:
    (tmp_path / "talk.mp3").write_bytes(b"\xff\xfb" * 1000)
    with pytest.raises(ManifestError, match=r"talk\.mp3: is audio, not a manifest.*ds2 transcribe") as caught:
        read_manifest(tmp_path / "talk.mp3")
    assert "\n" not in str(caught.value)


def test_many_bad_lines_are_named_up_to_ten_and_counted(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_bytes(line(text=...) * 25)
    with pytest.raises(ManifestError) as caught:
        read_manifest(tmp_path / "m.jsonl")
    lines = str(caught.value).splitlines()
    assert len(lines) == 11 and ":10: without text" in lines[9] and lines[10] == "... and 15 more"


def test_bom_crlf_blank_lines_and_a_missing_last_newline_are_accepted(tmp_path: Path) -> None:
    second = line(audio_filepath="b.wav").rstrip()
    (tmp_path / "m.jsonl").write_bytes(b"\xef\xbb\xbf" + line().rstrip() + b"\r\n\r\n" + second)
    assert [u.source[-2:] for u in read_manifest(tmp_path / "m.jsonl")] == [":1", ":3"]


def test_absolute_and_escaping_paths_are_allowed_and_resolved(tmp_path: Path) -> None:
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "m.jsonl").write_bytes(line(audio_filepath="/x/a.wav") + line(audio_filepath="../wav/b.wav"))
    read = read_manifest(tmp_path / "lists" / "m.jsonl")
    assert [u.audio_filepath for u in read] == [Path("/x/a.wav"), tmp_path.resolve() / "wav" / "b.wav"]


def test_unused_keys_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "m.jsonl").write_bytes(line(pred_text="x", speaker=7, lang=None))
    with caplog.at_level(logging.INFO):
        (utterance,) = read_manifest(tmp_path / "m.jsonl")
    assert (utterance.speaker, utterance.lang) == ("7", "")
    assert "keys that ds2 does not use were ignored: pred_text" in caplog.text
