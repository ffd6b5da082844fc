"""Audio inside tar files (shards): `SHARD.tar/KEY.flac` names a member, which is read where the shard's index has it.

The index lies beside the shard, `SHARD.tar.index`: a line of JSON (version, size of the shard, what it was made from,
CRC-32 of the rest), then for each member its offset, size, CRC-32, samples and name. A shard without one, as other
tools write them, is looked through once a process instead.
"""

from __future__ import annotations

import json
import os
import tarfile
import tempfile
import weakref
import zlib
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ds2.system.errors import UserError
from ds2.system.files import write_text

_VERSION = 1
_WAY_OUT = "copy it again, or write it anew with `ds2 data shards`"
_FILES_OPEN = 256
_MAX_NAME_BYTES = 1024  # names are kept in an array whose rows are as long as the longest
_NAME_SHOWN = 60


class ShardError(UserError):
    """A shard that is damaged or lacks a member; the message names it and says what is wrong."""


class Member(NamedTuple):
    """Where an audio file lies in its shard."""

    name: str
    offset: int
    size: int
    crc: int = -1  # of its bytes; -1: nobody noted it
    samples: int = -1  # -1: nobody noted them


def member_of(path: Path) -> tuple[Path, str] | None:
    """Return the shard that a path goes through and the member's name in it; None for paths of files and folders."""
    if ".tar" in str(path.parent):
        for parent in path.parents:
            if parent.suffix == ".tar" and not _is_folder(parent):
                return parent, path.relative_to(parent).as_posix()
    return None


def index_file(shard: Path) -> Path:
    """Where the index of a shard lies."""
    return shard.with_name(shard.name + ".index")


class Shard:
    """The members of a tar file; forked processes and threads may share one.

    Raises:
        ShardError: it cannot be read, or is not what its index says.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.made_from = path, ""
        try:
            found = path.stat()
            self._bytes, self._which = found.st_size, (found.st_ino, found.st_mtime_ns)
            index = index_file(path)
            members = self._read_index(index) if index.is_file() else self._read_headers()
        except OSError as error:
            raise ShardError(f"{path}: {error.strerror or error}") from error
        self._check(members)
        members.sort(key=lambda member: member.name.encode())
        self._names = np.array([member.name.encode() for member in members] or [b""])
        self._places = np.array([[m.offset, m.size, m.crc, m.samples] for m in members], np.int64).reshape(-1, 4)

    def __len__(self) -> int:
        return len(self._places)

    def members(self) -> list[Member]:
        """All of them, by name."""
        names = self._names.tolist()
        return [Member(names[row].decode(), *place) for row, place in enumerate(self._places.tolist())]

    def missing(self, names: Sequence[str]) -> list[str]:
        """Return those of the names that it has not."""
        wanted = np.array([name.encode() for name in names])
        at = np.minimum(np.searchsorted(self._names, wanted), len(self._names) - 1)
        return [name for name, found in zip(names, self._names[at] == wanted, strict=True) if not found]

    def read(self, name: str) -> bytes:
        """Return the bytes of a member.

        Raises:
            ShardError: it is not there, or not what was written.
        """
        if self.missing([name]):
            raise ShardError(f"{self.path}: has no member {name}; {_WAY_OUT}")
        offset, size, crc, _ = self._places[int(np.searchsorted(self._names, name.encode()))].tolist()
        try:
            file = _opened(str(self.path), self._which)  # by name, or it may close before the call
            content = os.pread(file.fileno(), size, offset)
        except OSError as error:
            raise ShardError(f"{self.path}: {name}: {error.strerror or error}") from error
        if len(content) < size:
            raise ShardError(f"{self.path}: ends before {name} does; {_WAY_OUT}")
        if crc >= 0 and zlib.crc32(content) != crc:
            raise ShardError(f"{self.path}: {name} is not what was written (its checksum is another one); {_WAY_OUT}")
        return content

    def _read_index(self, index: Path) -> list[Member]:
        try:
            head, _, rest = index.read_bytes().partition(b"\n")
            facts = json.loads(head)
            if facts["version"] != _VERSION or facts["crc"] != zlib.crc32(rest):
                raise ValueError("another version or damaged")
            lines = [line.split(" ", 4) for line in rest.decode().split("\n")[:-1]]
            members = [Member(line[4], *map(int, line[:4])) for line in lines]
            said_bytes, self.made_from = int(facts["bytes"]), str(facts["made_from"])
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise ShardError(f"{index}: no index of a shard ({error}); {_WAY_OUT}") from error
        if said_bytes != self._bytes:
            raise ShardError(f"{self.path}: has {self._bytes} bytes, its index promises {said_bytes}; {_WAY_OUT}")
        return members

    def _read_headers(self) -> list[Member]:
        members = list[Member]()
        try:
            with tarfile.open(self.path, "r:") as tar:
                for header in tar:
                    if header.issparse():
                        raise tarfile.TarError(f"{header.name} is a sparse file, whose bytes do not lie in one piece")
                    if header.isfile():
                        members.append(Member(header.name.removeprefix("./"), header.offset_data, header.size))
        except (tarfile.TarError, ValueError, ArithmeticError, LookupError, RecursionError, MemoryError) as error:
            raise ShardError(f"{self.path}: not a shard ({error}); {_WAY_OUT}") from error
        return members

    def _check(self, members: list[Member]) -> None:
        names = set[str]()
        for name, offset, size, *_ in members:
            try:
                name_bytes = len(name.encode())
            except UnicodeEncodeError as error:
                raise ShardError(f"{self.path}: the name of member {name!r} is not UTF-8; {_WAY_OUT}") from error
            if name_bytes > _MAX_NAME_BYTES or "\0" in name:
                shown = f"{name[:_NAME_SHOWN]!r}..."
                raise ShardError(f"{self.path}: the name {shown} is over {_MAX_NAME_BYTES} bytes, or holds NUL")
            if name in names:
                raise ShardError(f"{self.path}: holds two members named {name}; rename one, or remove the stale one")
            if not (offset >= 0 and size >= 0 and offset + size <= self._bytes):
                raise ShardError(f"{self.path}: {name} does not lie within the file's {self._bytes} bytes; {_WAY_OUT}")
            names.add(name)


def write_index(shard: Path, members: Iterable[Member], made_from: str) -> None:
    """Write the index of a shard that is complete."""
    rest = "".join(f"{m.offset} {m.size} {m.crc} {m.samples} {m.name}\n" for m in members)
    facts = {
        "version": _VERSION,
        "bytes": shard.stat().st_size,
        "made_from": made_from,
        "crc": zlib.crc32(rest.encode()),
    }
    write_text(index_file(shard), json.dumps(facts) + "\n" + rest)


def check_members(paths: Iterable[Path]) -> list[str]:
    """Open the shards of all members among the paths; return what is wrong with them.

    Their indices are read here once, also for processes that are forked later.
    """
    names: dict[Path, list[str]] = {}
    for path in paths:
        if member := member_of(path):
            names.setdefault(member[0], []).append(member[1])
    problems = []
    for shard, wanted in names.items():
        try:
            _SHARDS[shard] = Shard(shard)
        except ShardError as error:
            problems.append(str(error))
            continue
        if missing := _SHARDS[shard].missing(wanted):
            problems.append(f"{shard}: lacks {len(missing)} of its {len(wanted)} utterances, {missing[0]} first")
    return problems


def open_member(path: Path, name: str) -> int:
    """Return a descriptor, to be closed, of a file in memory with the bytes of a shard's member.

    Raises:
        ShardError: as `Shard.read`.
    """
    shard = _SHARDS.get(path)
    if shard is None:
        shard = _SHARDS[path] = Shard(path)
    content = shard.read(name)
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("member")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


@cache
def _is_folder(path: Path) -> bool:
    return path.is_dir()


class _OpenFile:
    """A file that closes when nobody uses it any more, however many threads do."""

    def __init__(self, path: str) -> None:
        file = open(path, "rb", buffering=0)  # noqa: SIM115 (closed with this object)
        self.fileno = file.fileno
        weakref.finalize(self, file.close)


@lru_cache(maxsize=_FILES_OPEN)
def _opened(path: str, which: tuple[int, int]) -> _OpenFile:
    return _OpenFile(path)


_SHARDS: dict[Path, Shard] = {}
