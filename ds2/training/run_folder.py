"""A run folder: its creation, its lock (one job at a time writes it), and the files of a run."""

import fcntl
import logging
import os
import secrets
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from ds2.config.schema import Config
from ds2.data.splits import ScoredData
from ds2.distributed.communicator import Communicator
from ds2.distributed.process_group import LostRankError
from ds2.model.checkpoint import prepare_model
from ds2.system.files import host_id, remove_stale, sync
from ds2.system.machine import git_commit
from ds2.system.tensor_file import CheckpointError, TensorCopies, read_metadata
from ds2.text.alphabet import Alphabet
from ds2.training.state import Shard, TrainState, prepare_state

log = logging.getLogger(__name__)
_FREE_BYTES_AT_START = 256 * 2**20
_WRITER_NICE = 10


@contextmanager
def sole_use(run_dir: Path, comm: Communicator) -> Iterator[None]:
    """Let one job at a time write a run folder: rank 0 locks a file in it, which the system unlocks when the job ends.

    Where ranks come and go each process holds a lock that these share.

    Half-written files of killed jobs are removed. A job that fails before it wrote anything removes its lock file.

    Raises:
        CheckpointError: another process holds the lock; names it. Or it removed the folder just then.
    """
    if comm.rank != 0:
        yield
        return
    with (run_dir / "lock").open("a+") as file:
        try:
            fcntl.lockf(file, (fcntl.LOCK_SH if comm.elastic else fcntl.LOCK_EX) | fcntl.LOCK_NB)
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
        last = _writer(comm)
        file.write(f"ranks that come and go, of which {last} started last" if comm.elastic else last)
        file.flush()
        os.fsync(file.fileno())  # `check_shared` reads it on other hosts
        remove_stale(run_dir)
        try:
            yield
        except BaseException:
            with suppress(OSError):
                if os.listdir(run_dir) == ["lock"]:
                    (run_dir / "lock").unlink()
            raise


def _writer(comm: Communicator) -> str:
    return f"process {os.getpid()} on {comm.host}"


def check_shared(run_dir: Path, config: Config, comm: Communicator) -> None:
    """Warn where ranks see another run folder than rank 0, which has locked its own; all ranks call it together.

    Raises:
        CheckpointError: and each rank is to write a part of the state (`checkpoint.sharded`).
    """
    if comm.elastic or comm.world == 1:  # ranks that come and go meet in the folder
        return
    written, seen = comm.broadcast(_writer(comm)), ""
    with suppress(OSError):
        # Rank 0 would lose its lock by closing the file.
        seen = written if comm.rank == 0 else (run_dir / "lock").read_text()
    apart = [host for host in comm.allgather("" if seen == written else comm.host) if host]
    if not apart:
        return
    what = f"{len(apart)} of {comm.world} ranks, such as on {apart[0]}, do not see rank 0's run folder {run_dir}"
    if config.checkpoint.sharded:
        raise CheckpointError(
            f"{what}, into which checkpoint.sharded=true lets each rank write: give a run_dir that all hosts share, or "
            "checkpoint.sharded=false"
        )
    if comm.rank == 0:
        log.warning(
            "%s: it alone has the checkpoints, and a run whose rank 0 is on another host next time begins anew; give a "
            "run_dir that all hosts share", what,
        )  # fmt: skip


@contextmanager
def make_folder(run_dir: Path) -> Iterator[None]:
    """Make a run folder; if the block fails and leaves it empty, remove the folders that were made.

    Raises:
        CheckpointError: it cannot be written or its disk is full; raised before the first step, not after an epoch.
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


class BackgroundWriter:
    """Runs functions that write files, in order, in a thread while training goes on.

    Args:
        superseded: whether another process writes these files by now; then nothing is written, and errors do not count.
    """

    def __init__(self, superseded: Callable[[], bool] = lambda: False) -> None:
        self._superseded = superseded
        self._thread = ThreadPoolExecutor(1, "ds2-save", _yield_to_steps)
        self._running: list[Future[None]] = []
        self._failed = False

    def run(self, write: Callable[[], None]) -> Future[None]:
        """Run a function after all earlier ones; if one of these fails, it is not called."""

        def after_previous() -> None:
            if self._failed or self._superseded():
                return
            try:
                write()
            except Exception as error:
                if not (isinstance(error, CheckpointError) and self._superseded()):
                    self._failed = True
                    raise

        self._running.append(self._thread.submit(after_previous))
        return self._running[-1]

    def busy(self) -> bool:
        """Return whether a function is running or waiting to run; raises the error of one that failed."""
        while self._running and self._running[0].done():
            self._running.pop(0).result()
        return bool(self._running)

    def wait(self) -> None:
        """Wait for all functions; raises the error of the first one that failed."""
        wait(self._running)
        self.busy()


def _yield_to_steps() -> None:
    """Lower the priority of this thread; on Linux threads have priorities, and those that they start inherit them."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _WRITER_NICE)


class RunFiles:
    """Writes the models and the trainer state of a run in the background; all ranks call it, rank 0 writes.

    The state is copied at the call, so that later steps do not change it. With `checkpoint.sharded` each rank copies
    and writes its part of it; such a save is given up where a rank is lost before it is complete.

    Args:
        state: what is written, as it is at each call.
        precision: that the model is trained in.
        dev: what the scores are measured on; None without a dev set.
    """

    unsaved = False  # whether ranks have changed since a sharded save, which may be incomplete: the next step is saved
    _save_name = ""  # of the last sharded save by the present ranks

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        state: TrainState,
        alphabet: Alphabet,
        precision: str,
        dev: ScoredData | None,
        comm: Communicator,
    ) -> None:
        self.run_dir, self.config, self.state = run_dir, config, state
        self.alphabet, self.precision, self.dev, self.comm = alphabet, precision, dev, comm
        self._writer = BackgroundWriter(comm.superseded)
        self._copies = TensorCopies()
        self._state_written: Future[None] | None = None
        self._held: Callable[[], None] | None = None  # writes the state of a step that another rank may not have ended
        self._warned = False

    def keep_best(self, scores: Mapping[str, float]) -> bool:
        """Write `best.safetensors` where these are the best scores so far; returns whether they are.

        Args:
            scores: "wer" and "cer" of the dev set; `train.metric` is compared first, then the other one.
        """
        progress = self.state.progress
        first, second = ("cer", "wer") if self.config.train.metric == "cer" else ("wer", "cer")
        best = {"wer": progress.best_wer, "cer": progress.best_cer}
        better = (scores[first], scores[second]) < (best[first], best[second])
        if better:
            progress.best_wer, progress.best_cer, progress.best_epoch = scores["wer"], scores["cer"], progress.epoch
            self._save_model("best", scores)
        return better

    def keep_last(self, metrics: Mapping[str, float]) -> None:
        """Write `last.safetensors`, and with `checkpoint.keep_last` above 1 that many epochs by number."""
        if self._state_written is None and not self.comm.elastic:
            self.save_and_wait()  # a run that is killed with a model and no state could not go on
        self._save_model("last", metrics)
        keep = self.config.checkpoint.keep_last
        if keep > 1 and self.comm.rank == 0:
            self._save_model(f"epoch-{self.state.progress.epoch:04d}", metrics)
            self._writer.run(lambda: _remove_all_but(keep, self.run_dir))

    def has_last_model(self) -> bool:
        """Return whether `last.safetensors` was written at this step, or no step of this epoch was taken."""
        step = None
        if self.comm.rank == 0 and self.state.progress.batch:
            with suppress(CheckpointError, KeyError):
                step = read_metadata(self.run_dir / "last.safetensors")["metrics"]["step"]
        return not self.state.progress.batch or self.comm.broadcast(step) == self.state.progress.step

    def save(self, *, alone: bool = False) -> None:
        """Write the trainer state, from which the run goes on exactly as if it had not stopped.

        At most one state is being written: this waits for the previous one, not for models.

        Args:
            alone: rank 0 writes all of it, without a call to the others.

        Raises:
            LostRankError: see `Communicator.broadcast`; not with `alone`.
        """
        self._prepare_state(alone=alone)
        self.write_held()

    def save_and_wait(self, *, alone: bool = False) -> None:
        """As `save`, and wait until everything is written."""
        self.save(alone=alone)
        self.wait()

    def _prepare_state(self, *, alone: bool = False) -> None:
        """Copy what this rank writes of the state, if anything, for `write_held`."""
        self._held = None
        sharded = self.config.checkpoint.sharded and self.comm.world > 1 and not alone
        if self.comm.rank == 0 or sharded:
            with self.comm.status.slow("saving"):
                wait([self._state_written] if self._state_written is not None else [])
                self._writer.busy()
                shard = self._next_shard() if sharded else None
                options: dict[str, Any] = {"shard": shard, "check": self._flush_log, "copies": self._copies}
                self._held = prepare_state(self.run_dir, self.state, self.config, **options)
        self.unsaved = False

    def _next_shard(self) -> Shard:
        """Begin a save by all ranks: rank 0, which has completed the one before, says its name."""
        name = self._save_name = self.comm.broadcast(secrets.token_hex(8))

        def is_broken() -> bool:
            with suppress(LostRankError):
                self.comm.check()
                return self._save_name != name
            return True

        return Shard(name, self.comm.rank, self.comm.world, self.config.comm.timeout_s, is_broken)

    def give_up_shards(self) -> None:
        """Give up a sharded save that is not complete, because its ranks are no longer together."""
        self.unsaved, self._save_name = self.unsaved or self._save_name != "", ""

    def save_in_epoch(self) -> None:
        """As `save`, in mid-epoch; warns where the previous save is not complete, so that the run waits for it.

        Where ranks come and go, the state is copied now and held back until `write_held`, when all ranks have ended the
        step: they would repeat it with fewer ranks if this one was lost, and a run that resumed from the file would
        differ.
        """
        late = self._state_written is not None and not self._state_written.done()
        if late and self.comm.rank == 0 and not self._warned:
            self._warned = True
            log.warning(
                "the run waits for its saves: writing one to %s takes longer than the time from one to the next. Raise "
                "checkpoint.every_steps or checkpoint.every_minutes, or give a run_dir on a faster disk", self.run_dir,
            )  # fmt: skip
        self._prepare_state()
        if not (self.comm.elastic and self.comm.world > 1):
            self.write_held()

    def write_held(self) -> None:
        """Write the state that `save_in_epoch` holds back, if any, now that all ranks have ended its step."""
        if self._held is not None:
            self._state_written = self._writer.run(self._held)
        self._held = None

    def drop_held(self) -> None:
        """Forget the state that `save_in_epoch` holds back."""
        self._held = None

    def check(self) -> None:
        """Raise the error of a write that failed."""
        self._writer.busy()

    def remove_partial_files(self) -> None:
        """Remove half-written files of lost ranks; a rank that wakes up can then not complete them."""
        own = f".{host_id()}.{os.getpid()}."
        others = [folder for folder in self.run_dir.glob(".*.partial") if own not in folder.name]
        if self.comm.rank == 0 and not self.comm.superseded():  # else some may be those of the next rank 0
            for folder in others:
                shutil.rmtree(folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Wait until everything is written, also after an error, but then not for other ranks."""
        if error[0] is not None:
            self.give_up_shards()
        self.wait()

    def wait(self) -> None:
        """Wait until everything is written; raises the first error."""
        with self.comm.status.slow("saving"):
            self._writer.wait()

    def _save_model(self, name: str, metrics: Mapping[str, float]) -> None:
        """Write the weights that evaluation uses as one self-contained model file."""
        if self.comm.rank != 0:
            return
        state, progress = self.state, self.state.progress
        position = {"epoch": progress.epoch, "step": progress.step}
        facts: dict[str, Any] = {**metrics, **position, "precision": self.precision, "git_commit": git_commit()}
        if self.dev is not None and metrics:
            facts["dev"] = asdict(self.dev)
        path = self.run_dir / f"{name}.safetensors"
        parts = (state.evaluated, state.features, self.alphabet, self.config)
        self._writer.run(prepare_model(path, *parts, facts, self._flush_log))

    def _flush_log(self) -> None:
        """Flush the log, for a run that resumes from a file counts on its lines up to there.

        Raises:
            CheckpointError: another process writes; a temporary file that it has not seen ends with that.
        """
        if self.comm.superseded():
            raise CheckpointError(f"{self.run_dir} is written by another process by now, as this one did not answer")
        sync(self.run_dir / "log.jsonl")


def _remove_all_but(keep: int, run_dir: Path) -> None:
    """Remove the models of all epochs but the last ones."""
    models = sorted(run_dir.glob("epoch-*.safetensors"), key=lambda path: (len(path.name), path.name))  # 10000 last
    for old in models[:-keep]:
        with suppress(FileNotFoundError):  # a user may remove some too
            old.unlink()
