"""Containers that libsndfile does not read (m4a, webm, wma, videos), decoded by PyAV or else by the program ffmpeg.

Some of FFmpeg's demuxers open the files that their input names, as concat lists and playlists do. Input may come from
strangers. FFmpeg therefore reads an open file, with the demuxers in `_DEMUXERS` only, and no protocol that could open
another file.
"""

import logging
import os
import shutil
import struct
import subprocess
import threading
from collections import deque
from collections.abc import Generator
from itertools import chain
from types import SimpleNamespace
from typing import IO, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ds2.system import UserError
from ds2.system.terminal import warn_once

log = logging.getLogger(__name__)
FFMPEG_SUFFIXES = (
    ".m4a", ".mp4", ".webm", ".aac", ".wma", ".mkv", ".mka", ".mov", ".avi", ".m4b", ".3gp", ".amr", ".ac3",
    ".ts", ".wmv",
)  # fmt: skip
_DEMUXERS = ("aac", "ac3", "amr", "asf", "avi", "eac3", "flac", "matroska", "mov", "mp3", "mpegts", "ogg", "wav")
_REFUSED_CONTAINER = (
    f"not readable as audio: its container is none of {', '.join(_DEMUXERS)}. Lists and playlists of other files "
    "are never followed; convert other audio, e.g. to FLAC"
)
UNKNOWN_FRAMES = 1 << 62
"""The number of frames of a file whose length is not known before its end."""
_INSTALL = 'pip install av (the extra "media"), or put ffmpeg, 6.0 or newer, on the PATH'
_SIGNATURES = (  # offset, bytes, container: MP4 and QuickTime, Matroska and WebM, ASF (wma), AMR, AVI, bare AAC
    (4, b"ftyp", "MP4"), (0, b"\x1a\x45\xdf\xa3", "MATROSKA"), (0, b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "ASF"),
    (0, b"#!AMR", "AMR"), (8, b"AVI ", "AVI"), (0, b"\xff\xf1", "ADTS"), (0, b"\xff\xf9", "ADTS"),
)  # fmt: skip
_SIGNATURE_BYTES = 16
_PADDING_S = 0.5  # sound may be so much shorter than its header says: encoders pad, decoders remove the padding
_GAP_S = 0.1  # shorter gaps come from rounded times; ffmpeg's aresample ignores them too
_CLOCK_GAP_S = 10.0  # a longer gap in MPEG-TS means that its clock started again; ffmpeg has the same rule
_LONGEST_GAP_S = 3600.0  # a longer one is a damaged time, which may be years
_SILENT_FRAMES = 1 << 16  # of a block of silence
_BUFFER_BYTES = 1 << 18
_PROGRAM_BLOCK_BYTES = 1 << 20
_MAX_MESSAGES = 8
_AU_HEADER = struct.Struct(">4s5I")  # ".snd", offset of the samples, their size, encoding, rate, channels


class FFmpegError(UserError):
    """A file that FFmpeg cannot read, or no FFmpeg at all; the message has the reason, not the file's name."""


class _Format(NamedTuple):
    sample_rate_hz: int
    channels: int
    name: str


_Blocks = Generator[tuple[_Format, NDArray[np.float32]], None, None]  # blocks (N, channels), with the same format each


def container_of(descriptor: int) -> str:
    """Return the container of this module that a file begins as, '' for others, such as MPEG-TS, which has no mark."""
    head = os.pread(descriptor, _SIGNATURE_BYTES, 0)
    return next((name for at, mark, name in _SIGNATURES if head[at:].startswith(mark)), "")


class FFmpegAudio:
    """The first audio stream of an open file, decoded from its start to its end as it is read; never sought in.

    Sound that begins after the picture, or after a gap, begins after silence here, so that times are the file's.
    Containers keep times in their own units, often milliseconds, so a position reached by seeking is not exact. Headers
    round the length or omit it, so `frames` is UNKNOWN_FRAMES.

    Args:
        descriptor: the file, open for reading; it stays open.

    Raises:
        FFmpegError: there is no FFmpeg; or the file is in another container, is damaged, or holds no sound. `read`
            raises it too, at the end of a file that is shorter than its header says.
    """

    subtype = "FFmpeg"
    frames = UNKNOWN_FRAMES

    def __init__(self, descriptor: int) -> None:
        os.lseek(descriptor, 0, os.SEEK_SET)
        self._blocks = _decode(descriptor)
        first = next(self._blocks, None)
        if first is None:
            raise FFmpegError("it holds no samples")
        (self.samplerate, self.channels, self.format), self._pending = first
        self._error: FFmpegError | None = None  # raised when all samples before it are read

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._blocks.close()

    def read(self, frames: int, *, dtype: str = "float32", always_2d: bool = True) -> NDArray[np.float32]:
        """Return the next frames (N, channels) float32, fewer at the end."""
        blocks, available = [self._pending], len(self._pending)
        try:
            while available < frames and (decoded := next(self._blocks, None)) is not None:
                blocks.append(decoded[1])
                available += len(decoded[1])
        except FFmpegError as error:
            self._error = error
        if not available and self._error is not None:
            raise self._error
        joined = np.concatenate(blocks)
        self._pending = joined[frames:]
        return joined[:frames]


def _decode(descriptor: int) -> _Blocks:
    try:
        import av
    except ImportError:
        if shutil.which("ffmpeg"):
            return _decode_with_program(descriptor)
        raise FFmpegError(f"libsndfile does not read this format: {_INSTALL}") from None
    return _decode_with_pyav(av, descriptor)


def _decode_with_pyav(package: Any, descriptor: int) -> _Blocks:
    options = {"format_whitelist": ",".join(_DEMUXERS), "protocol_whitelist": "none"}
    try:
        with open(descriptor, "rb", closefd=False) as file:
            # Without the attribute `name`: FFmpeg would take it for a path, and open other files beside it.
            nameless = SimpleNamespace(read=file.read, seek=file.seek, tell=file.tell)
            try:
                container = package.open(nameless, options=options, metadata_errors="ignore", buffer_size=_BUFFER_BYTES)
            except package.error.ArgumentError as error:
                raise FFmpegError(_REFUSED_CONTAINER) from error
            with container:
                yield from _decode_container(package, container)
    except package.FFmpegError as error:
        raise FFmpegError(
            f"not readable as audio: {error.strerror or error}; copy it again, or convert it, e.g. to FLAC"
        ) from error


def _decode_container(package: Any, container: Any) -> _Blocks:
    if not container.streams.audio:
        raise FFmpegError("it holds no sound")
    stream, tracks = container.streams.audio[0], len(container.streams.audio)
    if tracks > 1:
        warn_once(
            log,
            f"of the {tracks} audio tracks of a file the first is read; `ffmpeg -i FILE -map 0:a:1 OUT.flac` extracts "
            "the second (logged once)",
        )
    if stream.codec_context is None:
        raise FFmpegError("its sound has a codec that this FFmpeg cannot decode; convert it, e.g. to FLAC")
    name = f"{container.format.name.split(',')[0].upper()}/{stream.codec_context.name}"
    stated_s, start_s = _stated_s(container), (container.start_time or 0) / 1e6
    frames = lead_frames = rate_hz = 0  # lead: the silence before the first sound, which headers do not count
    resampler = None
    for frame in chain(container.decode(stream), (None,)):  # None flushes the resampler
        if resampler is None:
            if frame is None:
                return
            layout, rate_hz = frame.layout.name, frame.sample_rate
            audio_format = _Format(rate_hz, len(frame.layout.channels), name)
            resampler = package.AudioResampler(format="flt", layout=layout, rate=rate_hz)
        if frame is not None and frame.pts is not None:
            gap_s = float(frame.pts * frame.time_base) - start_s - frames / rate_hz
            if gap_s > _LONGEST_GAP_S or (gap_s > _CLOCK_GAP_S and name.startswith("MPEGTS/") and frames):
                start_s += gap_s
            elif gap_s > _GAP_S:
                silent = round(gap_s * rate_hz)
                lead_frames = lead_frames if frames else silent
                frames += silent
                yield from _silence(audio_format, silent)
        for converted in resampler.resample(frame):
            block = converted.to_ndarray().reshape(-1, audio_format.channels)
            frames += len(block)
            yield audio_format, block
    decoded_s = (frames - lead_frames) / rate_hz
    if decoded_s < stated_s - _PADDING_S:
        raise FFmpegError(
            f"truncated: its header says {stated_s:.3f} s, decoding ends at {decoded_s:.3f} s. Copy it again, "
            "or convert what is there, e.g. to FLAC"
        )


def _silence(audio_format: _Format, frames: int) -> _Blocks:
    """Yield silence in blocks of bounded size: a gap may last an hour."""
    for first in range(0, frames, _SILENT_FRAMES):
        yield audio_format, np.zeros((min(_SILENT_FRAMES, frames - first), audio_format.channels), np.float32)


def _stated_s(container: Any) -> float:
    """Return the seconds of sound that a header states; 0 where it states those of the video, a guess, or nothing."""
    stream = container.streams.audio[0]
    if stream.duration and stream.time_base and container.format.name.startswith("mov"):
        return float(stream.duration * stream.time_base)
    only_stream = len(container.streams) == 1 and container.format.name.split(",")[0] in ("matroska", "asf")
    # Matroska's duration is the time of its end, also where the first time is not 0.
    return (container.duration - (container.start_time or 0)) / 1e6 if only_stream and container.duration else 0.0


def _decode_with_program(descriptor: int) -> _Blocks:
    """Decode with the program: it reads the file as its standard input and writes float32 as an AU file."""
    command = [
        "ffmpeg", "-nostdin", "-v", "error", "-protocol_whitelist", "fd", "-format_whitelist", ",".join(_DEMUXERS),
        "-fd", "0", "-i", "fd:", "-map", "0:a:0", "-vn", "-af", "aresample=async=1:first_pts=0",
        "-c:a", "pcm_f32be", "-f", "au", "pipe:1",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdin=descriptor, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    messages: deque[bytes] = deque(maxlen=_MAX_MESSAGES)
    reader = threading.Thread(target=messages.extend, args=(process.stderr,), daemon=True)
    reader.start()
    try:
        yield from _read_au(process.stdout)
        status = process.wait()
        reader.join()
        if status:
            lines = [line.decode(errors="replace").strip() for line in messages]
            if any("not on whitelist" in line for line in lines):
                raise FFmpegError(_REFUSED_CONTAINER)
            if any("option 'fd'" in line for line in lines):
                raise FFmpegError(f"the ffmpeg on the PATH is older than 6.0: {_INSTALL}")
            raise FFmpegError(f"ffmpeg cannot read it: {lines[-1] if lines else f'it ended with status {status}'}")
    finally:
        process.kill()  # it may still be decoding when the caller needs no more
        process.wait()
        reader.join()
        process.stdout.close()
        process.stderr.close()


def _read_au(file: IO[bytes]) -> _Blocks:
    header = file.read(_AU_HEADER.size)
    if len(header) < _AU_HEADER.size:
        return
    _, offset, _, _, rate_hz, channels = _AU_HEADER.unpack(header)
    file.read(offset - _AU_HEADER.size)
    audio_format, frame_bytes = _Format(rate_hz, channels, "FFMPEG"), 4 * channels
    while block := file.read(_PROGRAM_BLOCK_BYTES // frame_bytes * frame_bytes):
        samples = np.frombuffer(block[: len(block) // frame_bytes * frame_bytes], ">f4").astype(np.float32)
        yield audio_format, samples.reshape(-1, channels)
