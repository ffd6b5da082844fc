"""A disk in memory that loses what was not flushed when the power is cut, and the paths and calls that use it.

Certain are the content of a file as of its last fsync and the names in a folder as of the folder's last fsync. Of each
later name, and of each later content, the old one is there after a power cut, the new one, or a part of the new one: a
draw says which, so that what came later may be there without what came before.
"""

import errno
import operator
import os
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Self

import torch
from safetensors import SafetensorError


def error_of(number: int, path: str = "") -> OSError:
    """The error of a number, as the system raises it."""
    return OSError(number, os.strerror(number), path)


class Node:
    """A file, whatever its names are; `flushed` is what is certain of its content. It is its own `stat` result."""

    st_dev, st_mode, st_mtime = 0, 0, 0.0

    def __init__(self) -> None:
        self.data = self.flushed = b""
        self.st_mtime_ns = 0  # counts changes

    st_ino = property(id)  # a file that is replaced is another node
    st_size = property(lambda self: len(self.data))


class File:
    """Stands for an open file; what is written is there at once."""

    def __init__(self, name: str, node: Node, mode: str) -> None:
        self.name, self._node, self._binary = name, node, "b" in mode
        self._at: int | None = None  # where the next write goes; None: to the end

    def __enter__(self) -> Self:
        return self

    def write(self, content: Any) -> None:
        content, data = content if self._binary else content.encode(), self._node.data
        at = len(data) if self._at is None else self._at
        self._node.data = data[:at].ljust(at, b"\0") + content + data[at + len(content) :]
        self._at = None if self._at is None else at + len(content)

    def seek(self, offset: int) -> None:
        self._at = offset

    def fileno(self) -> Any:
        return self._node

    def close(self, *error: object) -> None: ...

    flush = __exit__ = close


class DiskPath(str):
    """Stands for `pathlib.Path`, on the disk of the present run; a text, which is faster than a path of pathlib."""

    __slots__ = ()
    disk: "Disk"

    parent = property(lambda self: DiskPath(self.rpartition("/")[0]))
    parts = property(lambda self: self.split("/"))
    name = property(lambda self: self.rpartition("/")[2])
    stem = property(lambda self: self.name.rpartition(".")[0])
    suffix = property(lambda self: "." + self.name.rpartition(".")[2])

    def with_name(self, name: str) -> Self:
        return self.parent / name

    def __truediv__(self, name: str) -> Self:
        return DiskPath(self + "/" + name)

    def find(self) -> Node | None:
        """The file, or None."""
        folder, _, name = self.rpartition("/")
        names = self.disk.folders.get(folder)
        return names.get(name) if names else None

    def stat(self) -> Node:
        if (node := self.find()) is None:
            raise error_of(errno.ENOENT, self)
        return node

    def names(self) -> dict[str, Node]:
        """The files in a folder by name."""
        if self not in self.disk.folders:
            raise error_of(errno.ENOENT, self)
        return self.disk.folders[self]

    def is_file(self) -> bool:
        return self.find() is not None

    exists = is_file

    def absolute(self) -> Self:
        return self

    def is_dir(self) -> bool:
        return self in self.disk.folders

    def open(self, mode: str = "r", buffering: int = -1, encoding: str = "", newline: str = "") -> File:
        node = self.find()
        if node is None:
            node = self.stat() if mode[0] == "r" else self.parent.names().setdefault(self.name, Node())
        elif mode[0] == "w":
            node.data = b""
        return File(self, node, mode)

    def read_bytes(self) -> bytes:
        return self.stat().data

    def read_text(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self.stat().data.decode(encoding, errors)

    def write_bytes(self, content: bytes) -> None:
        self.open("wb").write(content)

    def touch(self, *, exist_ok: bool = True) -> None:
        self.open("a")

    def mkdir(self, mode: int = 0, *, parents: bool = False, exist_ok: bool = False) -> None:
        self.disk.folders.setdefault(self, {})

    def rmdir(self) -> None:
        if self.names():
            raise error_of(errno.ENOTEMPTY, self)
        self.disk.rmtree(self)

    def unlink(self, *, missing_ok: bool = False) -> None:
        if self.parent.names().pop(self.name, None) is None and not missing_ok:
            self.stat()

    def replace(self, target: Self) -> None:
        node = self.stat()
        self.unlink()
        target.parent.names()[target.name] = node

    rename = replace

    def chmod(self, mode: int) -> None: ...

    def glob(self, pattern: str) -> Iterator[Self]:
        begin, end, folders = *pattern.split("*"), self.disk.folders
        inside = [path for path in folders if path.startswith(self) and path.rpartition("/")[0] == self]
        names = [*folders.get(self, ()), *(path.rpartition("/")[2] for path in inside)]
        return iter([self / name for name in names if name.startswith(begin) and name.endswith(end)])

    def iterdir(self) -> Iterator[Self]:
        return self.glob("*")


_unpickled = lru_cache(1 << 10)(pickle.loads)


class Disk:
    """A disk, and calls of `os`, `shutil` and `safetensors` on it; `pause` comes between those that need each other."""

    O_RDONLY, strerror, fsencode = os.O_RDONLY, staticmethod(os.strerror), staticmethod(os.fsencode)
    listdir, replace = staticmethod(DiskPath.names), staticmethod(DiskPath.replace)
    fstat = staticmethod(lambda node: node)
    open = staticmethod(lambda path, flags: path.find() or path)  # a folder is its path
    close = staticmethod(lambda descriptor: None)
    pread = staticmethod(lambda node, size, offset: node.data[offset : offset + size])
    copyfile = staticmethod(lambda source, target: target.write_bytes(source.read_bytes()))
    path = SimpleNamespace(samestat=operator.is_)
    getpid = property(lambda self: os.getpid)  # which is simulated too
    disk_usage = staticmethod(lambda path: SimpleNamespace(free=1 << 40))

    def __init__(self, draw: random.Random, pause: Callable[[], None]) -> None:
        self._draw, self._pause = draw, pause
        self.folders: dict[str, dict[str, Node]] = {}
        self._flushed: dict[str, dict[str, Node]] = {}  # the names that are certain, by folder
        self.mend()

    def mend(self) -> None:
        """Let it be neither full nor slow."""
        self.is_full, self.slowness = False, 1.0

    def check_space(self) -> None:
        """Raise OSError now and then while the disk is full: small files find a place."""
        if self.is_full and self._draw.random() < 0.5:
            raise error_of(errno.ENOSPC)

    def fsync(self, descriptor: Node | DiskPath) -> None:
        self._pause()
        if isinstance(descriptor, Node):
            descriptor.flushed = descriptor.data
        else:
            self._flushed[descriptor] = dict(self.folders.get(descriptor, {}))
        self._pause()

    def link(self, source: DiskPath, target: DiskPath) -> None:
        self._pause()
        self.make_link(source, target)
        self._pause()

    def make_link(self, source: DiskPath, target: DiskPath) -> None:
        if target.exists():
            raise error_of(errno.EEXIST, target)
        target.parent.names()[target.name] = source.stat()

    def utime(self, path: DiskPath) -> None:
        path.stat().st_mtime_ns += 1

    def rmtree(self, path: DiskPath, *, ignore_errors: bool = False) -> None:
        self.folders.pop(path, None)

    def write_tensors(self, tensors: dict[str, torch.Tensor], path: DiskPath, metadata: dict[str, str]) -> None:
        path.write_bytes(pickle.dumps((metadata, {name: tensor.numpy() for name, tensor in tensors.items()})))

    @contextmanager
    def safe_open(self, path: str, **options: str) -> Iterator[Any]:
        try:
            metadata, arrays = _unpickled(DiskPath(path).read_bytes())
        except (EOFError, pickle.UnpicklingError) as error:
            raise SafetensorError(str(error)) from error
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        yield SimpleNamespace(metadata=lambda: metadata, keys=tensors.keys, get_tensor=tensors.__getitem__)

    def cut_power(self, folder: DiskPath) -> None:
        """Leave in a folder what is there afterwards; no process may run."""
        before, now = self._flushed.get(folder, {}), dict(folder.names())
        for name in sorted({*before, *now}):
            node = self._draw.choice((before.get(name), now.get(name)))
            folder.names().pop(name, None)
            if node is not None:  # written anew: who has opened it before does not see it
                folder.names()[name] = left = Node()
                left.data = self._torn(node.flushed, node.data if node in now.values() else node.flushed)
        for node in folder.names().values():
            node.flushed = node.data
        self._flushed[folder] = dict(folder.names())

    def _torn(self, old: bytes, new: bytes) -> bytes:
        if new.startswith(old):
            return new[: self._draw.choice((len(old), self._draw.randint(len(old), len(new)), len(new)))]
        return self._draw.choice((old, new))
