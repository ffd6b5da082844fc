"""The machine, this process and this copy of ds2: cores, open files, garbage, memory, version, git commit."""

import atexit
import ctypes
import functools
import gc
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

VERSION = "0.1.0"  # as in pyproject.toml
_MANY_OBJECTS = 100_000  # a collection that visits fewer takes some 10 ms
_GLIBC_LIMITS = {-3: 32 << 20, -1: 256 << 20}  # M_MMAP_THRESHOLD (its maximum) and M_TRIM_THRESHOLD, in bytes


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def thread_pool(count: int, wait_s: float = 2.0) -> Iterator[ThreadPool]:
    """Yield a pool whose threads begin no more work when the block ends, and have ended unless one takes too long.

    A thread that is still within a library, such as a resampler, when Python exits would crash the process. The end of
    the block waits `wait_s` for work that has begun.
    """
    own: list[threading.Thread] = []
    pool = ThreadPool(count, lambda: own.append(threading.current_thread()))
    try:
        yield pool
    finally:
        pool.terminate()
        end_s = time.monotonic() + wait_s
        for thread in tuple(own):
            thread.join(max(0.0, end_s - time.monotonic()))


def allow_files(count: int) -> int:
    """Raise the limit of open files and sockets to `count` as far as the hard limit permits; return the new limit."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return count
    limit = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft >= limit:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


@contextmanager
def short_collections() -> Iterator[None]:
    """Keep garbage collections short and memory flat while the block runs.

    Libraries leave hundreds of thousands of objects that stay for ever. A full collection that visits them takes 0.1 to
    0.2 s, in which no thread runs Python: a server answers no client, a training launches nothing on its GPU. And
    Python delays it until a quarter as many objects are new: meanwhile what has ended, such as thousands of
    connections, stays in memory. Where a caller has frozen most objects, these stay frozen and no others are.
    """
    # get_freeze_count visits every frozen object, so it is asked last. Some versions of Python start with a few.
    objects = len(gc.get_objects())  # that are not frozen
    freezes = objects > _MANY_OBJECTS and gc.get_freeze_count() < objects
    if freezes:
        gc.collect()
        gc.freeze()
    gc.collect()  # sets the number of objects that the quarter refers to
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()


def keep_freed_memory() -> None:
    """Let glibc keep up to 256 MiB that are freed for what is allocated next; another C library goes on as before.

    By default blocks of 128 KB or more go back to the system. Each new one then costs more time for its pages, which
    the system clears, than for copying a message into it.
    """
    with suppress(AttributeError, OSError, TypeError):
        library = ctypes.CDLL(None)
        for limit, value in _GLIBC_LIMITS.items():
            library.mallopt(limit, value)


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import torch without garbage collections, which look through its objects while there are more and more of them.

    They would take a quarter of the time. What was imported counts as old afterwards, so that collections of young
    objects skip it. If torch is imported already, or collections are switched off, nothing changes.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.unfreeze()  # into the oldest generation
        gc.enable()


def skip_last_collection() -> None:
    """At exit: else Python traverses a million objects of torch, which takes a second.

    Not with Triton, which lists hundreds of "leaked" objects where that is skipped; the optimizers import it.
    """
    if "triton" not in sys.modules:
        gc.freeze()


def call_pickled(function: bytes, *arguments: Any) -> None:
    """Call a function that was pickled, in a process spawned for it, which starts and ends without collections."""
    atexit.register(skip_last_collection)
    with quick_imports():
        call = pickle.loads(function)
    call(*arguments)


def reachable_address() -> str:
    """Return the address of this machine from which it would call a far one, or ''; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # of a network for documentation, which does not exist
        return str(probe.getsockname()[0])
    return ""


def memory_bytes() -> int:
    """Return the size of the main memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@functools.cache
def git_commit() -> str:
    """Return the commit of the source tree, with `-dirty` if it has changes, or 'unknown' outside a git repository."""
    return commit_of(Path(__file__).resolve().parent)


def commit_of(folder: Path) -> str:
    """Return `git_commit` of any folder. Only reads: `git describe --dirty` would lock the index, and rewrite it."""

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", *arguments]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changes = git("status", "--porcelain", "--untracked-files=no")
        return git("describe", "--always", "--abbrev=40") + "-dirty" * bool(changes)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
