"""One rank of `ds2 train`, which may go wrong on purpose, for the tests that start it under mpirun or torchrun.

python rank_job.py FAULT RANK STEP OVERRIDE... [-- FAULT RANK STEP OVERRIDE...]
FAULT: none, kill, throw, hang, freeze, poison (one loss is NaN), lose (the device fails every call from now on),
signal (SIGTERM to this rank alone),
launcher (SIGTERM to who started it), signal:PHASE (as signal, when statistics, evaluation or saving begin),
unrecorded (none, but what CUDA graphs would be is launched one by one),
pieces (none, but recurrent layers take batches in three pieces, as they do side by side on a GPU)
A fault before a step strikes the first time only, not after torchrun has started its ranks again.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import torch

from ds2.audio.features import Features
from ds2.cli import main
from ds2.distributed.launcher import launched
from ds2.distributed.watchdog import Watchdog
from ds2.model.wavefront import Wavefront
from ds2.recognition.recogniser import Recogniser
from ds2.system.tensor_file import load
from ds2.training import run_folder, stopping, trainer
from ds2.training.passes import GraphedPasses, Passes
from ds2.training.trainer import Trainer


def strike(fault: str, trainer: Trainer) -> None:
    """Do what the fault is called."""
    if fault == "kill":
        wait_for_rank_0(trainer)
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "throw":
        raise RuntimeError("thrown on purpose")
    elif fault == "hang":
        time.sleep(3600)
    elif fault == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
    elif fault == "launcher":
        os.kill(os.getppid(), signal.SIGTERM)
    elif fault == "lose":
        lose(trainer.device)
    elif fault == "poison":
        passes = trainer.passes
        healthy = passes.losses

        def poisoned(inputs: Any, context: Any) -> Any:
            passes.losses = healthy  # type: ignore[method-assign]
            losses, objective = healthy(inputs, context)
            poison = torch.tensor([float("nan")] + [0.0] * (len(losses) - 1))
            return losses + poison, objective + poison

        passes.losses = poisoned  # type: ignore[method-assign]


def wait_for_rank_0(trainer: Trainer) -> None:
    """Wait until the last state is saved and rank 0 waits for this rank, however busy the machine is."""
    (reports,) = (thread.ranks for thread in threading.enumerate() if isinstance(thread, Watchdog))
    step, every = trainer.progress.step, trainer.config.checkpoint.every_steps
    while load(trainer.run_dir / "trainer.safetensors")[1]["progress"]["step"] < step - step % every:
        time.sleep(0.05)
    # Two of its reports, a second apart, from one collective: it ended those before together with this rank.
    while not (reports[0].status.collective and reports[0].reported_s > reports[0].changed_s):
        time.sleep(0.05)


def notice_after(seconds: float) -> None:
    """Set the watchdog's limit from now on, so that none of what came before can exceed it on a busy machine."""
    for thread in threading.enumerate():
        if isinstance(thread, Watchdog):
            thread.timeout_s = seconds


def lose(device: torch.device) -> None:
    """Let a kernel of a GPU fail, after which every call fails; of a CPU let it look so."""
    if device.type == "cuda":
        torch.zeros(1, device=device)[torch.ones(1, dtype=torch.long, device=device)]  # found out later
        return
    reason = "CUDA error: unspecified launch failure"
    stopping.why_lost = lambda device: reason
    raise torch.AcceleratorError(reason)


def run(fault: str, rank: str, step: str, *overrides: str) -> int:
    """Train once; the fault strikes one rank before one step."""

    def faulty_step(self: Trainer, *arguments: Any) -> float | None:
        taken = self.progress.step + self.progress.skipped
        first_time = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if first_time and taken == int(step):
            if fault in ("hang", "freeze"):
                notice_after(HANG_S)
            if launched().rank == int(rank):
                strike(fault, self)
        return HEALTHY_STEP(self, *arguments)

    Trainer.step = faulty_step  # type: ignore[method-assign]
    if fault == "unrecorded":
        GraphedPasses.forward, GraphedPasses.backward = Passes.forward, Passes.backward  # type: ignore[method-assign]
    if fault == "pieces":
        in_pieces = Wavefront(2, 48 * 48, 2, lambda batch: ((0.0, 0.0), (0.0, 0.0)), fixed=3)
        trainer.choose_wavefront = lambda *_, **__: in_pieces
    else:
        trainer.choose_wavefront = HEALTHY_CHOICE
    if fault.startswith("signal:") and launched().rank == int(rank):
        _signal_in(*PHASES[fault.partition(":")[2]])
    return main(["train", *overrides])


def _signal_in(owner: Any, name: str) -> None:
    healthy = getattr(owner, name)

    def signalled(*arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return healthy(*arguments, **options)

    setattr(owner, name, signalled)


HANG_S = 8.0
HEALTHY_STEP, HEALTHY_CHOICE = Trainer.step, trainer.choose_wavefront
PHASES = {
    "statistics": (Features, "estimate"),
    "evaluation": (Recogniser, "recognise"),
    "saving": (run_folder, "prepare_state"),
}

if __name__ == "__main__":
    jobs: list[list[str]] = [[]]
    for argument in sys.argv[1:]:
        if argument == "--":
            jobs.append([])
        else:
            jobs[-1].append(argument)
    sys.exit(max(run(*job) for job in jobs))
