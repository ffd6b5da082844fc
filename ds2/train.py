"""The training loop: run folder, trainer, then epochs of steps, evaluation and saves."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType

from ds2.config.convert import save_config
from ds2.config.schema import Config
from ds2.distributed.communicator import Communicator
from ds2.distributed.launch import connect, rank_log
from ds2.metrics import RunLog, progress_bar
from ds2.optim import learning_rate, set_learning_rate
from ds2.progress import Progress
from ds2.system.machine import git_commit
from ds2.system.tensor_file import CheckpointError
from ds2.trainer import Trainer

log = logging.getLogger(__name__)
_FREE_BYTES_AT_START = 256 * 2**20


class Interrupts:
    """Turns SIGINT, SIGTERM or SIGUSR1 into a flag that ranks agree on between steps; a second SIGINT stops at once.

    SIGUSR1 is the one that mpirun passes on to its ranks. Slurm sends SIGTERM twice, to the ranks and through srun:
    only Ctrl-C, which a person repeats, means haste.
    """

    received: int = 0  # by this process
    agreed: int = 0  # by any rank, known to all: what the loop acts on

    def __enter__(self) -> Interrupts:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        self._old = {s: signal.signal(s, self._handle) for s in numbers}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received == number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.received:
            name = signal.Signals(number).name
            log.warning("%s: saving after this step, then stopping; Ctrl-C twice stops at once", name)
        self.received = number


@dataclass
class Window:
    """Sums over the steps since the last log line."""

    progress: Progress
    losses: list[float] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._audio_s = self.progress.audio_s

    def add(self, loss: float | None) -> None:
        """Count one step; None is a skipped one."""
        self.steps += 1
        if loss is not None:
            self.losses.append(loss)

    @property
    def loss(self) -> float:
        """Mean over the steps that were not skipped."""
        return sum(self.losses) / len(self.losses) if self.losses else float("nan")

    @property
    def audio_s_per_s(self) -> float:
        """Seconds of training audio a second of wall time."""
        return (self.progress.audio_s - self._audio_s) / max(time.monotonic() - self._began, 1e-9)

    def values(self, trainer: Trainer, rate: float) -> dict[str, float]:
        """The scalars of one log line."""
        split = trainer.timer.means(self.steps)
        return {
            "loss": self.loss,
            "learning_rate": rate,
            "gradient_norm": trainer.grad_norm,
            "epoch": self.progress.epoch,
            "skipped_steps": self.progress.skipped,
            "infeasible_utterances": self.progress.infeasible,
            "audio_s_per_s": self.audio_s_per_s,
            "step_s": (time.monotonic() - self._began) / self.steps,
            **{f"{name}_s": seconds for name, seconds in split.items()},
        }


def train(config: Config, run_dir: Path) -> int:
    """Train from the config, or go on where `run_dir` stopped.

    Args:
        config: a checked configuration.
        run_dir: receives the resolved config, log, TensorBoard, model files and the trainer state.

    Returns:
        0 when training ended by itself; 128 + n when signal n stopped it after a save.

    Raises:
        ConfigError, CorpusError, AudioError, CheckpointError, TrainingError: with the reason and the way out.
    """
    with connect(config.comm, config.device) as comm:
        probe_run_dir(run_dir)
        with sole_use(run_dir, comm), rank_log(comm, run_dir), Interrupts() as interrupts:
            return _train(config, run_dir, comm, interrupts)


@contextmanager
def sole_use(run_dir: Path, comm: Communicator) -> Iterator[None]:
    """Let one job at a time write a run folder: rank 0 locks a file in it, and the system unlocks what a job leaves.

    Raises:
        CheckpointError: another process holds the lock; names it.
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
        file.truncate(0)
        file.write(f"process {os.getpid()} on {comm.host}")
        file.flush()
        yield


def _train(config: Config, run_dir: Path, comm: Communicator, interrupts: Interrupts) -> int:
    trainer = Trainer(config, run_dir, comm)
    progress = trainer.progress
    if comm.rank == 0:
        save_config(config, run_dir / "config.yaml")
    board = RunLog(run_dir, resume_step=progress.step, writes=comm.rank == 0)
    facts = {"git_commit": git_commit(), "epoch": progress.epoch, "ranks": comm.world}
    board.event("resume" if progress.step else "start", progress.step, facts)
    log.info("%s; run folder %s", trainer.describe(), run_dir)
    while not (reason := finished(config, progress)):
        complete = run_epoch(trainer, board, interrupts)
        due = evaluation_due(trainer, complete)
        if interrupts.agreed or not complete or due:  # an evaluation may be long: who is killed in it loses no step
            trainer.save()
        if interrupts.agreed:
            reason = signal.Signals(interrupts.agreed).name
            break
        with comm.whereabouts.slow("evaluation"):
            trainer.keep_last(trainer.evaluate(board) if due else {})
        if complete:
            progress.epoch, progress.batch = progress.epoch + 1, 0
            trainer.save()
    log.info("stopped after step %d: %s", progress.step, reason)
    board.close()
    return 128 + interrupts.agreed if interrupts.agreed else 0


def run_epoch(trainer: Trainer, board: RunLog, interrupts: Interrupts) -> bool:
    """Take the steps that are left of the running epoch; returns whether it was finished rather than stopped."""
    config, progress = trainer.config, trainer.progress
    plan = trainer.plan()
    batches = trainer.epoch(plan)
    trainer.model.train()
    epoch, window, clock, saved_at = Window(progress), Window(progress), time.monotonic(), time.monotonic()
    with progress_bar(
        len(plan), progress.epoch, config.train.epochs, progress.batch, shown=trainer.comm.rank == 0
    ) as bar:
        while progress.batch < len(plan) and not interrupts.agreed and not finished(config, progress):
            group = plan[progress.batch : progress.batch + config.train.accumulate]
            done = (progress.epoch - 1 + progress.batch / len(plan)) / config.train.epochs
            rate = learning_rate(config.optim, progress.step, progress.epoch, done)
            set_learning_rate(trainer.optimizer, rate)
            loss = trainer.step(batches, group)
            epoch.add(loss)
            window.add(loss)
            now = time.monotonic()
            times_s, signals = zip(*trainer.comm.allgather((now - clock, interrupts.received)), strict=True)
            progress.elapsed_s, clock, interrupts.agreed = progress.elapsed_s + times_s[0], now, max(signals)
            bar.update(len(group))
            if window.steps >= config.train.log_every_steps or progress.batch == len(plan):
                values = window.values(trainer, rate)
                board.scalars("train", progress.step, values)
                left_s = progress.elapsed_s * (1 - done) / max(done, 1e-9)
                bar.set_postfix_str(
                    f"loss {values['loss']:.2f}, {values['audio_s_per_s']:.0f} audio s/s, {left_s / 60:.0f} min left"
                )
                window = Window(progress)
            timed = 0 < 60 * config.checkpoint.every_minutes < now - saved_at
            stepped = config.checkpoint.every_steps > 0 and progress.step % config.checkpoint.every_steps == 0
            if timed or stepped:
                trainer.save()
                saved_at = time.monotonic()
    if epoch.steps:  # none where the run goes on from the end of an epoch
        log.info(
            "epoch %d/%d, step %d: loss %.2f, %.0f audio s/s", progress.epoch, config.train.epochs, progress.step,
            epoch.loss, epoch.audio_s_per_s,
        )  # fmt: skip
    return progress.batch == len(plan)


def evaluation_due(trainer: Trainer, complete: bool) -> bool:
    """Whether the dev set is decoded now: at the epochs that the config names, and always when training ends."""
    config, epoch = trainer.config.train, trainer.progress.epoch
    regular = epoch >= config.evaluate_from_epoch and epoch % config.evaluate_every_epochs == 0
    return bool(trainer.dev) and (regular or not complete or epoch == config.epochs)


def finished(config: Config, progress: Progress) -> str:
    """Why there is nothing left to train, or ''; judged from the state alone, so that a resumed run agrees."""
    limits, epochs_done = config.train, progress.epoch - 1
    if epochs_done >= limits.epochs:
        return f"{epochs_done} epochs trained (train.epochs)"
    if limits.max_steps and progress.step >= limits.max_steps:
        return f"{progress.step} steps taken (train.max_steps)"
    if limits.max_minutes and progress.elapsed_s >= 60 * limits.max_minutes:
        return f"{progress.elapsed_s / 60:.1f} minutes trained (train.max_minutes)"
    patience = limits.early_stop_epochs
    if patience and progress.best_epoch and epochs_done - progress.best_epoch >= patience:
        return f"no better dev WER for {patience} epochs (train.early_stop_epochs)"
    return ""


def probe_run_dir(run_dir: Path) -> None:
    """Find an unwritable folder or a full disk before the first step rather than after an epoch."""
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
