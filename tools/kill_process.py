"""Run a command in a folder, and kill it with -9, or one process of those that it started; needs /proc (Linux)."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

OTHERS_END_S = 60.0


def run(
    command: Sequence[str], folder: Path, kill_after_s: float = 0.0, one_of: random.Random | None = None
) -> int | None:
    """Run a command in a folder: its status, or None where it was killed.

    Args:
        command: what to run.
        folder: where it writes; `tmp` in it is its temporary folder.
        kill_after_s: 0 does not kill.
        one_of: draws the one process among ds2's that is killed; None kills all.
    """
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ, "TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1", "DS2_CACHE_DIR": str(folder / "cache"),
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }  # fmt: skip
    with (folder / "said.txt").open("ab") as said:
        job = subprocess.Popen(command, cwd=folder, env=environment, stdout=said, stderr=said, start_new_session=True)
        try:
            return job.wait(kill_after_s or None)
        except subprocess.TimeoutExpired:
            family = [job.pid, *_descendants(job.pid)]
            ranks = [pid for pid in family if _is_python(pid)] if one_of else []
            if ranks and one_of:
                _kill([one_of.choice(ranks)])
                with suppress(subprocess.TimeoutExpired):
                    job.wait(OTHERS_END_S)
                    return None
                said.write(b"ranks went on although one of them was killed\n")
            _kill([job.pid, *_descendants(job.pid)])
            job.wait()
            return None


def _descendants(process: int) -> list[int]:
    found = []
    with suppress(OSError):
        for task in Path(f"/proc/{process}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *_descendants(child)]
    return found


def _is_python(process: int) -> bool:
    with suppress(OSError):
        return (
            b"ds2.cli" in Path(f"/proc/{process}/cmdline").read_bytes()
            and b"mpirun" not in Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")[0]
        )
    return False


def _kill(processes: Sequence[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, 9)
