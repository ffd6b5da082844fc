"""A training that kills itself with -9 in the middle of a step or of a save.

python killed_job.py PHASE NUMBER FRACTION OVERRIDE...
PHASE: step, save, or none (it ends by itself). In the NUMBER-th one of this process a thread waits for that fraction of
what the one before took, says what the main thread is doing, and kills.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

from ds2.cli import main
from ds2.training import run_folder
from ds2.training.trainer import Trainer

PHASES: dict[str, tuple[Any, str]] = {"step": (Trainer, "step"), "save": (run_folder, "prepare_state")}


def strike_in(phase: str, number: int, fraction: float) -> None:
    """Let one call of the phase's function be the last."""
    owner, name = PHASES[phase]
    healthy = getattr(owner, name)
    took_s: list[float] = []
    main_thread = threading.get_ident()

    def kill() -> None:
        frame = sys._current_frames()[main_thread]
        print(f"killed in {phase} {number}: {os.path.basename(frame.f_code.co_filename)} {frame.f_code.co_name}")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    def timed(*arguments: Any, **options: Any) -> Any:
        began_s = time.monotonic()
        last = len(took_s) == number - 1
        if last:
            threading.Timer(fraction * took_s[-1], kill).start()
        result = healthy(*arguments, **options)
        took_s.append(time.monotonic() - began_s)
        if last:
            time.sleep(3600)  # sooner done than the one before: the kill comes at its end
        return result

    setattr(owner, name, timed)


if __name__ == "__main__":
    phase, number, fraction, *overrides = sys.argv[1:]
    if phase != "none":
        strike_in(phase, int(number), float(fraction))
    sys.exit(main(["train", *overrides]))
