"""Audio in tar files (shards): the path `SHARD.tar/KEY.flac` names a member, which is read at its offset in the shard.

The index file `SHARD.tar.index` holds a line of JSON (version, size of the shard, digest of its sources, CRC-32 of the
rest), then a line for each member: offset, size, CRC-32, samples, name. The headers of a shard without an index, as
other tools write them, are read once a process.
"""

import json
import os
import stat
import tarfile
import tempfile
import weakref
import zlib
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ds2.system import UserError
from ds2.system.files import write_text
from ds2.system.plain import short_repr

_VERSION = 1
_REPAIR = "copy it again, or write it again with `ds2 data shards`"
_FILES_OPEN = 256
_MAX_NAME_BYTES = 1024  # names are kept in an array whose rows are as long as the longest


class ShardError(UserError):
    """A shard is damaged or lacks a member; the message says which and why."""


class ShardMember(NamedTuple):
    """Position of an audio file in its shard."""

    name: str
    offset: int
    size: int
    crc: int = -1  # of its bytes; -1: unknown
    samples: int = -1  # -1: unknown


def member_of(path: Path) -> tuple[Path, str] | None:
    """Split a path into a shard and the name of its member; None for paths without a shard."""
    if ".tar" in str(path.parent):
        for parent in path.parents:
            if parent.suffix == ".tar" and not _is_folder(parent):
                return parent, path.relative_to(parent).as_posix()
    return None


def index_file(shard: Path) -> Path:
    """Return the path of a shard's index, which need not exist."""
    return shard.with_name(shard.name + ".index")


class Shard:
    """The members of a tar file; forked processes and threads may share an object.

    Args:
        use_index: take the members from the index, where there is one; it lists audio alone.

    Raises:
        ShardError: the file cannot be read, or does not match its index.
    """

    def __init__(self, path: Path, *, use_index: bool = True) -> None:
        self.path, self.made_from = path, ""
        try:
            status = path.stat()
            if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):  # opening a pipe waits for ever
                raise ShardError(f"{path}: is a pipe or device, not a shard")
            self._bytes, self._version = status.st_size, (status.st_ino, status.st_mtime_ns)
            index = index_file(path)
            members = self._read_index(index) if use_index and index.is_file() else self._read_headers()
        except OSError as error:
            raise ShardError(f"{path}: {error.strerror or error}") from error
        self._check(members)
        members.sort(key=lambda member: member.name.encode())
        self._names = np.array([member.name.encode() for member in members] or [b""])
        self._rows = np.array([[m.offset, m.size, m.crc, m.samples] for m in members], np.int64).reshape(-1, 4)

    def members(self) -> list[ShardMember]:
        """Return all members, sorted by name."""
        names = self._names.tolist()
        return [ShardMember(names[row].decode(), *values) for row, values in enumerate(self._rows.tolist())]

    def missing(self, names: Sequence[str]) -> list[str]:
        """Return those of the names, at least one, that no member has."""
        encoded = np.array([name.encode() for name in names])
        nearest = np.minimum(np.searchsorted(self._names, encoded), len(self._names) - 1)
        return [name for name, equal in zip(names, self._names[nearest] == encoded, strict=True) if not equal]

    def read(self, name: str) -> bytes:
        """Return the bytes of a member; raises ShardError where there is none, or it is damaged."""
        if self.missing([name]):
            raise ShardError(f"{self.path}: has no member {name}; {_REPAIR}")
        offset, size, crc, _ = self._rows[int(np.searchsorted(self._names, name.encode()))].tolist()
        try:
            file = _opened(str(self.path), self._version)  # in a variable, so that it stays open during the call
            content = os.pread(file.fileno(), size, offset)
        except OSError as error:
            raise ShardError(f"{self.path}: {name}: {error.strerror or error}") from error
        if len(content) < size:
            raise ShardError(f"{self.path}: ends before {name} does; {_REPAIR}")
        if crc >= 0 and zlib.crc32(content) != crc:
            raise ShardError(f"{self.path}: {name} is damaged (its checksum is wrong); {_REPAIR}")
        return content

    def _read_index(self, index: Path) -> list[ShardMember]:
        try:
            head, _, rest = index.read_bytes().partition(b"\n")
            facts = json.loads(head)
            if facts["version"] != _VERSION or facts["crc"] != zlib.crc32(rest):
                raise ValueError("another version or damaged")
            lines = [line.split(" ", 4) for line in rest.decode().split("\n")[:-1]]
            numbers = np.array([line[:4] for line in lines], np.int64).tolist()
            members = [ShardMember(line[4], *row) for line, row in zip(lines, numbers, strict=True)]
            stated_bytes, self.made_from = int(facts["bytes"]), str(facts["made_from"])
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
            raise ShardError(f"{index}: not an index of a shard ({error}); {_REPAIR}") from error
        if stated_bytes != self._bytes:
            raise ShardError(f"{self.path}: has {self._bytes} bytes, its index states {stated_bytes}; {_REPAIR}")
        return members

    def _read_headers(self) -> list[ShardMember]:
        members = list[ShardMember]()
        try:
            with tarfile.open(self.path, "r:") as tar:
                for header in tar:
                    if header.issparse():
                        raise tarfile.TarError(f"{header.name} is a sparse file, whose bytes do not lie in one piece")
                    if header.isfile():
                        members.append(ShardMember(header.name.removeprefix("./"), header.offset_data, header.size))
        except (tarfile.TarError, ValueError, ArithmeticError, LookupError, RecursionError, MemoryError) as error:
            raise ShardError(f"{self.path}: not a shard ({error}); {_REPAIR}") from error
        return members

    def _check(self, members: list[ShardMember]) -> None:
        names = set[str]()
        for name, offset, size, *_ in members:
            try:
                name_bytes = len(name.encode())
            except UnicodeEncodeError as error:
                raise ShardError(f"{self.path}: the name of member {name!r} is not UTF-8; {_REPAIR}") from error
            if name_bytes > _MAX_NAME_BYTES or "\0" in name:
                raise ShardError(
                    f"{self.path}: the name {short_repr(name)} is over {_MAX_NAME_BYTES} bytes, or holds NUL"
                )
            if name.startswith("/") or ".." in name.split("/"):  # its path through the shard would be another file's
                raise ShardError(f"{self.path}: the name {short_repr(name)} leaves the shard; write it again without")
            if name in names:
                raise ShardError(f"{self.path}: holds two members named {name}; rename one, or remove the stale one")
            if not (offset >= 0 and size >= 0 and offset + size <= self._bytes):
                raise ShardError(f"{self.path}: {name} does not lie within the file's {self._bytes} bytes; {_REPAIR}")
            names.add(name)


def write_index(shard: Path, members: Iterable[ShardMember], made_from: str) -> None:
    """Write the index of a complete shard; `made_from` is a digest of its sources."""
    rest = "".join(f"{m.offset} {m.size} {m.crc} {m.samples} {m.name}\n" for m in members)
    facts = {
        "version": _VERSION,
        "bytes": shard.stat().st_size,
        "made_from": made_from,
        "crc": zlib.crc32(rest.encode()),
    }
    write_text(index_file(shard), json.dumps(facts) + "\n" + rest)


def check_members(paths: Iterable[Path]) -> list[str]:
    """Open the shards of all members among the paths; return a message for each problem.

    Their indices are read once, for processes forked later too.
    """
    names: dict[Path, list[str]] = {}
    for path in paths:
        if member := member_of(path):
            names.setdefault(member[0], []).append(member[1])
    problems = []
    for shard, members in names.items():
        try:
            _SHARDS[shard] = Shard(shard)
        except ShardError as error:
            problems.append(str(error))
            continue
        if missing := _SHARDS[shard].missing(members):
            problems.append(f"{shard}: lacks {len(missing)} of its {len(members)} utterances, {missing[0]} first")
    return problems


def open_member(path: Path, name: str) -> int:
    """Return the descriptor of a file in memory with a member's bytes; the caller closes it. Raises as `Shard.read`."""
    shard = _SHARDS.get(path)
    if shard is None:
        shard = _SHARDS[path] = Shard(path)
    content = shard.read(name)
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("member")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


@cache
def _is_folder(path: Path) -> bool:
    return path.is_dir()


class _OpenFile:
    """A file that is closed when no thread refers to it any more."""

    def __init__(self, path: str) -> None:
        file = open(path, "rb", buffering=0)  # noqa: SIM115 (closed with this object)
        self.fileno = file.fileno
        weakref.finalize(self, file.close)


@lru_cache(maxsize=_FILES_OPEN)
def _opened(path: str, version: tuple[int, int]) -> _OpenFile:
    return _OpenFile(path)


_SHARDS: dict[Path, Shard] = {}
