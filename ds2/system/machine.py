"""What this machine and this tree are: cores that may be used, memory, the commit that runs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def usable_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """Return the main memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


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
