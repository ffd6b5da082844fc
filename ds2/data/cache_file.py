"""Files of the audio cache: decoded utterances by key, with checksums.

Layout, little-endian: a header; the samples of all utterances, int16; padding to 8 bytes; an index of (first sample,
samples, CRC-32 of them, two halves of the key) for each utterance, int64.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import weakref
import zlib
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from ds2.system.errors import UserError

VERSION = 3  # 1 had neither header nor checksums; 2 had no keys, one file per manifest
KEY_BYTES = 16
_MAGIC = b"ds2audio"
_HEADER = struct.Struct("<8sIIQQ")  # magic, version, CRC-32 of the index, utterances, samples
_CHECKSUM = struct.Struct("<II")  # CRC-32 of the header, zero
_SAMPLES_AT = _HEADER.size + _CHECKSUM.size
_INDEX_COLUMNS = 3 + KEY_BYTES // 8


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
        self._samples, self._rows = 0, list[tuple[int, ...]]()
        self._lock = threading.Lock()

    def __enter__(self) -> CacheWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
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
                _write_at(self._file.fileno(), content, _SAMPLES_AT + 2 * self._samples)
                self._rows.append((self._samples, *row))
                self._samples += len(pcm)

    def _finish(self) -> None:
        index = np.array(self._rows, "<i8").reshape(-1, _INDEX_COLUMNS).tobytes()
        header = _HEADER.pack(_MAGIC, VERSION, zlib.crc32(index), len(self._rows), self._samples)
        _write_at(self._file.fileno(), index, _index_at(self._samples))
        _write_at(self._file.fileno(), header + _CHECKSUM.pack(zlib.crc32(header), 0), 0)


class CacheFile:
    """Reads a cache file; threads and forked processes may share an object.

    Samples are read, not memory-mapped: if the disk fails or the file is truncated, a read raises, a map would crash.

    Args:
        path: of a file that `CacheWriter` wrote.
    Raises:
        CacheError: the file is damaged, or of another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb", buffering=0)
            weakref.finalize(self, self._file.close)
            self._index = self._read_index()
        except OSError as error:
            raise CacheError(error.strerror or str(error)) from error

    @property
    def keys(self) -> NDArray[np.int64]:
        """(U, 2): the two halves of each utterance's key."""
        return self._index[:, 3:]

    @property
    def counts(self) -> NDArray[np.int64]:
        """(U,): number of samples of each utterance; 0 for those that are cheap to read."""
        return self._index[:, 1]

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
        first, count, checksum = self._index[row, :3].tolist()
        try:
            content = self._read(2 * count, _SAMPLES_AT + 2 * first)
        except OSError as error:
            raise CacheError(error.strerror or str(error)) from error
        if zlib.crc32(content) != checksum:
            raise CacheError("their checksum is wrong")
        return np.frombuffer(content, "<i2")

    def discard(self) -> None:
        """Remove the file unless its path holds a new one by now; processes that have it open can still read it."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self._file.fileno()), self.path.stat()):
                self.path.unlink()

    def _read(self, size: int, offset: int) -> bytes:
        parts, count = [], 0
        while count < size and (part := os.pread(self._file.fileno(), size - count, offset + count)):
            parts.append(part)  # one read returns at most 2 GiB
            count += len(part)
        if count < size:
            raise CacheError(f"it ends at byte {offset + count}, {size - count} bytes too early")
        return parts[0] if len(parts) == 1 else b"".join(parts)


def _write_at(descriptor: int, content: bytes, offset: int) -> None:
    view = memoryview(content)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
