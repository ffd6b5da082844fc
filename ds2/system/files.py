"""Atomic writes: after a crash or a power cut a file is the old version or the complete new one.

A file is written in a temporary folder beside its final path, flushed to the disk and renamed.
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

_STALE_S = 3600.0  # folders of other hosts stay this long: their locks may not be visible here
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<host>[^.]*)\.(?P<process>\d+)\.[0-9a-f]{16}\.partial")
_LOCK = ".writer"  # a file in each temporary folder, locked while its process lives


class UnwritableError(UserError):
    """A file cannot be written; the message names the file and the reason of the system."""


def check_writable(*paths: Path) -> None:
    """Check before a long computation that its results can be written. Creates no files.

    Raises:
        UnwritableError: a path is a folder, or its parent folder cannot be created or written.
    """
    for path in paths:
        try:
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            parent = next(folder for folder in path.absolute().parents if folder.exists())
            with tempfile.TemporaryFile(dir=parent) as probe:
                probe.write(b"ds2")
        except OSError as error:
            raise UnwritableError(f"{path} could not be written: {error.strerror}; choose another path") from error


def cache_dir() -> Path:
    """Return the cache folder: $DS2_CACHE_DIR, else ds2 under $XDG_CACHE_HOME or ~/.cache."""
    if chosen := os.environ.get("DS2_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ds2"


@contextmanager
def temporary_folder(parent: Path, name: str) -> Iterator[Path]:
    """Create a folder in `parent` for the block and delete it afterwards, with those that killed processes left.

    Its name says which process owns it: `.NAME.HOST.PROCESS.HEX.partial`.

    Raises:
        OSError: `parent` does not exist or is not writable.
    """
    remove_stale(parent, name)
    folder = parent / f".{name}.{host_id()}.{os.getpid()}.{secrets.token_hex(8)}.partial"
    folder.mkdir(mode=0o700)
    try:
        with (folder / f"{_LOCK}.new").open("w") as lock:
            with suppress(OSError):  # without file locks other hosts assume that the writer is alive
                fcntl.lockf(lock, fcntl.LOCK_EX)
                os.replace(lock.name, folder / _LOCK)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_stale(parent: Path, name: str | None = None) -> None:
    """Delete the temporary folders in `parent` whose process was killed, those of `name` only unless it is None.

    A process of this host is dead if its process id is free. A process of another host is dead if its lock is free and
    its last write is an hour old: both, because clocks jump and some file systems do not share locks between hosts.
    """
    with suppress(OSError):
        for folder in list(parent.iterdir()):
            writer = _TEMPORARY.fullmatch(folder.name)
            if writer and name in (None, writer["name"]):
                with suppress(OSError):
                    if _is_dead(folder, writer):
                        shutil.rmtree(folder)


def _is_dead(folder: Path, writer: re.Match[str]) -> bool:
    if writer["host"] == host_id():
        try:
            os.kill(int(writer["process"]), 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False  # a live process of another user
        return False
    with (folder / _LOCK).open("r+") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    newest: float = max(path.lstat().st_mtime for path in (folder, *folder.iterdir()))
    return time.time() - newest > _STALE_S


def host_id() -> str:
    """Return the host name and the namespace of its process ids, which tells containers of one host name apart."""
    space = ""
    with suppress(OSError):
        space = "".join(filter(str.isdigit, os.readlink("/proc/self/ns/pid")))
    return platform.node().replace(".", "-").replace("/", "-") + f"-{space}"


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; at the end of the block rename it to `path`, after an error delete it.

    Several processes, also on several hosts, may write the same file at once: the last one wins. The content and the
    name are flushed to the disk before this returns.

    Raises:
        OSError: the folder is not writable or the disk is full.
    """
    _make_folder(path.parent)
    try:
        with temporary_folder(path.parent, path.name) as folder:
            partial = folder / path.name
            partial.touch(exist_ok=False)
            mode = partial.stat().st_mode  # of the umask; safetensors replaces the file by one of another mode
            yield partial
            with partial.open("rb+") as written:
                os.fsync(written.fileno())
            partial.chmod(mode)
            partial.replace(path)
            _sync_folder(path.parent)
    except OSError as error:
        if error.filename is None:  # a write to a full disk names no file
            error.filename = str(path)
        raise


def write_text(path: Path, content: str) -> None:
    """Write a UTF-8 file atomically."""
    with atomic_file(path) as partial:
        partial.write_text(content, encoding="utf-8", newline="\n")


def _make_folder(folder: Path) -> None:
    """Create a folder and its parents, and flush each name to the disk."""
    if folder.is_dir():
        return
    if folder.parent != folder:
        _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk; some network file systems do so themselves and refuse this."""
    with suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
