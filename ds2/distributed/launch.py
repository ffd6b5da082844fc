"""Joins the ranks of a launcher with the best communicator, and ends all ranks when one of them fails.

A single process imports neither MPI nor Gloo.
"""

import logging
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from ds2_ops.install import install_command

from ds2.config.device import resolve_device
from ds2.config.schema import CommConfig, ConfigError
from ds2.distributed.communicator import Communicator, OrderedCommunicator, program
from ds2.distributed.launcher import Launched, check_variables, launched, yield_to_rank_0
from ds2.distributed.nccl import NcclCommunicator, why_no_nccl
from ds2.distributed.process_group import ProcessGroup
from ds2.system import UserError
from ds2.system.machine import usable_cores
from ds2.system.signals import Stopped, default_signals
from ds2.system.terminal import visible

log = logging.getLogger(__name__)
_MIB = 4  # of the sum that is timed at start


@contextmanager
def connect(config: CommConfig, device: str, run_dir: Path | None = None) -> Iterator[Communicator]:
    """Join the ranks that the launcher started, if any; an error inside the block ends the job on all ranks.

    Args:
        config: the backend, and the timeout of the watchdog.
        device: auto, cpu, cuda (one GPU per rank, by its number on its host) or cuda:N.
        run_dir: where the ranks of `comm.max_ranks` meet; commands without one have a fixed number of ranks.

    Raises:
        ConfigError: the configured backend cannot work; the message has the reason and the way out.
    """
    if config.backend != "single":
        check_variables()
    start = launched()
    if config.max_ranks and run_dir is not None:
        with _elastic(config, device, start, run_dir) as elastic:
            yield elastic
        return
    if config.backend == "single" or (start.world == 1 and config.backend == "auto"):
        if start.world > 1:
            raise ConfigError(
                f"comm=single, but the launcher started {start.world} ranks, which would all write one run folder: "
                "start without mpirun, srun or torchrun, or use comm=auto"
            )
        yield Communicator(resolve_device(device))
        return
    with default_signals():  # the libraries wait for all ranks, of which a signal may have ended some
        group = _open_group(config.backend, start)
    comm, reason = _choose(config, device, group)
    try:
        share_cores(comm)
        _log_ranks(comm, reason, group.library)
        comm.agree(program(), "install the same on all hosts")
        yield comm
    except BaseException as error:
        _end_job(comm, error)
        raise
    comm.close()


@contextmanager
def _elastic(config: CommConfig, device: str, start: Launched, run_dir: Path) -> Iterator[Communicator]:
    """Yield the communicator of ranks that come and go; it is alone until its first `regroup`."""
    from ds2.distributed.elastic import ElasticCommunicator, why_not_elastic

    if obstacle := why_not_elastic(config, start):
        raise ConfigError(
            f"comm.max_ranks={config.max_ranks} lets ranks come and go, which cannot work here: {obstacle}"
        )
    comm = ElasticCommunicator(config, device, run_dir)
    try:
        comm.agree(program(), "")
        yield comm
    except BaseException:
        comm.leave()
        raise
    comm.close()


def _open_group(backend: str, start: Launched) -> ProcessGroup:
    """Join the ranks over the library that fits their launcher."""
    if start.by == "torchrun":
        if backend == "mpi":
            raise ConfigError(
                f"comm=mpi, but torchrun started the {start.world} ranks, which MPI does not know: start them with "
                f"mpirun -n {start.world} ds2 ..., or use comm=auto"
            )
        from ds2.distributed.gloo import open_gloo

        return open_gloo()
    if backend == "gloo":
        raise ConfigError(
            "comm=gloo is for ranks that torchrun started, which it did not: start with "
            'torchrun --nproc-per-node N "$(which ds2)" ..., or use comm=auto'
        )
    try:
        from ds2.distributed.mpi import open_mpi
    except ImportError as error:
        raise ConfigError(
            f"{start.world} ranks were started, but MPI cannot be loaded ({error}): {install_command('mpi')} for "
            "mpi4py and Open MPI, or mpi4py built for your cluster's MPI; without MPI start with "
            f'torchrun --nproc-per-node {start.world} "$(which ds2)" ...'
        ) from error
    return open_mpi(start.world)


def _choose(config: CommConfig, device: str, group: ProcessGroup) -> tuple[Communicator, str]:
    """Return the configured communicator, or the best one, and the reason for the choice."""
    asked = sorted(set(group.allgather(config.backend)))
    if len(asked) > 1:  # other communicators make other calls, and no watchdog runs yet
        raise ConfigError(f"ranks were started with comm={' and comm='.join(asked)}: start all with the same one")
    refusal, own = "", torch.device("cpu")
    try:
        own = resolve_device(device, group.local_rank)
    except ConfigError as error:  # a rank that ends alone under MPI waits for the others, and they for it
        refusal = f"rank {group.rank}: {error}"
    if first := group.first_nonempty(refusal):
        raise ConfigError(first)
    if config.backend == group.name:
        return OrderedCommunicator(group, own, config.timeout_s), f"comm={group.name}"
    obstacle = why_no_nccl(group, own)
    if config.backend == "auto" and obstacle:
        return OrderedCommunicator(group, own, config.timeout_s), f"comm=auto: no NCCL, {obstacle}"
    if obstacle:
        raise ConfigError(f"comm=nccl cannot work here: {obstacle}; use comm={group.name} or comm=auto")
    reason = "comm=nccl" if config.backend == "nccl" else "comm=auto: every rank has a GPU of its own"
    return NcclCommunicator(group, own, config.timeout_s), reason


def share_cores(comm: Communicator) -> None:
    """Divide the cores among the ranks that may use the same ones, unless OMP_NUM_THREADS is set."""
    cores = (comm.host, sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [])
    sharing = comm.allgather(cores).count(cores)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() // sharing))


def _log_ranks(comm: Communicator, reason: str, library: str) -> None:
    device = f" {torch.cuda.get_device_name(comm.device)}" if comm.device.type == "cuda" else ""
    rows = comm.allgather((comm.host, os.getpid(), f"{comm.device}{device}", torch.get_num_threads()))
    rate = bus_gb_per_s(comm)
    if comm.rank == 0:
        width = max(len("host"), *(len(row[0]) for row in rows))
        lines = [f"  rank  {'host':<{width}}  process  threads  device"]
        for rank, (host, process, device, threads) in enumerate(rows):
            lines.append(f"  {rank:>4}  {host:<{width}}  {process:>7}  {threads:>7}  {device}")
        table = "\n".join(lines)
        log.info("%d ranks over %s (%s); %s\n%s", comm.world, comm.name, reason, library, table)
        if comm.world > 1:
            log.info("gradients travel %s: %.3g GB/s a rank in a sum of %d MiB", comm.path, rate, _MIB)


def bus_gb_per_s(comm: Communicator) -> float:
    """Measure a sum over ranks: what each sends, 2 (N - 1) / N of the buffer, over the slowest rank's time.

    All ranks make this call together. 0 for a single rank.
    """
    if comm.world == 1:
        return 0.0
    tensor = torch.zeros(_MIB * 2**18, device=comm.device)
    for _ in range(2):  # the first one opens connections
        comm.allgather(None)
        began = time.perf_counter()
        comm.start_sum(tensor).wait()
        if comm.device.type == "cuda":
            torch.cuda.synchronize(comm.device)
        seconds = max(comm.allgather(time.perf_counter() - began))
    return 2e-9 * (comm.world - 1) / comm.world * tensor.numel() * tensor.element_size() / seconds


def _end_job(comm: Communicator, error: BaseException) -> None:
    """Print which rank failed, where and why, and end all ranks."""
    status = error.status if isinstance(error, Stopped) else 130 if isinstance(error, KeyboardInterrupt) else 1
    expected = isinstance(error, UserError | OSError | KeyboardInterrupt | Stopped)
    yield_to_rank_0()
    trace = "" if expected else "".join(traceback.format_exception(error))
    reason = f"{error}" if expected and str(error) else f"{type(error).__name__}: {error}"
    place = f"rank {comm.rank} on {comm.host} {'stopped' if isinstance(error, Stopped) else 'failed'} at {comm.status}"
    print(visible(f"{trace}ds2: {place}: {reason}"), file=sys.stderr, flush=True)
    comm.abort(2 if expected and status == 1 else status)


@contextmanager
def rank_log(comm: Communicator, run_dir: Path) -> Iterator[None]:
    """With several ranks, log each to `run_dir/ranks/rank-0000.log`, and only rank 0 to the terminal."""
    if comm.world == 1:
        yield
        return
    folder = run_dir / "ranks"
    folder.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(folder / f"rank-{comm.rank:04d}.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter(f"%(asctime)s {comm.host} rank {comm.rank} %(levelname)s %(message)s"))
    root = logging.getLogger()
    terminal = [h for h in root.handlers if comm.rank != 0]
    for shown in terminal:
        root.removeHandler(shown)
    root.addHandler(handler)
    try:
        yield
    except Stopped:
        log.warning("stopped at %s", comm.status)
        raise
    except BaseException:
        for shown in [h for h in root.handlers if h is not handler]:  # `connect` prints the error
            root.removeHandler(shown)
        log.exception("failed at %s", comm.status)
        raise
    finally:
        root.removeHandler(handler)
        handler.close()
        for shown in terminal:
            root.addHandler(shown)
