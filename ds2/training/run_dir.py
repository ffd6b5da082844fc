"""A run folder: can it be written, and is this the only job that writes it."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ds2.distributed.communicator import Communicator
from ds2.system.files import remove_stale
from ds2.system.tensor_file import CheckpointError

log = logging.getLogger(__name__)
_FREE_BYTES_AT_START = 256 * 2**20


@contextmanager
def sole_use(run_dir: Path, comm: Communicator) -> Iterator[None]:
    """Let one job at a time write a run folder: rank 0 locks a file in it, and the system unlocks what a job leaves.

    What killed jobs left half written in it is removed. A job that fails before it left anything takes its lock along.

    Raises:
        CheckpointError: another process holds the lock; names it. Or it removed the folder just then.
    """
    if comm.rank != 0:
        yield
        return
    with (run_dir / "lock").open("a+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            file.seek(0)
            raise CheckpointError(
                f"run folder {run_dir} is being written by {file.read()}: end that run or give another run_dir=..."
            ) from error
        except OSError as error:
            log.warning("%s has no file locks (%s): start no second run there", run_dir, error)
        if not os.fstat(file.fileno()).st_nlink:
            raise CheckpointError(f"run folder {run_dir} was just removed by a run that failed: start this one again")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {comm.host}")
        file.flush()
        remove_stale(run_dir)
        try:
            yield
        except BaseException:
            with suppress(OSError):
                if os.listdir(run_dir) == ["lock"]:
                    (run_dir / "lock").unlink()
            raise


@contextmanager
def made_folder(run_dir: Path) -> Iterator[None]:
    """Make a run folder, and remove what was made of it where a job fails that left nothing in it.

    Raises:
        CheckpointError: it is unwritable or its disk full: told before the first step rather than after an epoch.
    """
    made = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
    try:
        _probe(run_dir)
        yield
    except BaseException:
        with suppress(OSError):
            for folder in made:
                folder.rmdir()
        raise


def _probe(run_dir: Path) -> None:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir) as probe:
            probe.write(b"ds2")
    except OSError as error:
        raise CheckpointError(
            f"run folder {run_dir} cannot be written: {error}; give another with run_dir=..."
        ) from error
    free = shutil.disk_usage(run_dir).free
    if free < _FREE_BYTES_AT_START:
        raise CheckpointError(
            f"run folder {run_dir} has {free / 2**20:.0f} MiB left on its disk, "
            f"{_FREE_BYTES_AT_START / 2**20:.0f} are needed to start: free some or give another with run_dir=..."
        )
