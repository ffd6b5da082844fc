"""Audio files to mono float32 waveforms at one rate, in bounded memory, by libsndfile or else by FFmpeg."""

import logging
import math
import os
import stat
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

from ds2.audio.container import describe_damage, describe_second_flac
from ds2.audio.ffmpeg import FFMPEG_SUFFIXES, UNKNOWN_FRAMES, FFmpegAudio, FFmpegError, container_of
from ds2.audio.shard import ShardError, member_of, open_member
from ds2.system import UserError
from ds2.system.plain import short_repr
from ds2.system.terminal import warn_once

log = logging.getLogger(__name__)
MAX_READ_S = 3 * 3600.0  # most that read_audio returns: 0.7 GB at 16 kHz
END_TOLERANCE_S = 0.1  # a segment may end this much after its file: manifests round, encoders pad
RAW_SUFFIXES = (".raw", ".pcm")
AUDIO_SUFFIXES = (
    ".wav", ".flac", ".sph", ".opus", ".ogg", ".oga", ".mp3", ".aiff", ".aif", ".aifc", ".au", ".caf", ".w64", ".rf64",
    *RAW_SUFFIXES, *FFMPEG_SUFFIXES,
)  # fmt: skip
"""Suffixes of audio files; the first one is used where a recording exists in several formats."""
_COSTLY_SUFFIXES = (".mp3", ".ogg", ".oga", ".opus", *FFMPEG_SUFFIXES)  # opening these may decode them
_UNCOMPRESSED = {"WAV", "WAVEX", "RF64", "W64", "FLAC", "NIST", "AIFF", "AU", "RAW"}
_LOSSLESS = {"PCM_U8", "PCM_S8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"}
_BLOCK_FRAMES = 1 << 18
_PAGE_FRAMES = 255 * 4096  # most of a page of Ogg Vorbis: its packets times half the longest block
_FLAC_FRAMES = 1 << 12  # a read that meets damage loses its block
RATES_HZ = (1000, 768_000)
MAX_CHANNELS = 64
_CANCELLED_POWER = 0.1  # of the average of channels, relative to theirs; two channels of noise have 0.5
QUIET_PEAK = 10 ** (-50 / 20)  # a file whose loudest sample is below -50 dB of full scale
_MAX_COUNTED_S = 48 * 3600.0  # a file of a few megabytes may hold days of silence
MAX_PEAK = 4.0  # lossy decoders overshoot full scale slightly; larger floats are on another scale

_COPY_AGAIN = "Copy it again, or convert what is there, e.g. to FLAC"
_WAY_OUT = "give wav, flac, mp3, ogg, opus or another of the formats that `ds2 transcribe` reads, or convert it to FLAC"
_NO_SAMPLES = np.zeros(0, np.float32)
_FRAME_COUNTS: dict[tuple[Path, int, int, int], int] = {}  # of FFmpeg's files, by path and state


class AudioError(UserError):
    """Audio that cannot be used; the message names the file and the reason."""

    def bare(self) -> "AudioError":
        """Return it without its traceback, whose frames hold decoder and samples: for lists of many errors."""
        return type(self)(*self.args)


class EmptyAudioError(AudioError):
    """A file without any samples."""


def check_rate(rate_hz: int) -> None:
    """Raise AudioError unless a sample rate is a whole number in the range: the resampler drops fractions silently."""
    low, high = RATES_HZ
    try:
        fits = low <= rate_hz <= high and float(rate_hz).is_integer()
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise AudioError(f"samples at {short_repr(rate_hz)} Hz: allowed are whole numbers from {low} to {high} Hz")


def to_16_bits(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return samples (N,) clipped to [-1, 1) and rounded to 16 bits, which is what the audio cache and shards hold.

    All audio is rounded so: a recording has the same bits in training, in evaluation, as a file and as a stream.
    """
    rounded = samples * np.float32(1 << 15)
    np.clip(np.rint(rounded, out=rounded), -(1 << 15), (1 << 15) - 1, out=rounded)
    rounded *= np.float32(1 / (1 << 15))
    return rounded


@dataclass(frozen=True)
class AudioInfo:
    """Facts of a file's header."""

    sample_rate_hz: int
    channels: int
    frames: int
    duration_s: float


def audio_info(path: str | Path, sample_rate_hz: int = 16000) -> AudioInfo:
    """Return the facts of an audio file's header. Formats that only FFmpeg reads are decoded once for their length.

    Args:
        path: the file; see `read_audio` for the formats.
        sample_rate_hz: the rate of headerless `.raw` and `.pcm` files, ignored for others.
    Raises:
        AudioError: the file is missing, empty, truncated (where the header shows it), not audio, or had to be decoded
            for its length and is longer than 48 hours.
    """
    path = Path(path)
    with _opened(path, sample_rate_hz) as file:
        frames = _count_frames(path, file) if isinstance(file, FFmpegAudio) else file.frames
        if frames >= UNKNOWN_FRAMES:
            raise AudioError(f"{path}: its header does not state its length; convert it, e.g. to FLAC")
        return AudioInfo(file.samplerate, file.channels, frames, frames / file.samplerate)


def read_audio(
    path: str | Path,
    sample_rate_hz: int = 16000,
    offset_s: float = 0.0,
    duration_s: float | None = None,
    channel: int = 0,
) -> NDArray[np.float32]:
    """Return audio as a mono waveform (N,) float32 in [-1, 1), rounded to 16 bits, at `sample_rate_hz`.

    libsndfile reads wav, flac, mp3, ogg, opus, sph and others, recognised by content. PyAV or ffmpeg reads m4a, webm,
    aac, wma and the sound of videos. `.raw` and `.pcm` files are headerless 16-bit little-endian mono at
    `sample_rate_hz`. Other rates are resampled, channels are averaged (logged once), samples over full scale are
    clipped. A file shorter than its header states, or an Ogg stream without its last page, is truncated; headers
    written to a pipe state no length (the largest sizes). Ogg, MP3 and FLAC files of several recordings are refused.

    Args:
        path: the file, or a member of a tar file (`SHARD.tar/KEY.flac`).
        sample_rate_hz: of the waveform returned.
        offset_s: where to start.
        duration_s: length to read; None reads to the end.
        channel: which channel, from 1; 0 averages all.
    Raises:
        AudioError: the file is missing, empty, truncated or not audio, has no such channel, ends more than 0.1 s before
            the segment does, is shorter than a sample of the result, holds NaN, infinity or floats far over full scale,
            or more than three hours are requested (see `audio_blocks`).
    """
    blocks, total_s = [], 0.0
    for block in audio_blocks(path, sample_rate_hz, offset_s, duration_s, channel=channel):
        blocks.append(block)
        total_s += len(block) / sample_rate_hz
        if total_s > MAX_READ_S:
            raise AudioError(f"{path}: longer than {MAX_READ_S:g} s; read segments of it (offset, duration)")
    if not blocks:
        raise AudioError(f"{path}: is shorter than a sample at {sample_rate_hz} Hz: leave it out")
    return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)


def audio_blocks(
    path: str | Path,
    sample_rate_hz: int = 16000,
    offset_s: float = 0.0,
    duration_s: float | None = None,
    *,
    channel: int = 0,
    lenient: bool = False,
) -> Generator[NDArray[np.float32]]:
    """Yield the waveform of `read_audio` in blocks of varying length, in memory that does not grow with the file.

    Arguments and errors are those of `read_audio`, without the limit of length. Errors at the end of the file, such as
    truncation, are raised after the blocks before it. Nothing is decoded ahead: closing the generator ends the work.

    Args:
        lenient: take what can be decoded of a truncated or damaged file, with a warning instead of an error, and warn
            of a file that is too quiet or has a lower rate.
    """
    path = Path(path)
    if offset_s < 0 or (duration_s is not None and not duration_s > 0):
        raise AudioError(f"{path}: offset {offset_s} s must be at least 0 and duration {duration_s} s above 0")
    peak = -1.0  # of no samples
    with _opened(path, sample_rate_hz, lenient=lenient) as file:
        resampler = soxr.ResampleStream(file.samplerate, sample_rate_hz, 1, dtype="float32")
        blocks = _mono_blocks(file, path, offset_s, duration_s, channel, lenient=lenient)
        if lenient and file.samplerate < sample_rate_hz:
            warn_once(
                log,
                f"audio at {file.samplerate} Hz has no sound above {file.samplerate / 2:g} Hz: a model for "
                f"{sample_rate_hz} Hz makes more errors in it (logged once)",
            )
        try:
            for block in chain(blocks, [_NO_SAMPLES]):
                last = block is _NO_SAMPLES
                resampled = block if file.samplerate == sample_rate_hz else resampler.resample_chunk(block, last=last)
                if len(resampled):
                    peak = max(peak, float(np.abs(resampled).max())) if lenient else peak
                    yield to_16_bits(resampled)
        finally:
            del resampler  # an error's traceback would keep it, and soxr reports each that is left when Python ends
    if lenient and 0.0 <= peak < QUIET_PEAK:
        loudest = f"{20 * math.log10(peak):.0f} dB of full scale" if peak else "zero"
        log.warning("%s: its loudest sample is %s: too quiet to be recognised well, amplify it", path, loudest)


def reads_cheaply(
    path: str | Path, sample_rate_hz: int, offset_s: float = 0.0, duration_s: float | None = None, *, channel: int = 0
) -> bool:
    """Return whether reading a segment is about as fast as reading a cache: a lossless format at this sample rate.

    Raises:
        AudioError: as `read_audio`, where the header shows it.
    """
    path = Path(path)
    if path.suffix.lower() in _COSTLY_SUFFIXES:
        return False
    with _opened(path, sample_rate_hz) as file:
        is_cheap = file.samplerate == sample_rate_hz and file.format in _UNCOMPRESSED and file.subtype in _LOSSLESS
        _check_request(file, path, offset_s, duration_s, channel)
        return is_cheap


class _ForwardFile(soundfile.SoundFile):  # type: ignore[misc]  # soundfile has no types
    """A file that is read in order. SoundFile seeks after each read, which in MP3 loses or repeats samples."""

    def seekable(self) -> bool:
        return False


_AudioFile = _ForwardFile | FFmpegAudio  # the latter has what is used here of the former


@contextmanager
def _opened(path: Path, raw_rate_hz: int, *, lenient: bool = False) -> Iterator[_AudioFile]:
    """Open a file for reading; errors within the block are raised as AudioError with the file's name.

    A file that is damaged, as far as its header shows, is an error, or with `lenient` a warning.
    """
    try:
        member = member_of(path)
        descriptor = open_member(*member) if member else os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except ShardError as error:
        raise AudioError(str(error)) from error
    except (OSError, ValueError) as error:
        raise AudioError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a device or pipe"
            raise AudioError(f"{path}: is {kind}, not an audio file")
        if status.st_size == 0:
            raise EmptyAudioError(f"{path}: the file is empty (0 bytes)")
        with _decoder(path, descriptor, _raw_format(path, status.st_size, raw_rate_hz), lenient) as file:
            _check_header(file, path)
            yield file
    except FFmpegError as error:
        raise AudioError(f"{path}: {error}") from error
    except soundfile.LibsndfileError as error:
        reason = str(error.error_string or error).rstrip(".")
        raise AudioError(f"{path}: not readable as audio: {reason}; {_WAY_OUT}") from error
    except (soundfile.SoundFileError, OSError, RuntimeError, ValueError, TypeError, MemoryError) as error:
        raise AudioError(f"{path}: not readable as audio: {error}") from error
    finally:
        os.close(descriptor)


def _decoder(path: Path, descriptor: int, raw_format: dict[str, object], lenient: bool) -> _AudioFile:
    file = None
    try:
        file = _ForwardFile(descriptor, closefd=False, **raw_format)
    except soundfile.LibsndfileError:
        if not container_of(descriptor) and path.suffix.lower() not in FFMPEG_SUFFIXES:
            raise
    container = container_of(descriptor) if file is None else file.format
    damage = describe_damage(descriptor, container)
    if damage is None:
        warn_once(
            log, f"{container} files are not checked for truncation: convert such audio, e.g. to FLAC (logged once)"
        )
    elif damage and lenient:
        _log_damage(path, damage)
    elif damage:
        raise AudioError(f"{path}: {damage}. {_COPY_AGAIN}")
    return FFmpegAudio(descriptor) if file is None else file


def _count_frames(path: Path, file: FFmpegAudio) -> int:
    """Decode a file to its end, in bounded memory, and return its frames; cached until the file changes."""
    status = (member[0] if (member := member_of(path)) else path).stat()
    key = (path, status.st_ino, status.st_size, status.st_mtime_ns)
    if key not in _FRAME_COUNTS:
        frames, max_frames = 0, int(_MAX_COUNTED_S * file.samplerate)
        while frames <= max_frames and len(block := file.read(_BLOCK_FRAMES)):
            frames += len(block)
        if frames > max_frames:
            raise AudioError(f"{path}: over {_MAX_COUNTED_S / 3600:g} hours of sound; cut it into shorter files")
        _FRAME_COUNTS[key] = frames
    return _FRAME_COUNTS[key]


def _raw_format(path: Path, size_bytes: int, rate_hz: int) -> dict[str, object]:
    if path.suffix.lower() not in RAW_SUFFIXES:
        return {}
    if size_bytes % 2:
        raise AudioError(f"{path}: {size_bytes} bytes cannot be headerless 16-bit samples")
    return {"samplerate": rate_hz, "channels": 1, "format": "RAW", "subtype": "PCM_16", "endian": "LITTLE"}


def _check_header(file: _AudioFile, path: Path) -> None:
    low, high = RATES_HZ
    if not low <= file.samplerate <= high or not 1 <= file.channels <= MAX_CHANNELS:
        raise AudioError(
            f"{path}: its header says {file.channels} channels at {file.samplerate} Hz; "
            f"allowed are 1 to {MAX_CHANNELS} channels at {low} to {high} Hz"
        )
    if file.frames <= 0:
        raise EmptyAudioError(f"{path}: holds no samples, or its header was never completed")


def _mono_blocks(
    file: _AudioFile, path: Path, offset_s: float, duration_s: float | None, channel: int, *, lenient: bool
) -> Iterator[NDArray[np.float32]]:
    _check_request(file, path, offset_s, duration_s, channel)
    rate_hz = file.samplerate
    first = round(offset_s * rate_hz)
    total = file.frames - first if duration_s is None else max(1, round(duration_s * rate_hz))
    _skip(file, first)
    if file.channels > 1 and not channel:
        warn_once(log, f"audio with {file.channels} channels is averaged to one channel (logged once)")
    done, max_frames = 0, _FLAC_FRAMES if lenient and file.format == "FLAC" else _BLOCK_FRAMES
    while done < total:
        try:
            block = file.read(min(max_frames, total - done), dtype="float32", always_2d=True)
        except (FFmpegError, soundfile.LibsndfileError) as error:
            if not (lenient and done):
                raise
            _log_damage(path, f"damaged after {(first + done) / rate_hz:.3f} s: {error}")
            return
        if not len(block):
            break
        done += len(block)
        mono = _one_channel(block, channel)
        peak = max(-float(block.min()), float(block.max()))
        if not peak <= MAX_PEAK:  # true for NaN too
            raise AudioError(
                f"{path}: holds samples of {peak:g}; floats must be finite and within -1..1"
                if np.isfinite(peak)
                else f"{path}: holds NaN or infinite samples"
            )
        if file.channels > 1 and not channel and done == len(block):
            _check_cancellation(block, mono, path)
        yield mono
    if not done:
        raise AudioError(f"{path}: no samples could be decoded at {offset_s:g} s")
    missing_s, damage = (total - done) / rate_hz, ""
    if missing_s > END_TOLERANCE_S and (file.frames < UNKNOWN_FRAMES or duration_s is not None):
        damage = (
            f"truncated: decoding ends at {(first + done) / rate_hz:.3f} s, {missing_s:.3f} s before the end "
            "that its header or manifest states"
        )
    elif (
        isinstance(file, soundfile.SoundFile)
        and file.format == "FLAC"
        and file.frames - first - done <= END_TOLERANCE_S * rate_hz
    ):
        damage = describe_second_flac(file.name)  # its descriptor
    if damage and not lenient:
        raise AudioError(f"{path}: {damage}. {_COPY_AGAIN}")
    if damage:
        _log_damage(path, damage)


def _one_channel(block: NDArray[np.float32], channel: int) -> NDArray[np.float32]:
    """Return one channel of a block (N, channels), from 1, or the average of all for channel 0."""
    mono = block[:, max(channel - 1, 0)].copy()
    if not channel:
        for other in range(1, block.shape[1]):  # forty times as fast as a mean over the short axis
            mono += block[:, other]
        mono /= np.float32(block.shape[1])
    return mono


def _check_request(file: _AudioFile, path: Path, offset_s: float, duration_s: float | None, channel: int) -> None:
    if not 0 <= channel <= file.channels:
        raise AudioError(f"{path}: has no channel {channel}, its channels are 1 to {file.channels}; 0 averages them")
    length_s = file.frames / file.samplerate  # UNKNOWN_FRAMES are longer than any segment
    if offset_s >= length_s or (duration_s is not None and offset_s + duration_s > length_s + END_TOLERANCE_S):
        segment = f"from {offset_s:g} s" + (f" to {offset_s + duration_s:g} s" if duration_s is not None else " on")
        raise AudioError(f"{path}: the segment {segment} goes past the end of the file, which is {length_s:.3f} s long")


def _skip(file: _AudioFile, frames: int) -> None:
    if isinstance(file, soundfile.SoundFile) and file.format != "MP3" and soundfile.SoundFile.seekable(file):
        # In the last page of Vorbis a position that was sought is up to 251 samples late.
        sought = min(frames, max(0, file.frames - _PAGE_FRAMES)) if file.subtype == "VORBIS" else frames
        file.seek(sought)
        frames -= sought
    while frames > 0:  # seeking is inexact in MP3 and impossible in GSM and others: decode and discard
        skipped = len(file.read(min(_BLOCK_FRAMES, frames), dtype="float32", always_2d=True))
        if not skipped:
            return
        frames -= skipped


def _check_cancellation(block: NDArray[np.float32], mono: NDArray[np.float32], path: Path) -> None:
    """Warn where the average of the channels of a block (N, channels) has lost most of their power."""
    powers = np.square(block).mean(0)
    if float(np.square(mono).mean()) < _CANCELLED_POWER * float(powers.mean()):
        loudest = 1 + int(powers.argmax())
        warn_once(
            log,
            f"{path}: the average of its {len(powers)} channels has less than a tenth of their power (opposite phases, "
            "or a voice in one channel only): choose the channel with the voice by "
            f"`ds2 transcribe --channel {loudest}` or data.channel={loudest}, which is the loudest",
        )


def _log_damage(path: Path, damage: str) -> None:
    log.warning("%s: %s; what can be decoded is used", path, damage)
