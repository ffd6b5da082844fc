"""A disk that loses what was not flushed: what a power cut leaves of the files in real folders.

Certain are the content of a file as of its last fsync and the names in a folder as of the folder's last fsync. Of each
later name, and of each later content, the old one is there after a power cut, the new one, or a part of the new one: a
draw says which, so that what came later may be there without what came before.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path


class Disk:
    """Follows flushes below some folders, which themselves stay.

    Args:
        draw: the random numbers of this run.
        pause: called between two calls that need each other.
    """

    def __init__(self, draw: random.Random, pause: Callable[[], None]) -> None:
        self._draw, self._pause = draw, pause
        self._flushed: dict[int, bytes] = {}  # content of files
        self._names: dict[int, dict[str, int]] = {}  # of folders: numbers of files by name
        self.mend()

    def fsync(self, descriptor: int) -> None:
        """Stand in for os.fsync: what the file or folder holds now is certain."""
        self._pause()
        path, number = f"/proc/self/fd/{descriptor}", os.fstat(descriptor).st_ino
        if os.path.isdir(path):
            self._names[number] = _names(path)
        else:
            self._flushed[number] = Path(path).read_bytes()
        self._pause()

    def mend(self) -> None:
        """Let it be neither full nor slow."""
        self.is_full, self.slowness = False, 1.0

    def check_space(self) -> None:
        """Raise OSError now and then while the disk is full: small files find a place."""
        if self.is_full and self._draw.random() < 0.5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def cut_power(self, folder: Path) -> None:
        """Leave in a folder what is there afterwards; no process may run."""
        before, now = self._names.get(folder.stat().st_ino, {}), _names(folder)
        content = {number: (folder / name).read_bytes() for name, number in now.items()}
        for name in sorted({*before, *now}):
            number = self._draw.choice((before.get(name), now.get(name)))
            (folder / name).unlink(missing_ok=True)
            if number is not None:  # written anew: who has opened it before does not see it
                old = self._flushed.get(number, b"")
                (folder / name).write_bytes(self._torn(old, content.get(number, old)))
        for name, number in _names(folder).items():
            self._flushed[number] = (folder / name).read_bytes()
        self._names[folder.stat().st_ino] = _names(folder)

    def _torn(self, old: bytes, new: bytes) -> bytes:
        if new.startswith(old):
            return new[: self._draw.choice((len(old), self._draw.randint(len(old), len(new)), len(new)))]
        return self._draw.choice((old, new))


def _names(folder: str | Path) -> dict[str, int]:
    with os.scandir(folder) as entries:
        return {entry.name: entry.inode() for entry in entries if entry.is_file()}
