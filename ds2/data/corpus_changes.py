"""Changes of a corpus since a run last started: names, sizes and times of audio files, and a sample of content.

A record holds one row a file (a shard of many utterances is one file), and rows for a sample of single utterances
whose audio is read: so a start costs one `stat` a file and at most 16 MiB of reading, whatever the size of the corpus.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ds2.audio.shard import ShardError, member_of, open_member
from ds2.data.manifest import Utterance
from ds2.system.files import atomic_file

_SAMPLED = 256  # files or members of shards
_BLOCK_BYTES, _BLOCKS = 16384, 4  # read of each
_COLUMNS = 4  # key, bytes, modification time in ns (0: a row of the sample), digest of content that was read
_TEXTS = 0  # the key of the row that holds the number of utterances and a digest of their texts

Record = NDArray[np.int64]


def describe_changes(path: Path, utterances: Sequence[Utterance]) -> str:
    """Compare a corpus with its record of the last start, and write the new record.

    Args:
        path: of the record; it need not exist.
        utterances: of the run, now.

    Returns:
        One line: what changed, that nothing changed, or that there is nothing to compare with.

    Raises:
        OSError: the record cannot be written.
    """
    now = _record(utterances)
    before = _read(path)
    with atomic_file(path) as partial, partial.open("wb") as file:
        np.save(file, now, allow_pickle=False)
    if before is None:
        return "corpus: no record of an earlier start to compare with"
    return f"corpus since the last start: {_difference(before, now)}"


def _read(path: Path) -> Record | None:
    try:
        record = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    fits = isinstance(record, np.ndarray) and record.dtype == np.int64 and record.shape[1:] == (_COLUMNS,)
    return record if fits else None


def _record(utterances: Sequence[Utterance]) -> Record:
    paths = sorted({u.audio_filepath for u in utterances})
    members = {path: member_of(path) for path in paths}
    files = sorted({member[0] if member else path for path, member in members.items()})
    texts = hashlib.sha256("\n".join(sorted(u.text for u in utterances)).encode("utf-8", "surrogatepass"))
    rows = [[_TEXTS, len(utterances), 0, _number(texts.digest())]]
    for file in files:
        try:
            stat = file.stat()
        except OSError:
            continue
        rows.append([_key("file", file), stat.st_size, stat.st_mtime_ns or 1, 0])
    for path in sorted(paths, key=lambda path: _key("sample", path))[:_SAMPLED]:
        rows.append([_key("sample", path), 0, 0, _content(path, members[path])])
    record = np.array(rows, np.int64)
    return record[np.unique(record[:, 0], return_index=True)[1]]


def _key(kind: str, path: Path) -> int:
    """A number for a file by its name and its folder's: the folders above may be a host's own."""
    return _number(hashlib.sha256("/".join((kind, *path.parts[-2:])).encode("utf-8", "surrogateescape")).digest())


def _number(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little", signed=True)


def _content(path: Path, member: tuple[Path, str] | None) -> int:
    """A digest of some blocks of a file or member, from its first to its last byte; 0 where it cannot be read."""
    digest = hashlib.sha256()
    try:
        descriptor = open_member(*member) if member else os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(descriptor).st_size
            last = max(0, size - _BLOCK_BYTES)
            for block in range(_BLOCKS):
                digest.update(os.pread(descriptor, _BLOCK_BYTES, last * block // (_BLOCKS - 1)))
        finally:
            os.close(descriptor)
    except (OSError, ShardError):
        return 0
    return _number(digest.digest()) or 1


def _difference(before: Record, now: Record) -> str:
    files = [record[record[:, 2] != 0] for record in (before, now)]
    samples = [record[(record[:, 2] == 0) & (record[:, 0] != _TEXTS)] for record in (before, now)]
    texts = [record[record[:, 0] == _TEXTS][:, [1, 3]].tolist() or [[0, 0]] for record in (before, now)]
    old, new = _common(*files)
    read_before, read_now = _common(*samples)
    resized = old[:, 1] != new[:, 1]
    other = int((read_before[:, 3] != read_now[:, 3]).sum())
    counts = {
        "{} files are new": len(files[1]) - len(new),
        "{} files are gone": len(files[0]) - len(old),
        "{} files have another size": int(resized.sum()),
        "{} files were modified at the same size": int(((old[:, 2] != new[:, 2]) & ~resized).sum()),
        f"{{}} of {len(read_now)} sampled recordings have other content": other,
        f"texts changed ({texts[0][0][0]} utterances before, {texts[1][0][0]} now)": int(texts[0] != texts[1]),
    }
    changes = [text.format(count) for text, count in counts.items() if count]
    whole = f"{len(new)} files and {len(read_now)} sampled recordings"
    return f"{', '.join(changes)}; compared were {whole}" if changes else f"unchanged ({whole} compared)"


def _common(before: Record, now: Record) -> tuple[Record, Record]:
    """The rows of both records whose keys both have, in the same order."""
    _, left, right = np.intersect1d(before[:, 0], now[:, 0], assume_unique=True, return_indices=True)
    return before[left], now[right]
