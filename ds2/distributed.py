"""Ranks that train together: one small interface, a single process as its first member, and the choice between members.

`mpi.py` and `nccl.py` hold the other two. A single process never imports MPI.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ds2.agreement import program
from ds2.config.device import resolve_device
from ds2.config.schema import CommConfig, ConfigError
from ds2.system.errors import UserError
from ds2.system.machine import usable_cores
from ds2.watchdog import Whereabouts

log = logging.getLogger(__name__)
T = TypeVar("T")
Moment = float | torch.cuda.Event  # seconds of `time.perf_counter`, or an event on a CUDA stream
_YIELD_TO_RANK_0_S = (
    1.0  # an error that all ranks meet is told once, by rank 0, whose exit ends the others in this time
)


class DisagreementError(UserError):
    """A rank runs or sees something else than rank 0; the message names it."""


class Pending(Protocol):
    """A sum that is under way."""

    def wait(self) -> tuple[Moment, Moment]:
        """Return when the sum is in place, for what the caller does next on its device; and when it began and ended."""
        ...


class Communicator:
    """Ranks as one of them sees them. This class is the single process, for which every call is done at once.

    All ranks make the same calls in the same order. Every sum is added up in a fixed order, so equal inputs on an equal
    number of ranks give equal bits.

    Attributes:
        name: single, mpi or nccl.
        rank, world: this process's number and how many there are.
        host: name of its machine.
        device: where its tensors are.
        whereabouts: step and phase that it is in, for whoever must report that it failed or hangs.
    """

    name = "single"
    rank, world = 0, 1

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.host = platform.node()
        self.whereabouts = Whereabouts()

    def allgather(self, value: T) -> list[T]:
        """Return every rank's small picklable value, in order of rank."""
        return [value]

    def broadcast(self, value: T) -> T:
        """Return rank 0's small picklable value."""
        return value

    def broadcast_(self, tensor: Tensor) -> None:
        """Overwrite a contiguous tensor with rank 0's."""

    def sum_(self, tensor: Tensor) -> None:
        """Overwrite a small contiguous float tensor with its sum over ranks."""

    def start_sum(self, tensor: Tensor) -> Pending:
        """Begin to overwrite a contiguous float tensor with its sum over ranks; leave it alone until `wait` returns."""
        raise NotImplementedError("a single process has nothing to sum")

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Run the block on rank 0, then on one rank of every other host, then on all: what one writes, others find."""
        yield

    def broadcast_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return rank 0's tensors, on the CPU where they are not this rank's own; what others pass is ignored."""
        shapes = self.broadcast({name: (value.shape, value.dtype) for name, value in tensors.items()})
        if self.rank != 0:
            tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
        tensors = {name: value.contiguous() for name, value in tensors.items()}
        for name in shapes:
            self.broadcast_(tensors[name])
        return tensors

    def agree(self, facts: Mapping[str, object], remedy: str) -> None:
        """Check that every rank holds the facts, by name, that rank 0 holds.

        Raises:
            DisagreementError: on all ranks; names the first that differs, with its host, what differs, and the remedy.
        """
        host, expected = self.broadcast((self.host, dict(facts)))
        differing = ", ".join(
            f"{name}: {facts.get(name)} instead of {value}"
            for name, value in expected.items()
            if facts.get(name) != value
        )
        mine = f"rank {self.rank} on {self.host} differs from rank 0 on {host}: {differing}" if differing else ""
        first = next((text for text in self.allgather(mine) if text), "")
        if first:
            raise DisagreementError(f"{first}; {remedy}")

    def abort(self, status: int) -> None:
        """End all ranks at once with an exit status."""
        sys.exit(status)

    def close(self) -> None:
        """Let go of what was opened; all ranks call it together."""


@contextmanager
def connect(config: CommConfig, device: str) -> Iterator[Communicator]:
    """Join the ranks that the launcher started, or be alone; an error inside the block ends the job on all ranks.

    Args:
        config: which member, and the watchdog's limit.
        device: auto, cpu, cuda (one GPU a rank, by its number on its host) or cuda:N.

    Raises:
        ConfigError: the member that was asked for cannot work here; the reason and the way out.
    """
    launched = launched_world()
    if config.backend == "single" or (launched == 1 and config.backend == "auto"):
        if launched > 1:
            raise ConfigError(
                f"comm=single, but the launcher started {launched} ranks, which would all write one run folder: "
                "start without mpirun, or use comm=auto"
            )
        yield Communicator(resolve_device(device))
        return
    comm, reason = _join(config, device, launched)
    try:
        _share_cores(comm)
        _show(comm, reason)
        comm.agree(program(), "install the same on all hosts")
        yield comm
    except BaseException as error:
        _end_job(comm, error)
        raise
    comm.close()


def _join(config: CommConfig, device: str, launched: int) -> tuple[Communicator, str]:
    """Make the MPI or NCCL member; returns it and why it was chosen."""
    try:
        from ds2.mpi import MpiCommunicator
        from ds2.mpi_world import open_world
    except ImportError as error:
        raise ConfigError(
            f"{launched} ranks were started, but MPI cannot be loaded ({error}): pip install 'ds2-speech[mpi]' for "
            "mpi4py and Open MPI, or mpi4py built for your cluster's MPI"
        ) from error
    world = open_world(launched)
    if config.backend == "mpi":
        return MpiCommunicator(world, resolve_device(device, world.local_rank), config.timeout_s), "comm=mpi"
    chosen = resolve_device(device, world.local_rank)
    obstacle = world.first(_nccl_obstacle(chosen, world.share_a_gpu(chosen)))
    if config.backend == "auto" and obstacle:
        return MpiCommunicator(world, chosen, config.timeout_s), f"comm=auto: no NCCL, {obstacle}"
    if obstacle:
        raise ConfigError(f"comm=nccl cannot work here: {obstacle}; use comm=mpi or comm=auto")
    from ds2.nccl import NcclCommunicator

    reason = "comm=nccl" if config.backend == "nccl" else "comm=auto: every rank has a GPU of its own"
    return NcclCommunicator(world, chosen, config.timeout_s), reason


def _nccl_obstacle(device: torch.device, shared: bool) -> str:
    if device.type != "cuda":
        return f"a rank runs on {device}"
    if shared:
        return "two ranks share a GPU"
    from ds2.nccl import load_library

    try:
        load_library()
    except OSError as error:
        return f"libnccl.so.2 cannot be loaded ({error})"
    return ""


def launched_world() -> int:
    """The number of ranks that mpirun, mpiexec or srun started, from their environment variables; 1 without them."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 1


def launched_rank() -> int:
    """This process's rank by the launcher's environment variables, before MPI is up."""
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID"):
        if launched_world() > 1 and os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 0


def yield_to_rank_0() -> None:
    """Wait, before telling of an error, for rank 0 to tell of the same one: its exit then ends this rank in silence."""
    if launched_rank() != 0:
        time.sleep(_YIELD_TO_RANK_0_S)


def _share_cores(comm: Communicator) -> None:
    """Split the cores among ranks that the launcher left on the same ones, unless the user set OMP_NUM_THREADS."""
    mine = (comm.host, sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [])
    sharing = comm.allgather(mine).count(mine)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() // sharing))


def _show(comm: Communicator, reason: str) -> None:
    from ds2.mpi_world import library_version

    rows = comm.allgather((comm.host, os.getpid(), _device_name(comm.device), torch.get_num_threads()))
    if comm.rank == 0:
        width = max(len("host"), *(len(row[0]) for row in rows))
        lines = [f"  rank  {'host':<{width}}  process  threads  device"]
        for rank, (host, process, device, threads) in enumerate(rows):
            lines.append(f"  {rank:>4}  {host:<{width}}  {process:>7}  {threads:>7}  {device}")
        table = "\n".join(lines)
        log.info("%d ranks over %s (%s); %s\n%s", comm.world, comm.name, reason, library_version(), table)


def _device_name(device: torch.device) -> str:
    return f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)


def _end_job(comm: Communicator, error: BaseException) -> None:
    """Say on the terminal who failed where and why, and end every rank."""
    status = 130 if isinstance(error, KeyboardInterrupt) else 1
    expected = isinstance(error, UserError | OSError | KeyboardInterrupt)
    yield_to_rank_0()
    trace = "" if expected else "".join(traceback.format_exception(error))
    reason = f"{error}" if expected and str(error) else f"{type(error).__name__}: {error}"
    place = f"rank {comm.rank} on {comm.host} failed at {comm.whereabouts}"
    print(f"{trace}ds2: {place}: {reason}", file=sys.stderr, flush=True)
    comm.abort(2 if expected and status == 1 else status)


@contextmanager
def rank_log(comm: Communicator, run_dir: Path) -> Iterator[None]:
    """Give each of several ranks a log file `run_dir/ranks/rank-0000.log`, and the terminal to rank 0 alone."""
    if comm.world == 1:
        yield
        return
    folder = run_dir / "ranks"
    folder.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(folder / f"rank-{comm.rank:04d}.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter(f"%(asctime)s {comm.host} rank {comm.rank} %(levelname)s %(message)s"))
    root = logging.getLogger()
    terminal = [h for h in root.handlers if comm.rank != 0]
    change(root.removeHandler, terminal)
    root.addHandler(handler)
    try:
        yield
    except BaseException:
        change(root.removeHandler, [h for h in root.handlers if h is not handler])  # `connect` tells the terminal
        log.exception("failed at %s", comm.whereabouts)
        raise
    finally:
        root.removeHandler(handler)
        handler.close()
        change(root.addHandler, terminal)


def change(action: Callable[[logging.Handler], None], handlers: Iterable[logging.Handler]) -> None:
    """Apply `addHandler` or `removeHandler` to several."""
    for handler in handlers:
        action(handler)
