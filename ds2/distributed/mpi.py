"""The process group over MPI, for ranks that mpirun or srun started."""

import ctypes
import platform
from contextlib import suppress
from typing import Any, cast

import torch
from mpi4py import MPI
from torch import Tensor

from ds2.config.schema import ConfigError
from ds2.distributed.process_group import IsDone, ProcessGroup, SumBuffers
from ds2.distributed.watchdog import RankStatus, read_report, write_report
from ds2.system import UserError


class MpiGroup(ProcessGroup):
    """All ranks of `COMM_WORLD`, over duplicates of it."""

    name = "mpi"

    def __init__(self) -> None:
        self.library = library_version()
        self._opened: list[MPI.Intracomm] = []
        self._blocking, self._scatter, self._gather = (self._open() for _ in range(3))
        self.rank, self.size = self._blocking.rank, self._blocking.size
        self.reads_device_memory = _reads_device_memory()
        self.hosts = self.allgather(platform.node())

    def _open(self) -> MPI.Intracomm:
        self._opened.append(MPI.COMM_WORLD.Dup())
        return self._opened[-1]

    def broadcast_(self, octets: Tensor) -> None:
        self._blocking.Bcast(octets.numpy())

    def allgather_(self, parts: Tensor, own: Tensor) -> None:
        self._blocking.Allgather(own.numpy(), parts.numpy())

    def scatter(self, buffers: SumBuffers) -> IsDone:
        host, parts, kind = _mpi_arguments(buffers)
        rows = [parts.shape[1]] * self.size
        return cast(IsDone, self._scatter.Ialltoallv([host, buffers.counts, kind], [parts, rows, kind]).Test)

    def gather(self, buffers: SumBuffers) -> IsDone:
        host, parts, kind = _mpi_arguments(buffers)
        own = [parts[0], parts.shape[1], kind]
        return cast(IsDone, self._gather.Iallgatherv(own, [host, buffers.counts, kind]).Test)

    def channel(self) -> "_MpiChannel":
        return _MpiChannel(self._open())

    def abort(self, status: int) -> None:
        MPI.COMM_WORLD.Abort(status)

    def close(self) -> None:
        for comm in self._opened:
            comm.Free()


class _MpiChannel:
    """The channel of the watchdog: messages on an MPI communicator of its own, at most one in flight to each rank."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm, self.rank = comm, comm.rank
        self._sent: dict[int, MPI.Request] = {}

    def send(self, value: RankStatus | None, to: int) -> None:
        if value is None or to not in self._sent or self._sent[to].Test():
            self._sent[to] = self.comm.Isend([bytearray(write_report(self.rank, value)), MPI.BYTE], to)

    def receive(self) -> tuple[int, RankStatus | None] | None:
        status = MPI.Status()
        while self.comm.Iprobe(status=status):
            data = bytearray(status.Get_count(MPI.BYTE))
            self.comm.Recv([data, MPI.BYTE], source=status.source)
            with suppress(UserError):
                return read_report(data)
        return None


def open_mpi(launched: int) -> MpiGroup:
    """Join the ranks of the launcher, after a check that mpi4py loaded the MPI library of that launcher.

    Args:
        launched: the number of ranks that the launcher started.

    Raises:
        ConfigError: the library sees another number of ranks, or does not support several threads.
    """
    size = MPI.COMM_WORLD.size
    if size != launched:
        raise ConfigError(
            f"the launcher started {launched} ranks, but {library_version()} sees {size}: mpirun and the library "
            "that mpi4py loads are of different MPIs; start with the mpirun beside the python that holds mpi4py"
        )
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise ConfigError(f"{library_version()} gives no MPI_THREAD_MULTIPLE, which overlap and watchdog need")
    return MpiGroup()


def library_version() -> str:
    """Return the name and version of the MPI library."""
    return MPI.Get_library_version().split(",")[0].strip("\0 \n")


def _reads_device_memory() -> bool:
    """Return whether this MPI takes pointers to GPU memory, according to `MPIX_Query_cuda_support`."""
    try:
        return bool(ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support())
    except (OSError, AttributeError):
        return False


def _mpi_arguments(buffers: SumBuffers) -> tuple[Any, Any, MPI.Datatype]:
    """Return `host` and `parts` as mpi4py takes them (numpy arrays, or GPU tensors), and the type of their elements."""
    host, parts = (t if t.is_cuda else t.numpy() for t in (buffers.host, buffers.parts))
    kind = {torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE}[buffers.host.dtype]
    return host, parts, kind
