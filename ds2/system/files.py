"""Files that readers, and those who come after a crash, find whole: written beside their place and renamed into it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_dir() -> Path:
    """Folder of kept files: $DS2_CACHE_DIR, else ds2 under $XDG_CACHE_HOME or ~/.cache."""
    if chosen := os.environ.get("DS2_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ds2"


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a path beside `path` to write a file at, which takes its place when the block ends; an error leaves none.

    Any number of processes, on any hosts, may write one file at once: the last to end wins.

    Raises:
        OSError: the folder is not writable or the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    partial.touch(exist_ok=False)
    mode = partial.stat().st_mode  # as the umask has it: safetensors, which puts a file of its own here, does not ask
    try:
        yield partial
        with partial.open("rb+") as written:
            os.fsync(written.fileno())
        partial.chmod(mode)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, content: str) -> None:
    """Write a UTF-8 file that is either the old one or the whole new one."""
    with whole_file(path) as partial:
        partial.write_text(content, encoding="utf-8", newline="\n")
