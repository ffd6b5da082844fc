"""What this machine and this tree are: cores that may be used, memory, the commit that runs."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path


def usable_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def allow_files(count: int) -> int:
    """Let this process, and those it begins, open so many files and sockets if it may; return how many it may open."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return count if soft == resource.RLIM_INFINITY else soft


def memory_bytes() -> int:
    """Return the main memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@functools.cache
def git_commit() -> str:
    """The commit of the source tree that runs, `-dirty` appended where it has changes, or 'unknown' outside git."""
    folder = Path(__file__).resolve().parent
    try:
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip()
