"""The file of the audio cache: where each utterance's samples lie, and the checksums that they are what was written.

Layout, little-endian: a header; the samples of all utterances, int16; padding to 8 bytes; an index of (first sample,
samples, CRC-32 of them) for each utterance, int64.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import weakref
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from ds2.system.errors import UserError

VERSION = 2  # 1 had neither header nor checksums
_MAGIC = b"ds2audio"
_HEADER = struct.Struct("<8sIIQQ32s")  # magic, version, CRC-32 of the index, utterances, samples, key
_CHECKSUM = struct.Struct("<II")  # CRC-32 of the header, zero
_SAMPLES_AT = _HEADER.size + _CHECKSUM.size
_INDEX_COLUMNS = 3


class CacheError(UserError):
    """An audio cache that does not hold what was written; the message says what is wrong with it."""


def cache_bytes(samples: int, utterances: int) -> int:
    """Size of a cache file, bytes."""
    return _index_at(samples) + 8 * _INDEX_COLUMNS * utterances


def _index_at(samples: int) -> int:
    return _SAMPLES_AT + -(-2 * samples // 8) * 8


class CacheWriter:
    """Writes a cache file from any number of threads, utterances in any order.

    Args:
        file: a new file, open for writing.
        utterances: how many there are.
        key: 32 bytes that say what the samples were made from.
    """

    def __init__(self, file: BinaryIO, utterances: int, key: bytes) -> None:
        self._descriptor, self._key, self._samples = file.fileno(), key, 0
        self._index = np.zeros((utterances, _INDEX_COLUMNS), "<i8")
        self._lock = threading.Lock()

    def add(self, position: int, pcm: NDArray[np.int16]) -> None:
        """Write the samples (N,) of one utterance; raises OSError where the disk does not take them."""
        with self._lock:
            first, self._samples = self._samples, self._samples + len(pcm)
        content = pcm.astype("<i2", copy=False).tobytes()
        self._index[position] = first, len(pcm), zlib.crc32(content)
        _write_at(self._descriptor, content, _SAMPLES_AT + 2 * first)

    def finish(self) -> None:
        """Write index and header, once all utterances are added."""
        index = self._index.tobytes()
        header = _HEADER.pack(_MAGIC, VERSION, zlib.crc32(index), len(self._index), self._samples, self._key)
        _write_at(self._descriptor, index, _index_at(self._samples))
        _write_at(self._descriptor, header + _CHECKSUM.pack(zlib.crc32(header), 0), 0)


class CacheFile:
    """A cache file to read from; threads and forked processes may share one.

    Samples are read, not mapped: where the disk fails or the file shrinks under a run, a read tells, a map kills.

    Args:
        path: what a `CacheWriter` wrote.
        utterances: how many it must hold.
        key: what it must have been made from.
    Raises:
        CacheError: it is damaged, or another one.
    """

    def __init__(self, path: Path, utterances: int, key: bytes) -> None:
        self.path = path
        try:
            self._file = path.open("rb", buffering=0)
            weakref.finalize(self, self._file.close)
            self._index = self._checked_index(utterances, key)
        except OSError as error:
            raise CacheError(error.strerror or str(error)) from error

    def _checked_index(self, utterances: int, key: bytes) -> NDArray[np.int64]:
        start = self._read(_SAMPLES_AT, 0)
        header = start[: _HEADER.size]
        magic, version, index_sum, listed, samples, made_from = _HEADER.unpack(header)
        if magic != _MAGIC or _CHECKSUM.unpack(start[_HEADER.size :]) != (zlib.crc32(header), 0):
            raise CacheError("its header is not what was written")
        if (version, listed, made_from) != (VERSION, utterances, key):
            raise CacheError("it is of other audio or another version")
        size = os.fstat(self._file.fileno()).st_size
        if size != cache_bytes(samples, listed):
            raise CacheError(f"it has {size} bytes, its header promises {cache_bytes(samples, listed)}")
        content = self._read(size - _index_at(samples), _index_at(samples))
        index = np.frombuffer(content, "<i8").reshape(-1, _INDEX_COLUMNS)
        first, count = index[:, 0], index[:, 1]
        inside = (first >= 0) & (first <= samples) & (count > 0) & (count <= samples - first)
        if zlib.crc32(content) != index_sum or not inside.all():
            raise CacheError("its index is not what was written")
        return index

    def samples(self, position: int) -> NDArray[np.int16]:
        """Return the samples (N,) of an utterance; raises CacheError where they are not those that were written."""
        first, count, checksum = self._index[position].tolist()
        try:
            content = self._read(2 * count, _SAMPLES_AT + 2 * first)
        except OSError as error:
            raise CacheError(error.strerror or str(error)) from error
        if zlib.crc32(content) != checksum:
            raise CacheError("their checksum is another one")
        return np.frombuffer(content, "<i2")

    def discard(self) -> None:
        """Remove the file, unless another stands at its path meanwhile; who has it open may go on to read it."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self._file.fileno()), self.path.stat()):
                self.path.unlink()

    def _read(self, size: int, offset: int) -> bytes:
        parts, got = [], 0
        while got < size and (part := os.pread(self._file.fileno(), size - got, offset + got)):
            parts.append(part)  # one read takes at most 2 GiB
            got += len(part)
        if got < size:
            raise CacheError(f"it ends at byte {offset + got}, {size - got} bytes too early")
        return parts[0] if len(parts) == 1 else b"".join(parts)


def _write_at(descriptor: int, content: bytes, offset: int) -> None:
    view = memoryview(content)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
