"""Files that libsndfile does not read (m4a, webm, aac, wma, the sound of videos): by PyAV, or by ffmpeg on the PATH."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import soundfile
from numpy.typing import NDArray

from ds2.system.errors import UserError

FOREIGN_SUFFIXES = (
    ".m4a", ".mp4", ".webm", ".aac", ".wma", ".mkv", ".mka", ".mov", ".avi", ".m4b", ".3gp", ".amr", ".ac3",
    ".ts", ".wmv",
)  # fmt: skip
_WAY_OUT = 'pip install av (the extra "media"), or put ffmpeg on the PATH'


_HEAD_BYTES = 16
_SHORT_S = 0.5  # sound may end so much before its header says: encoders pad, and leave the padding out
_SIGNATURES = (  # where it stands, and what: MP4 and QuickTime, Matroska and WebM, ASF (wma), AMR
    (4, b"ftyp"), (0, b"\x1a\x45\xdf\xa3"), (0, b"\x30\x26\xb2\x75\x8e\x66\xcf\x11"), (0, b"#!AMR"),
)  # fmt: skip


class ForeignError(UserError):
    """A file that neither PyAV nor ffmpeg reads, or the lack of both; the message has the reason, not the file."""


class Source(Protocol):
    """What `ds2.audio.read` asks of an opened file; a subset of soundfile.SoundFile."""

    samplerate: int
    channels: int
    frames: int
    format: str
    subtype: str

    def read(self, frames: int, *, dtype: str, always_2d: bool) -> NDArray[np.float32]:
        """Return the next frames (N, channels), fewer at the end."""


def looks_foreign(path: Path) -> bool:
    """Whether a file is, by its name or its first bytes, one for this module."""
    if path.suffix.lower() in FOREIGN_SUFFIXES:
        return True
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    return any(head[at:].startswith(mark) for at, mark in _SIGNATURES)


@contextmanager
def opened_foreign(path: Path) -> Iterator[Source]:
    """Open the first sound of a file, in bounded memory: by PyAV where it is installed, else by ffmpeg.

    Raises:
        ForeignError: neither is there, the file is not for them, is damaged, or holds no sound.
    """
    package = _pyav()
    if package is not None:
        with _DecodedStream(package, path) as stream:
            yield stream
    elif shutil.which("ffmpeg"):
        with tempfile.TemporaryDirectory(prefix="ds2-ffmpeg-") as folder:
            copy = Path(folder) / "copy.flac"
            _convert(path, copy)
            with soundfile.SoundFile(copy) as file:
                yield file
    else:
        raise ForeignError(f"libsndfile does not read this format: {_WAY_OUT}")


class _DecodedStream:
    """The first audio stream of a file, decoded from its start by PyAV.

    It does not seek: containers keep times in units of their own, often milliseconds, and a segment is to be exactly
    that part of the whole.
    """

    subtype = "PyAV"

    def __init__(self, package: Any, path: Path) -> None:
        status = path.stat()
        facts = _facts(package, str(path), status.st_size, status.st_mtime_ns)
        self.samplerate, self.channels, self.frames, self.format = facts
        self._blocks = _decoded(package, str(path))
        self._rest = np.empty((0, self.channels), np.float32)

    def __enter__(self) -> _DecodedStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._blocks.close()

    def read(self, frames: int, *, dtype: str = "float32", always_2d: bool = True) -> NDArray[np.float32]:
        """Return the next frames (N, channels) float32, fewer at the end."""
        parts, held = [self._rest], len(self._rest)
        while held < frames and (block := next(self._blocks, None)) is not None:
            parts.append(block[1])
            held += len(block[1])
        joined = np.concatenate(parts)
        self._rest = joined[frames:]
        return joined[:frames]


@lru_cache(maxsize=4096)
def _facts(package: Any, path: str, size: int, changed_ns: int) -> tuple[int, int, int, str]:
    """Rate, channels, frames and format, by decoding once: headers of these formats round, or say nothing.

    Size and time of change are of the key: a file that is written anew is read anew.
    """
    rate_hz, channels, frames, name = 0, 0, 0, ""
    for facts, block in _decoded(package, path):
        rate_hz, channels, name = facts
        frames += len(block)
    if not frames:
        raise ForeignError("it holds no samples")
    with package.open(path, metadata_errors="ignore") as container:
        stated_s = _stated_s(container)
    if frames / rate_hz < stated_s - _SHORT_S:
        raise ForeignError(
            f"truncated: its header says {stated_s:.3f} s, decoding ends at {frames / rate_hz:.3f} s. Copy it again; "
            "if what is there will do, write that anew, e.g. as FLAC"
        )
    return rate_hz, channels, frames, name


def _stated_s(container: Any) -> float:
    """The length that a header promises for the sound, seconds; 0 where it is that of the video, a guess or missing."""
    stream = container.streams.audio[0]
    if stream.duration and stream.time_base and container.format.name.startswith("mov"):
        return float(stream.duration * stream.time_base)
    alone = len(container.streams) == 1 and container.format.name.split(",")[0] in ("matroska", "asf")
    return container.duration / 1e6 if alone and container.duration else 0.0


def _decoded(package: Any, path: str) -> Generator[Any, None, None]:
    """Yield ((rate, channels, format), block (N, channels) float32) of the first audio stream, at its first rate."""
    try:
        with package.open(path, metadata_errors="ignore") as container:
            if not container.streams.audio:
                raise ForeignError("it holds no sound")
            stream = container.streams.audio[0]
            name = f"{container.format.name.split(',')[0].upper()}/{stream.codec_context.name}"
            resampler = None
            for frame in container.decode(stream):
                if resampler is None:
                    layout, rate_hz, channels = frame.layout.name, frame.sample_rate, len(frame.layout.channels)
                    resampler = package.AudioResampler(format="flt", layout=layout, rate=rate_hz)
                for even in resampler.resample(frame):
                    yield (rate_hz, channels, name), even.to_ndarray().reshape(-1, channels)
            for even in resampler.resample(None) if resampler is not None else ():
                yield (rate_hz, channels, name), even.to_ndarray().reshape(-1, channels)
    except package.FFmpegError as error:
        raise ForeignError(f"not readable as audio: {error.strerror or error}") from error


def _convert(path: Path, copy: Path) -> None:
    """Write the first audio stream of a file as 16-bit FLAC by ffmpeg."""
    command = ["ffmpeg", "-nostdin", "-v", "error", "-i", os.path.abspath(path), "-map", "0:a:0", "-vn"]
    done = subprocess.run(
        [*command, "-c:a", "flac", "-sample_fmt", "s16", str(copy)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False,
    )  # fmt: skip
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"]
        raise ForeignError(f"ffmpeg cannot read it: {lines[-1]}")


def _pyav() -> Any:
    try:
        import av
    except ImportError:
        return None
    return av
