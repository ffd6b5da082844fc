"""Files that readers, and those who come after a crash or a power cut, find whole.

They are written in a folder of their own beside their place, made durable, and renamed into it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ds2.system.errors import UserError

_STALE_S = 3600.0  # before, nothing of another host goes: its locks may not be seen here
_LEFT = re.compile(r"\.(?P<name>.+)\.(?P<host>[^.]*)\.(?P<process>\d+)\.[0-9a-f]{16}\.partial")
_LOCK = ".writer"  # in a writer's folder, locked as long as it lives


class UnwritableError(UserError):
    """A file that has no place where it is to be written; the message names it and the system's reason."""


def check_writable(*paths: Path) -> None:
    """Find out before long work, rather than after it, that its results cannot be written; nothing is left behind.

    Raises:
        UnwritableError: a path is a folder, or the folder that it is to lie in cannot be written or made.
    """
    for path in paths:
        try:
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            there = next(folder for folder in path.absolute().parents if folder.exists())
            with tempfile.TemporaryFile(dir=there) as probe:
                probe.write(b"ds2")
        except OSError as error:
            raise UnwritableError(f"{path} could not be written: {error.strerror}; give another place") from error


def cache_dir() -> Path:
    """Folder of kept files: $DS2_CACHE_DIR, else ds2 under $XDG_CACHE_HOME or ~/.cache."""
    if chosen := os.environ.get("DS2_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ds2"


@contextmanager
def own_folder(parent: Path, name: str) -> Iterator[Path]:
    """Give a folder in `parent` for the block, which is removed with all in it; also what dead writers of `name` left.

    Its name says whose it is: `.NAME.HOST.PROCESS.HEX.partial`.

    Raises:
        OSError: `parent` is not there or not writable.
    """
    sweep(parent, name)
    folder = parent / f".{name}.{host_id()}.{os.getpid()}.{secrets.token_hex(8)}.partial"
    folder.mkdir(mode=0o700)
    try:
        with (folder / f"{_LOCK}.new").open("w") as lock:
            with suppress(OSError):  # where files cannot be locked, other hosts take the writer for alive
                fcntl.lockf(lock, fcntl.LOCK_EX)
                os.replace(lock.name, folder / _LOCK)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sweep(parent: Path, name: str | None = None) -> None:
    """Remove what killed writers of `name` (None: of any) left in `parent`, and nothing of a live one.

    A writer of this host is dead when its process is gone; one of another host when the system has given up its lock,
    and an hour has passed since it last wrote: neither a clock that jumps nor a file system whose locks end at the host
    is enough to take a live one's.
    """
    with suppress(OSError):
        for left in list(parent.iterdir()):
            found = _LEFT.fullmatch(left.name)
            if found and name in (None, found["name"]):
                with suppress(OSError):
                    if _dead(left, found):
                        shutil.rmtree(left)


def _dead(left: Path, writer: re.Match[str]) -> bool:
    if writer["host"] == host_id():
        try:
            os.kill(int(writer["process"]), 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False  # somebody else's, alive
        return False
    with (left / _LOCK).open("r+") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    newest: float = max(path.lstat().st_mtime for path in (left, *left.iterdir()))
    return time.time() - newest > _STALE_S


def host_id() -> str:
    """This host and, where containers share its name, the space in which process numbers count."""
    space = ""
    with suppress(OSError):
        space = "".join(filter(str.isdigit, os.readlink("/proc/self/ns/pid")))
    return platform.node().replace(".", "-").replace("/", "-") + f"-{space}"


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a path to write a file at, which takes the place of `path` when the block ends; an error leaves none.

    Any number of processes, on any hosts, may write one file at once: the last to end wins. The file, and then its
    name, are on the disk when this returns: after a power cut `path` is the old file or the whole new one, and once
    this has returned it is the new one.

    Raises:
        OSError: the folder is not writable or the disk is full.
    """
    _make_folder(path.parent)
    try:
        with own_folder(path.parent, path.name) as folder:
            partial = folder / path.name
            partial.touch(exist_ok=False)
            mode = partial.stat().st_mode  # as the umask has it: safetensors puts a file of its own mode here
            yield partial
            with partial.open("rb+") as written:
                os.fsync(written.fileno())
            partial.chmod(mode)
            partial.replace(path)
            _sync_folder(path.parent)
    except OSError as error:
        if error.filename is None:  # as a write to a full disk has it
            error.filename = str(path)
        raise


def write_text(path: Path, content: str) -> None:
    """Write a UTF-8 file that is either the old one or the whole new one."""
    with whole_file(path) as partial:
        partial.write_text(content, encoding="utf-8", newline="\n")


def _make_folder(folder: Path) -> None:
    """Make a folder and those above it, each of which is on the disk with its name."""
    if folder.is_dir():
        return
    if folder.parent != folder:
        _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder durable; some network file systems, which do so by themselves, refuse."""
    with suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
