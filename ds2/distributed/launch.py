"""Which member of the ranks' interface a process is: alone, over MPI or over NCCL; and how an error ends all ranks.

A single process never imports MPI.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ds2.config.device import resolve_device
from ds2.config.schema import CommConfig, ConfigError
from ds2.distributed.agreement import program
from ds2.distributed.communicator import Communicator
from ds2.system.errors import UserError
from ds2.system.machine import usable_cores
from ds2.system.stops import Stopped

log = logging.getLogger(__name__)
_YIELD_TO_RANK_0_S = 1.0  # an error that all ranks meet is told once, by rank 0: its exit ends the others in this time


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
        from ds2.distributed.mpi import MpiCommunicator
        from ds2.distributed.world import open_world
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
    from ds2.distributed.nccl import NcclCommunicator

    reason = "comm=nccl" if config.backend == "nccl" else "comm=auto: every rank has a GPU of its own"
    return NcclCommunicator(world, chosen, config.timeout_s), reason


def _nccl_obstacle(device: torch.device, shared: bool) -> str:
    if device.type != "cuda":
        return f"a rank runs on {device}"
    if shared:
        return "two ranks share a GPU"
    from ds2.distributed.nccl import load_library

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
    from ds2.distributed.world import library_version

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
    status = error.status if isinstance(error, Stopped) else 130 if isinstance(error, KeyboardInterrupt) else 1
    expected = isinstance(error, UserError | OSError | KeyboardInterrupt | Stopped)
    yield_to_rank_0()
    trace = "" if expected else "".join(traceback.format_exception(error))
    reason = f"{error}" if expected and str(error) else f"{type(error).__name__}: {error}"
    place = (
        f"rank {comm.rank} on {comm.host} {'stopped' if isinstance(error, Stopped) else 'failed'} at {comm.whereabouts}"
    )
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
    except Stopped:
        log.warning("stopped at %s", comm.whereabouts)
        raise
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
