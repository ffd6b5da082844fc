"""What a power cut could leave of the files that commands write, told from their calls of the system.

Only what was flushed is on the disk afterwards: the content of a file as of its last fsync, the names in a folder as of
the folder's last fsync. Of what came later any part may be there. So a file is the old one or the complete new one if
its content is flushed before a rename gives it its name, and the new one stays if its folder is flushed after that.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch


def _content(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Disk:
    """Follows the files below a folder.

    Args:
        root: the folder.
        appended: names of files that only grow, whose last line may be cut.
    """

    def __init__(self, root: Path, appended: tuple[str, ...]) -> None:
        self.root, self.appended = root, appended
        self.flushed: dict[int, str] = {}  # content by inode
        self.names: dict[Path, str] = {}  # that a rename gave, with what was wrong with it
        self.unflushed_folders: set[Path] = set()
        self.before = self._files()

    def _files(self) -> dict[Path, tuple[int, str]]:
        paths = (path for path in self.root.rglob("*") if path.is_file() and not path.is_symlink())
        return {path: (path.stat().st_ino, _content(path)) for path in paths}

    def _below(self, path: Path) -> bool:
        return path.is_relative_to(self.root)

    def fsync(self, descriptor: int) -> None:
        """Flush a file, or the names in a folder."""
        status = os.fstat(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if not self._below(path):
            return
        if stat.S_ISDIR(status.st_mode):
            self.unflushed_folders.discard(path)
        else:
            self.flushed[status.st_ino] = _content(path)

    def replace(self, source: Path, target: Path) -> None:
        """Give a file its name."""
        if source.is_file() and self._below(target):
            inode = source.stat().st_ino
            is_flushed = self.flushed.get(inode) == _content(source)
            self.names[target] = "" if is_flushed else "gets its name before its content is flushed"
            self.unflushed_folders.add(target.parent)

    def faults(self) -> list[str]:
        """What a power cut could damage."""
        faults = []
        for path, (inode, content) in self._files().items():
            if path.name.startswith(self.appended) or self.before.get(path) == (inode, content):
                continue
            wrong = self.names.get(path, "is written in place, under its own name")
            if not wrong and path.parent in self.unflushed_folders:
                wrong = "has a name that is not flushed"
            if wrong:
                faults.append(f"{path.relative_to(self.root)} {wrong}")
        return faults


@contextmanager
def watched(root: Path, *appended: str) -> Iterator[Disk]:
    """Follow what this process writes below a folder."""
    disk, flush, replace = Disk(root, appended), os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        flush(descriptor)
        disk.fsync(descriptor)

    def rename(source: Any, target: Any, **options: Any) -> None:
        disk.replace(Path(source), Path(target))
        replace(source, target, **options)

    with patch("os.fsync", fsync), patch("os.replace", rename), patch("os.rename", rename):
        yield disk
