"""What libsndfile does not read is read all the same: by PyAV, by ffmpeg without it, and else with the way out."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import soundfile

from ds2.audio.read import AudioError, audio_blocks, audio_info, read_audio
from ds2.data.check import probe
from ds2.data.corpora import ImporterError
from ds2.data.corpora.layouts import import_csv
from ds2.data.manifest import Utterance
from ds2.system.terminal import warn_once

av = pytest.importorskip("av")

SECONDS = 3.0
FORMATS = {  # suffix: container, codec, rate
    "m4a": ("ipod", "aac", 44100),
    "webm": ("webm", "libopus", 48000),
    "aac": ("adts", "aac", 16000),
    "wma": ("asf", "wmav2", 44100),
    "mkv": ("matroska", "ac3", 48000),
    "ts": ("mpegts", "ac3", 48000),
    "avi": ("avi", "pcm_s16le", 16000),
}


def tone(rate_hz: int, seconds: float = SECONDS) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * 440 * np.arange(int(rate_hz * seconds)) / rate_hz)).astype(np.float32)


def encode(
    path: Path,
    kind: str,
    *,
    video: bool = False,
    channels: int = 1,
    delay_s: float = 0.0,
    gap_s: float = 0.0,
    tracks: int = 1,
) -> Path:
    """Write the tone as the first track; it begins after a delay, and again after a gap in its middle."""
    container, codec, rate_hz = FORMATS[kind]
    layout = {1: "mono", 2: "stereo"}[channels]
    with av.open(str(path), "w", format=container) as output:
        if video:
            pictures = output.add_stream("mpeg4", rate=10)
            pictures.width, pictures.height, pictures.pix_fmt = 64, 64, "yuv420p"
        stream = output.add_stream(codec, rate=rate_hz)
        stream.layout, stream.bit_rate = layout, 96000
        for _ in range(tracks - 1):
            output.add_stream(codec, rate=rate_hz).layout = layout
        samples = np.repeat(tone(rate_hz)[None], channels, axis=0)
        whole = av.AudioFrame.from_ndarray(samples, format="fltp", layout=layout)
        whole.sample_rate, whole.pts, whole.time_base = rate_hz, 0, Fraction(1, rate_hz)
        stream.codec_context.open()
        size = stream.codec_context.frame_size or 1024
        even = av.AudioResampler(stream.codec_context.format, layout, rate_hz, frame_size=size)
        if video:
            for number in range(int(10 * SECONDS)):
                picture = av.VideoFrame.from_ndarray(np.full((64, 64, 3), 8 * number % 255, np.uint8), format="rgb24")
                output.mux(pictures.encode(picture))
            output.mux(pictures.encode(None))
        for frame in [*even.resample(whole), *even.resample(None)]:
            later_s = delay_s + gap_s * (frame.pts >= rate_hz * SECONDS / 2)
            frame.pts += round(later_s * rate_hz)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return path


def assert_is_the_tone(waveform: np.ndarray) -> None:
    assert waveform.dtype == np.float32
    assert len(waveform) == pytest.approx(16000 * SECONDS, abs=16000 * 0.25)  # codecs pad both ends by some frames
    middle = waveform[8000:40000] * np.hanning(32000)
    spectrum = np.abs(np.fft.rfft(middle))
    assert np.argmax(spectrum) * 16000 / 32000 == pytest.approx(440, abs=1)
    assert np.sqrt(np.mean(waveform[8000:40000] ** 2)) == pytest.approx(0.5 / np.sqrt(2), rel=0.1)


@pytest.mark.parametrize("kind", FORMATS)
def test_foreign_formats_read_as_the_sound_they_were(tmp_path: Path, kind: str) -> None:
    path = encode(tmp_path / f"x.{kind}", kind)
    waveform = read_audio(path)
    assert_is_the_tone(waveform)
    info = audio_info(path)
    assert info.sample_rate_hz == FORMATS[kind][2] and info.channels == 1
    assert info.duration_s == pytest.approx(len(waveform) / 16000, abs=0.01)


def test_the_sound_of_a_video_and_stereo_are_read(tmp_path: Path) -> None:
    assert_is_the_tone(read_audio(encode(tmp_path / "film.mkv", "mkv", video=True, channels=2)))


@pytest.mark.parametrize("kind", ["mkv", "m4a"])
def test_sound_that_begins_later_than_the_picture_or_after_a_gap_keeps_its_times(tmp_path: Path, kind: str) -> None:
    path = encode(tmp_path / f"film.{kind}", kind, video=True, delay_s=0.8, gap_s=0.6)
    waveform = read_audio(path)
    loud = np.abs(waveform[: len(waveform) // 160 * 160].reshape(-1, 160)).max(1) > 0.25  # by 10 ms
    edges_s = np.flatnonzero(np.diff(loud.astype(int), prepend=0, append=0)) / 100
    np.testing.assert_allclose(edges_s, [0.8, 2.3, 2.9, 4.4], atol=0.07)  # frames of 32 ms are moved as a whole
    assert audio_info(path).duration_s == pytest.approx(len(waveform) / 16000, abs=0.01)


def test_a_recording_whose_times_begin_later_is_whole(tmp_path: Path) -> None:
    path = encode(tmp_path / "part.webm", "webm", delay_s=30.0)  # as cut out of a longer one with its times
    assert_is_the_tone(read_audio(path))


def test_a_clock_that_begins_anew_is_no_gap(tmp_path: Path) -> None:
    path = encode(tmp_path / "film.ts", "ts", video=True, gap_s=3600.0)
    assert_is_the_tone(read_audio(path))


def test_a_gap_of_more_than_an_hour_is_a_damaged_time(tmp_path: Path) -> None:
    path = encode(tmp_path / "film.mkv", "mkv", video=True, gap_s=4000.0)
    assert_is_the_tone(np.concatenate(list(audio_blocks(path, lenient=True))))


def test_other_audio_tracks_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    assert_is_the_tone(read_audio(encode(tmp_path / "film.mkv", "mkv", video=True, tracks=3)))
    assert "of the 3 audio tracks of a file the first is read; `ffmpeg -i FILE -map 0:a:1 OUT.flac`" in caplog.text


@pytest.mark.parametrize("kind", ["m4a", "aac", "avi"])
def test_content_decides_where_the_name_is_wrong(tmp_path: Path, kind: str) -> None:
    assert_is_the_tone(read_audio(encode(tmp_path / "x.wav", kind)))


@pytest.mark.parametrize("kind", ["m4a", "mkv", "webm", "avi"])
def test_a_film_that_is_cut_off_is_truncated(tmp_path: Path, kind: str) -> None:
    path = encode(tmp_path / f"film.{kind}", kind, video=kind != "webm")
    whole = path.read_bytes()
    for share in (0.3, 0.7, 0.97 if kind != "avi" else 0.9):
        path.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(
            AudioError, match=r"film\.\w+: truncated: its \w+ at byte \d+ ends at byte .* Copy it again"
        ):
            read_audio(path)
    path.write_bytes(whole + b"a player's tag")
    assert_is_the_tone(read_audio(path))


def test_a_fragment_that_is_cut_off_is_truncated(tmp_path: Path) -> None:
    whole = encode(tmp_path / "x.m4a", "m4a").read_bytes()
    head = whole[: whole.index(b"mdat") - 4]
    for box, damage in (
        (struct.pack(">I4s", 99, b"moof"), r"truncated: its moof at byte \d+ ends"),
        (struct.pack(">I4sQ", 1, b"mdat", 1 << 40), r"truncated: its mdat at byte \d+ ends"),
        (struct.pack(">I4s", 0, b"mdat"), "not readable as audio"),  # to the end of the file
        (struct.pack(">I4s", 7, b"mdat"), "not readable as audio"),
    ):
        (tmp_path / "cut.m4a").write_bytes(head + box)
        with pytest.raises(AudioError, match=damage):
            read_audio(tmp_path / "cut.m4a")


def test_a_last_box_that_counts_its_head_twice_is_whole(tmp_path: Path) -> None:
    path = encode(tmp_path / "x.m4a", "m4a")
    path.write_bytes(path.read_bytes() + struct.pack(">I4s4s", 12 + 16, b"mdat", b"rest"))
    assert_is_the_tone(read_audio(path))


@pytest.mark.parametrize("kind", ["m4a", "webm"])
def test_a_segment_is_the_part_of_the_whole(tmp_path: Path, kind: str) -> None:
    path = encode(tmp_path / f"x.{kind}", kind)
    rate_hz = FORMATS[kind][2]
    whole = np.concatenate(list(audio_blocks(path, rate_hz)))
    part = read_audio(path, rate_hz, offset_s=1.0, duration_s=0.5)
    np.testing.assert_array_equal(part, whole[rate_hz : rate_hz + rate_hz // 2])


def test_a_file_written_anew_is_read_anew(tmp_path: Path) -> None:
    path = encode(tmp_path / "x.m4a", "m4a")
    assert audio_info(path).sample_rate_hz == 44100
    encode(path, "webm")
    assert audio_info(path).sample_rate_hz == 48000


def test_an_import_lists_foreign_files_with_their_length(tmp_path: Path) -> None:
    encode(tmp_path / "a.m4a", "m4a")
    (tmp_path / "list.tsv").write_text("path\tsentence\na.m4a\tone\n")
    [utterance] = import_csv(tmp_path / "list.tsv")
    assert utterance.duration_s == pytest.approx(SECONDS, abs=0.25)
    measured = probe(utterance, 16000)
    assert not measured.error and measured.rate_hz == 44100


def test_damaged_and_silent_containers_are_named(tmp_path: Path) -> None:
    whole = encode(tmp_path / "x.m4a", "m4a").read_bytes()
    (tmp_path / "bad.m4a").write_bytes(whole.replace(b"moov", b"moop"))
    with pytest.raises(AudioError, match=r"bad\.m4a: not readable as audio: .*; copy it again, or convert it"):
        read_audio(tmp_path / "bad.m4a")
    mute = tmp_path / "mute.mkv"
    with av.open(str(mute), "w") as output:
        pictures = output.add_stream("mpeg4", rate=10)
        pictures.width, pictures.height, pictures.pix_fmt = 64, 64, "yuv420p"
        output.mux(pictures.encode(av.VideoFrame(64, 64, "yuv420p")))
        output.mux(pictures.encode(None))
    with pytest.raises(AudioError, match=r"mute\.mkv: it holds no sound"):
        read_audio(mute)
    (tmp_path / "text.wav").write_text("no audio at all")
    with pytest.raises(AudioError, match=r"text\.wav: not readable as audio: .*[Ff]ormat not recognised; give wav"):
        read_audio(tmp_path / "text.wav")


def test_a_codec_without_a_decoder_is_named(tmp_path: Path) -> None:
    path = encode(tmp_path / "x.webm", "webm")
    path.write_bytes(path.read_bytes().replace(b"A_OPUS", b"A_OPUX"))
    with pytest.raises(AudioError, match=r"x\.webm: its sound has a codec that this FFmpeg cannot decode"):
        read_audio(path)


def test_without_pyav_and_ffmpeg_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = encode(tmp_path / "x.m4a", "m4a")
    monkeypatch.setitem(sys.modules, "av", None)  # an import of it fails
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(AudioError, match=r"x\.m4a: .*pip install av .*or put ffmpeg, 6\.0 or newer, on the PATH"):
        read_audio(path)
    (tmp_path / "list.tsv").write_text("path\tsentence\nx.m4a\tone\n")
    with pytest.raises(ImporterError, match="pip install av") as caught:
        import_csv(tmp_path / "list.tsv")
    assert "no audio at" not in str(caught.value)


FFMPEG = """#!{python}
import io, json, sys
import numpy, soundfile
json.dump(sys.argv[1:], open({log!r}, "w"))
if sys.stdin.buffer.read(4) == b"bad!":
    sys.exit(print("Invalid data found when processing input", file=sys.stderr) or 1)
time_s = numpy.arange(int(44100 * {seconds})) / 44100
output = io.BytesIO()
soundfile.write(output, 0.5 * numpy.sin(2 * numpy.pi * 440 * time_s), 44100, format="AU", subtype="FLOAT", endian="BIG")
sys.stdout.buffer.write(output.getvalue())
"""


@pytest.fixture
def only_ffmpeg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH whose ffmpeg writes a tone, and no PyAV; returns the file with the last call's arguments."""
    log, program = tmp_path / "call.json", tmp_path / "bin" / "ffmpeg"
    program.parent.mkdir()
    program.write_text(FFMPEG.format(python=sys.executable, log=str(log), seconds=SECONDS))
    program.chmod(0o755)
    monkeypatch.setitem(sys.modules, "av", None)
    monkeypatch.setenv("PATH", str(program.parent))
    return log


def test_ffmpeg_reads_its_standard_input_where_pyav_is_not_installed(tmp_path: Path, only_ffmpeg: Path) -> None:
    path = tmp_path / "-x.m4a"
    path.write_bytes(b"something")
    assert_is_the_tone(read_audio(path))
    arguments = json.loads(only_ffmpeg.read_text())
    assert arguments[arguments.index("-i") + 1] == "fd:" and "0:a:0" in arguments
    assert arguments[arguments.index("-protocol_whitelist") + 1] == "fd"
    assert not any("x.m4a" in argument for argument in arguments)
    assert audio_info(path).duration_s == SECONDS


def test_an_error_of_ffmpeg_is_shown_in_its_words(tmp_path: Path, only_ffmpeg: Path) -> None:
    (tmp_path / "x.webm").write_bytes(b"bad!")
    with pytest.raises(AudioError, match=r"x\.webm: ffmpeg cannot read it: Invalid data found"):
        read_audio(tmp_path / "x.webm")


def test_the_program_ends_when_its_reader_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, started = tmp_path / "ffmpeg", tmp_path / "process"
    program.write_text(
        f"#!{sys.executable}\nimport os, struct, sys\nopen({str(started)!r}, 'w').write(str(os.getpid()))\n"
        "sys.stdout.buffer.write(struct.pack('>4s5I', b'.snd', 24, 0xffffffff, 6, 16000, 1))\n"
        "while True:\n    sys.stdout.buffer.write(bytes(1 << 16))\n"  # sound without an end
    )
    program.chmod(0o755)
    monkeypatch.setitem(sys.modules, "av", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "x.m4a").write_bytes(b"something")
    blocks = audio_blocks(tmp_path / "x.m4a")
    assert len(next(blocks))
    blocks.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


def lists_of_other_files(folder: Path) -> list[Path]:
    """Files that FFmpeg, asked to open them by path, answers with the sound of another file."""
    sound = folder / "secret.wav"
    soundfile.write(sound, tone(16000), 16000)
    playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\n{sound.resolve().as_uri()}\n#EXT-X-ENDLIST\n"
    lists = {
        "concat.mkv": f"ffconcat version 1.0\nfile '{sound.name}'\n",
        "concat.m4a": f"ffconcat version 1.0\nfile '{sound}'\n",
        "concat.mp4": f"ffconcat version 1.0\nfile 'file:{sound}'\n",
        "playlist.ts": playlist,
        "playlist.mp4": playlist,
    }
    for name, content in lists.items():
        (folder / name).write_text(content)
    return [folder / name for name in lists]


def test_no_file_opens_another_one(tmp_path: Path) -> None:
    with av.open(str(lists_of_other_files(tmp_path)[0])) as container:
        assert sum(frame.samples for frame in container.decode(audio=0)) == 16000 * SECONDS  # an open door
    for path in lists_of_other_files(tmp_path):
        with pytest.raises(AudioError, match="not readable as audio") as caught:
            read_audio(path)
        with pytest.raises(AudioError, match="not readable as audio"):
            audio_info(path)
        assert "secret" not in str(caught.value)


def test_the_refusal_does_not_tell_which_files_exist(tmp_path: Path) -> None:
    messages = set()
    for name in ("there.wav", "missing.wav"):
        (tmp_path / "there.wav").write_bytes(b"RIFF")
        (tmp_path / "x.mkv").write_text(f"ffconcat version 1.0\nfile '{name}'\n")
        with pytest.raises(AudioError, match=r"its container is none of aac, .*never followed") as caught:
            read_audio(tmp_path / "x.mkv")
        messages.add(str(caught.value))
    assert len(messages) == 1


def test_a_long_file_is_decoded_only_as_far_as_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "silence.mka"
    with av.open(str(path), "w", format="matroska") as output:
        stream = output.add_stream("pcm_s16le", rate=8000)
        stream.layout = "mono"
        for second in range(3600):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.int16), format="s16", layout="mono")
            frame.sample_rate, frame.pts = 8000, 8000 * second
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    whole = path.read_bytes()
    half = whole[: len(whole) // 2]
    path.write_bytes(half + bytes(len(whole) - len(half)))  # whoever decodes all of it meets the damage
    blocks = audio_blocks(path, 8000)
    first = next(blocks)
    blocks.close()
    assert 0 < len(first) < 60 * 8000
    assert len(read_audio(path, 8000, offset_s=10.0, duration_s=5.0)) == 5 * 8000
    with pytest.raises(AudioError, match=r"truncated: its header says 3600"):
        audio_info(path)


def test_an_old_ffmpeg_is_named(tmp_path: Path, only_ffmpeg: Path) -> None:
    program = tmp_path / "bin" / "ffmpeg"
    program.write_text("#!/bin/sh\necho \"Unrecognized option 'fd'.\" >&2; echo Option not found >&2; exit 1\n")
    (tmp_path / "x.m4a").write_bytes(b"any bytes")
    with pytest.raises(AudioError, match=r"x\.m4a: the ffmpeg on the PATH is older than 6\.0: pip install av"):
        read_audio(tmp_path / "x.m4a")


def has_new_ffmpeg() -> bool:
    """Whether there is an ffmpeg of 6.0 or newer, which has the protocol fd."""
    if shutil.which("ffmpeg") is None:
        return False
    shown = subprocess.run(["ffmpeg", "-v", "quiet", "-protocols"], capture_output=True, text=True, check=False)
    return "fd" in shown.stdout.split()


@pytest.mark.skipif(not has_new_ffmpeg(), reason="no ffmpeg of 6.0 or newer on the PATH")
def test_the_real_ffmpeg_reads_what_pyav_does_and_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = encode(tmp_path / "x.m4a", "m4a")
    monkeypatch.setitem(sys.modules, "av", None)  # an import of it fails
    assert_is_the_tone(read_audio(path))
    for path in lists_of_other_files(tmp_path):
        with pytest.raises(AudioError, match=r"not readable as audio|ffmpeg cannot read it"):
            read_audio(path)


def test_utterances_of_foreign_files_are_found_missing_like_others(tmp_path: Path) -> None:
    measured = probe(Utterance(tmp_path / "gone.m4a", 1.0, "x"), 16000)
    assert measured.kind == "unreadable" and "No such file" in measured.error


def test_a_lenient_reader_gets_what_there_is_of_a_truncated_container(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = encode(tmp_path / "x.webm", "webm").read_bytes()
    (tmp_path / "half.webm").write_bytes(whole[: len(whole) // 2])
    part = np.concatenate(list(audio_blocks(tmp_path / "half.webm", lenient=True)))
    assert 0.5 < len(part) / 16000 < SECONDS - 0.5
    assert "half.webm: damaged after" in caplog.text and "what can be decoded is used" in caplog.text
