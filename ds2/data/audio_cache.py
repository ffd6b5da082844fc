"""Cache of decoded audio on disk, by utterance, shared by all manifests. Damage is detected and repaired.

`open_audio` returns the audio of utterances and decodes what the cache lacks on all cores, except audio that is cheap
to read.

Layout of a file, little-endian: a header; the samples of all utterances, int16; padding to 8 bytes; an index of (first
sample, samples, CRC-32 of them, two halves of the key) for each utterance, int64.
"""

import hashlib
import json
import logging
import os
import shutil
import struct
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ds2.audio.read import AudioError, read_audio, reads_cheaply
from ds2.audio.shard import check_members, member_of
from ds2.config.schema import DataConfig
from ds2.data.manifest import Utterance, amount, runs
from ds2.system import UserError
from ds2.system.files import atomic_file, remove_stale
from ds2.system.machine import thread_pool, usable_cores
from ds2.system.plain import counted, first_of
from ds2.system.terminal import ProgressBar

log = logging.getLogger(__name__)
VERSION = 3
KEY_BYTES = 16
_MAGIC = b"ds2audio"
_HEADER = struct.Struct("<8sIIQQ")  # magic, version, CRC-32 of the index, utterances, samples
_CHECKSUM = struct.Struct("<II")  # CRC-32 of the header, zero
_SAMPLES_AT = _HEADER.size + _CHECKSUM.size
_INDEX_COLUMNS = 3 + KEY_BYTES // 8
SUFFIX = ".audio"
SPARE_BYTES = 256 << 20  # left free on the disk for checkpoints and logs
_NOT_CACHED = -1
_FILE_SAMPLES = 1 << 29  # in one file, 1 GiB: a build that is killed loses no more
_MAX_ERRORS_SHOWN = 10
_WAY_OUT = "\nRepair these files, or take them out of the manifest; `ds2 data check` names all that cannot be used"


class CacheError(UserError):
    """A file of the audio cache is damaged; the message says how."""


def cache_bytes(samples: int, utterances: int) -> int:
    """Return the size of a cache file in bytes."""
    return _index_at(samples) + 8 * _INDEX_COLUMNS * utterances


def _index_at(samples: int) -> int:
    return _SAMPLES_AT + -(-2 * samples // 8) * 8


class CacheWriter:
    """Writes a new cache file from any number of threads, utterances in any order.

    Utterances added after the end of the `with` block are dropped, so the block need not wait for slow threads.
    """

    def __init__(self, path: Path) -> None:
        self._file, self._closed = path.open("wb"), False
        self._file.seek(_SAMPLES_AT)
        self._samples, self._rows = 0, list[tuple[int, ...]]()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Write index and header, unless an error ended the block, and close the file."""
        with self._lock:
            self._closed = True
            with self._file:
                if kind is None:
                    self._finish()

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, key: bytes, pcm: NDArray[np.int16]) -> None:
        """Write the samples (N,) of one utterance; raises OSError where the disk is full."""
        content = pcm.astype("<i2", copy=False).tobytes()
        row = len(pcm), zlib.crc32(content), *np.frombuffer(key, "<i8").tolist()
        with self._lock:
            if not self._closed:
                self._file.write(content)
                self._rows.append((self._samples, *row))
                self._samples += len(pcm)

    def _finish(self) -> None:
        index = np.array(self._rows, "<i8").reshape(-1, _INDEX_COLUMNS).tobytes()
        header = _HEADER.pack(_MAGIC, VERSION, zlib.crc32(index), len(self._rows), self._samples)
        self._file.seek(_index_at(self._samples))
        self._file.write(index)
        self._file.seek(0)
        self._file.write(header + _CHECKSUM.pack(zlib.crc32(header), 0))


class CacheFile:
    """Reads a file that `CacheWriter` wrote; threads and forked processes may share an object.

    Samples are read, not memory-mapped: if the disk fails or the file is truncated, a read raises, a map would crash.

    Raises:
        CacheError: the file is damaged, or of another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb", buffering=0)
            weakref.finalize(self, self._file.close)
            # (U, 5) int64: first sample; samples, 0 of what is cheap to read; CRC-32 of them; both halves of the key.
            self.index = self._read_index()
        except OSError as error:
            raise CacheError(error.strerror or str(error)) from error

    def _read_index(self) -> NDArray[np.int64]:
        start = self._read(_SAMPLES_AT, 0)
        header = start[: _HEADER.size]
        magic, version, index_sum, listed, samples = _HEADER.unpack(header)
        if magic != _MAGIC or _CHECKSUM.unpack(start[_HEADER.size :]) != (zlib.crc32(header), 0):
            raise CacheError("its header is damaged")
        if version != VERSION:
            raise CacheError("it is of another version of ds2")
        size = os.fstat(self._file.fileno()).st_size
        if size != cache_bytes(samples, listed):
            raise CacheError(f"it has {size} bytes, its header states {cache_bytes(samples, listed)}")
        content = self._read(size - _index_at(samples), _index_at(samples))
        index = np.frombuffer(content, "<i8").reshape(-1, _INDEX_COLUMNS)
        first, count = index[:, 0], index[:, 1]
        inside = (first >= 0) & (first <= samples) & (count >= 0) & (count <= samples - first)
        if zlib.crc32(content) != index_sum or not inside.all():
            raise CacheError("its index is damaged")
        return index

    def samples(self, row: int) -> NDArray[np.int16]:
        """Return the samples (N,) of an utterance; raises CacheError where they are damaged."""
        first, count, checksum = self.index[row, :3].tolist()
        try:
            content = self._read(2 * count, _SAMPLES_AT + 2 * first)
        except OSError as error:
            raise CacheError(error.strerror or str(error)) from error
        if zlib.crc32(content) != checksum:
            raise CacheError("their checksum is wrong")
        return np.frombuffer(content, "<i2")

    def discard(self) -> None:
        """Remove the file unless its path holds a new one by now; processes that have it open can still read it."""
        with suppress(OSError):
            if os.path.samestat(os.fstat(self._file.fileno()), self.path.stat()):
                self.path.unlink()

    def _read(self, size: int, offset: int) -> bytes:
        content = os.pread(self._file.fileno(), size, offset)
        if len(content) < size:
            raise CacheError(f"it ends at byte {offset + len(content)}, {size - len(content)} bytes too early")
        return content


class AudioStore(Sequence[NDArray[np.float32]]):
    """Waveforms (N,) float32 of utterances by position: from cache files, or decoded at each access.

    Both give the same bits, because all decoded audio has 16 bits: losing the cache never changes a run.

    Args:
        files: cache files that hold some of them, by number.
        locations: (U, 2) number of the file and row in it of each utterance; file -1 decodes. None decodes all.
        channel: of the files, from 1; 0 averages all.
    """

    def __init__(
        self,
        utterances: Sequence[Utterance],
        sample_rate_hz: int,
        files: Mapping[int, CacheFile] | None = None,
        locations: NDArray[np.int64] | None = None,
        *,
        channel: int = 0,
    ) -> None:
        self.utterances = utterances
        self.sample_rate_hz = sample_rate_hz
        self.channel = channel
        self.files = files or {}
        self._locations = np.full((len(utterances), 2), _NOT_CACHED) if locations is None else locations

    def __len__(self) -> int:
        return len(self.utterances)

    @property
    def cached(self) -> int:
        """Number of utterances that are read from the cache."""
        return int((self._locations[:, 0] != _NOT_CACHED).sum())

    def __getitem__(self, position: int) -> NDArray[np.float32]:  # type: ignore[override]  # no slices
        """Return the waveform of one utterance; raises AudioError where it is not cached and cannot be decoded."""
        file, row = self._locations[position].tolist()
        pcm = None if file == _NOT_CACHED else self._cached(self.files[file], row, position)
        if pcm is None:
            utterance = self.utterances[position]
            try:
                pcm = decode(utterance, self.sample_rate_hz, self.channel)
            except AudioError as error:
                raise type(error)(f"{error} ({utterance.place}){_WAY_OUT}") from error
        waveform = pcm.astype(np.float32)
        waveform *= np.float32(1 / 32768)  # in place: a multiplication of mixed types takes ten times as long
        return waveform

    def _cached(self, file: CacheFile, row: int, position: int) -> NDArray[np.int16] | None:
        """Return the cached samples; None, with a warning, where they are damaged."""
        try:
            return file.samples(row)
        except CacheError as error:
            log.warning(
                "audio cache %s is damaged: samples of %s: %s. They are decoded again. The file is removed; the next "
                "start writes a new one. Check the disk", file.path, self.utterances[position].name, error,
            )  # fmt: skip
            file.discard()
            return None


def open_audio(utterances: Sequence[Utterance], data: DataConfig) -> AudioStore:
    """Return the audio of utterances; with `data.cache`, decode what the cache in `data.work_dir` lacks.

    Keys depend on file, segment and rate alone, so all manifests share the cache. Where space is short
    (`data.cache_gb`, the disk), the least recently used files of others are removed; what still does not fit is decoded
    at every access, with a warning. The same holds where the folder cannot be written. Several processes may call this
    at once: files are published by rename. Let one rank call it before the others to decode only once.

    Members of shards are never cached: they are cheap to read.

    Raises:
        AudioError: utterances cannot be read, or shards are damaged; names them.
    """
    if problems := check_members(u.audio_filepath for u in utterances):
        raise AudioError("\n".join(problems))
    if data.cache == "none" or not utterances:
        return AudioStore(utterances, data.sample_rate_hz, channel=data.channel)
    folder, keys = Path(data.work_dir) / "audio_cache", content_keys(utterances, data.sample_rate_hz, data.channel)
    remove_stale(folder)  # also where nothing is missing: a build may be killed between its rename and its clean-up
    files = _open_files(folder)
    known = _locate(files, keys, cheap_too=data.cache == "auto")[:, 0] != _NOT_CACHED
    listed = zip(keys, utterances, known, strict=True)
    missing = {key: u for key, u, is_known in listed if not (is_known or member_of(u.audio_filepath))}
    if missing:
        try:
            _extend(folder, files, keys, missing, data)
        except OSError as error:
            log.warning(
                "audio cache %s not written (%s): every epoch decodes its audio again. Free the disk, set "
                "data.work_dir to a larger one, or silence this with data.cache=none", folder, error,
            )  # fmt: skip
        files = _open_files(folder)
    locations = _locate(files, keys)
    used = set(locations[:, 0].tolist()) - {_NOT_CACHED}
    for file in used:
        with suppress(OSError):  # the cache may be another user's
            os.utime(files[file].path)
    used_files = {file: files[file] for file in used}
    return AudioStore(utterances, data.sample_rate_hz, used_files, locations, channel=data.channel)


def content_keys(utterances: Sequence[Utterance], sample_rate_hz: int, channel: int) -> list[bytes]:
    """Return a key for each utterance: a hash of its file's path, size, modification time and channel, segment, rate.

    Raises:
        AudioError: a file does not exist.
    """
    stats: dict[Path, tuple[int, int]] = {}
    keys = []
    for u in utterances:
        member = member_of(u.audio_filepath)
        file = member[0] if member else u.audio_filepath
        if file not in stats:
            try:
                stat = file.stat()
            except OSError as error:
                raise AudioError(f"{u.audio_filepath}: {error.strerror} ({u.place})") from error
            stats[file] = (stat.st_size, stat.st_mtime_ns)
        facts = [sample_rate_hz, str(u.audio_filepath.absolute()), *stats[file], u.offset_s, u.duration_s]
        facts += [channel] if channel else []
        keys.append(hashlib.sha256(json.dumps(facts).encode()).digest()[:KEY_BYTES])
    return keys


def _open_files(folder: Path) -> list[CacheFile]:
    files = []
    for path in sorted(folder.glob("*" + SUFFIX)) if folder.is_dir() else []:
        try:
            files.append(CacheFile(path))
        except CacheError as error:
            log.warning("audio cache %s is damaged and will be written again: %s. Check the disk", path, error)
            with suppress(OSError):
                path.unlink()
    return files


def _locate(files: Sequence[CacheFile], keys: Sequence[bytes], *, cheap_too: bool = False) -> NDArray[np.int64]:
    """Return (U, 2): file and row of each key, -1 where no file has it."""
    requested = np.frombuffer(b"".join(keys), "<i8").reshape(-1, 2)
    locations = np.full((len(keys), 2), _NOT_CACHED)
    if not files:
        return locations
    index, sizes = np.concatenate([file.index for file in files]), [len(file.index) for file in files]
    rows = np.concatenate([np.stack([np.full(size, number), np.arange(size)], 1) for number, size in enumerate(sizes)])
    chosen = slice(None) if cheap_too else index[:, 1] > 0
    cached, rows = index[chosen, 3:], rows[chosen]
    order = np.argsort(cached[:, 0], kind="stable")
    at = np.searchsorted(cached[order, 0], requested[:, 0])
    inside = np.flatnonzero(at < len(order))
    matches = inside[(cached[order[at[inside]]] == requested[inside]).all(axis=1)]
    locations[matches] = rows[order[at[matches]]]
    return locations


def _extend(
    folder: Path, files: Sequence[CacheFile], keys: Sequence[bytes], missing: dict[bytes, Utterance], data: DataConfig
) -> None:
    """Decode missing utterances that are not cheap to read into new files, as far as space permits.

    Raises:
        AudioError: some cannot be read; the others are cached.
        OSError: the folder cannot be written.
    """
    is_cheap = _find_cheap(missing, data) if data.cache == "auto" else {}
    cheap = [key for key in missing if is_cheap.get(key)]
    folder.mkdir(parents=True, exist_ok=True)
    if cheap:  # recorded, so that their headers are not read again
        with atomic_file(_path(folder, cheap)) as partial, CacheWriter(partial) as writer:
            for key in cheap:
                writer.add(key, np.zeros(0, np.int16))
    costly = {key: utterance for key, utterance in missing.items() if not is_cheap.get(key)}
    used = {files[file].path for file in set(_locate(files, keys)[:, 0].tolist()) - {_NOT_CACHED}}
    fitting = _free_space(folder, used, costly, data)
    if fitting and (errors := _write_files(folder, fitting, data)):
        raise AudioError(summarise_errors(errors, len(missing)) + _WAY_OUT)


def _free_space(
    folder: Path, used: set[Path], costly: Mapping[bytes, Utterance], data: DataConfig
) -> dict[bytes, Utterance]:
    """Remove unused files as far as necessary; return the utterances, in order, that then fit."""
    needed = {key: cache_bytes(round(u.duration_s * data.sample_rate_hz), 1) for key, u in costly.items()}
    for old in folder.glob("*.pcm"):  # of ds2 0.1.0, a file for each manifest
        old.unlink(missing_ok=True)  # another process may have removed it
    sizes, ages = {}, {}
    for path in folder.glob("*" + SUFFIX):
        with suppress(OSError):  # another process may have removed it
            sizes[path], ages[path] = path.stat().st_size, path.stat().st_mtime
    limit = 1e9 * data.cache_gb if data.cache_gb else float("inf")
    available = min(limit - sum(sizes.values()), shutil.disk_usage(folder).free - SPARE_BYTES)
    for path in sorted(sizes.keys() - used, key=lambda path: ages[path]):
        if sum(needed.values()) <= available:
            break
        with suppress(OSError):
            path.unlink()
            available += sizes[path]
            log.info("audio cache: removed %s, %.1f MB, to make space", path, sizes[path] / 1e6)
    fitting = dict(islice(costly.items(), sum(total <= available for total in accumulate(needed.values()))))
    if len(fitting) < len(costly):
        log.warning(
            f"audio cache {folder}: no space for {len(costly) - len(fitting)} of {len(costly)} utterances: they need "
            f"{sum(needed.values()) / 1e9:.2f} GB, {max(0.0, available) / 1e9:.2f} GB are available "
            f"(data.cache_gb={data.cache_gb:g}; {SPARE_BYTES / 1e9:.2f} GB of the disk stay free): each epoch decodes "
            "them again. Raise data.cache_gb, free the disk, set data.work_dir to a larger one, or silence this with "
            "data.cache=none"
        )
    return fitting


def decode(utterance: Utterance, sample_rate_hz: int, channel: int = 0) -> NDArray[np.int16]:
    """Return the samples (N,) of an utterance; raises AudioError where it cannot be read."""
    waveform = read_audio(utterance.audio_filepath, sample_rate_hz, utterance.offset_s, utterance.duration_s, channel)
    return (waveform * np.float32(32768)).astype(np.int16)


def _find_cheap(utterances: Mapping[bytes, Utterance], data: DataConfig) -> dict[bytes, bool]:
    """Return which utterances need no cache, by the headers of their files; raises AudioError of all unreadable."""

    def check(key: bytes) -> bool:
        u = utterances[key]
        return reads_cheaply(u.audio_filepath, data.sample_rate_hz, u.offset_s, u.duration_s, channel=data.channel)

    with ProgressBar("reading headers", len(utterances), "utterances") as progress:
        results, errors = _on_all_cores(check, list(utterances), progress)
    if errors:
        raise AudioError(summarise_errors(errors, len(utterances)) + _WAY_OUT)
    return results


def _write_files(folder: Path, utterances: Mapping[bytes, Utterance], data: DataConfig) -> list[AudioError]:
    """Decode utterances into cache files of about 1 GiB, each written atomically; return the errors.

    Threads suffice: decoding and resampling release the interpreter lock. An interruption waits two seconds for them.

    Raises:
        OSError: the folder cannot be written or the disk is full.
    """

    def add(key: bytes) -> None:
        writer.add(key, decode(utterances[key], data.sample_rate_hz, data.channel))

    started, errors, keys, listed = time.monotonic(), list[AudioError](), list(utterances), list(utterances.values())
    log.info("decoding %s, into the audio cache %s", amount(listed), folder)
    with ProgressBar("decoding audio", len(keys), "utterances") as progress:
        for first, part in runs(listed, _FILE_SAMPLES / data.sample_rate_hz):
            own = keys[first : first + len(part)]
            with suppress(AudioError), atomic_file(_path(folder, own)) as partial, CacheWriter(partial) as writer:
                errors += _on_all_cores(add, own, progress)[1]
                if not len(writer):
                    raise errors[-1]  # an empty file is not published
    decoded = counted(len(keys) - len(errors), "utterance")
    log.info("audio cache: %s, %.1f s", decoded, time.monotonic() - started)
    return errors


def _path(folder: Path, keys: Iterable[bytes]) -> Path:
    """Return the path of a cache file; processes that write the same utterances write the same path."""
    return folder / (hashlib.sha256(b"".join(keys)).hexdigest()[:24] + SUFFIX)


def _on_all_cores(
    work: Callable[[bytes], Any], keys: list[bytes], progress: ProgressBar
) -> tuple[dict[bytes, Any], list[AudioError]]:
    """Return the results of `work` by key and its AudioErrors; other errors end it, after 2 s for its threads."""
    results, errors = dict[bytes, Any](), list[AudioError]()

    def attempt(key: bytes) -> tuple[bytes, Any]:
        try:
            return key, work(key)
        except AudioError as error:
            return key, error.bare()
        except BaseException as error:  # an exception that ends a thread of the pool is lost
            return key, error

    with thread_pool(usable_cores()) as threads:
        for key, result in progress.over(threads.imap_unordered(attempt, keys)):
            if isinstance(result, AudioError):
                errors.append(result)
            elif isinstance(result, BaseException):
                raise result
            else:
                results[key] = result
    return results, errors


def summarise_errors(errors: Sequence[AudioError], total: int) -> str:
    """Return a message with the first errors of utterances and the number of others."""
    shown = "\n".join(first_of(sorted(map(str, errors)), _MAX_ERRORS_SHOWN))
    return f"{len(errors)} of {total} utterances cannot be read:\n{shown}"
