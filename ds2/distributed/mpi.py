"""The world over MPI, for ranks that mpirun or srun started."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Any, cast

import torch
from mpi4py import MPI
from torch import Tensor

from ds2.config.schema import ConfigError
from ds2.distributed.watchdog import Whereabouts, read_report, write_report
from ds2.distributed.world import Exchange, Finished, World
from ds2.system.errors import UserError


class MpiWorld(World):
    """All ranks of `COMM_WORLD`, over duplicates of it."""

    name = "mpi"

    def __init__(self) -> None:
        self.library = library_version()
        self._opened: list[MPI.Intracomm] = []
        self._blocking, self._scatter, self._gather = (self._open() for _ in range(3))
        self.rank, self.size = self._blocking.rank, self._blocking.size
        self.reads_device_memory = _reads_device_memory()
        self.locate()

    def _open(self) -> MPI.Intracomm:
        self._opened.append(MPI.COMM_WORLD.Dup())
        return self._opened[-1]

    def broadcast_(self, octets: Tensor) -> None:
        self._blocking.Bcast(octets.numpy())

    def allgather_(self, parts: Tensor, mine: Tensor) -> None:
        self._blocking.Allgather(mine.numpy(), parts.numpy())

    def barrier(self) -> None:
        self._blocking.Barrier()

    def scatter(self, exchange: Exchange) -> Finished:
        host, parts, kind, whole = _buffers(exchange)
        own = parts.shape[1]
        rows = [own] * self.size, [rank * own for rank in range(self.size)]
        return cast(Finished, self._scatter.Ialltoallv([host, whole, kind], [parts, rows, kind]).Test)

    def gather(self, exchange: Exchange) -> Finished:
        host, parts, kind, whole = _buffers(exchange)
        return cast(Finished, self._gather.Iallgatherv([parts[0], parts.shape[1], kind], [host, whole, kind]).Test)

    def channel(self) -> _MpiChannel:
        return _MpiChannel(self._open())

    def abort(self, status: int) -> None:
        MPI.COMM_WORLD.Abort(status)

    def close(self) -> None:
        for comm in self._opened:
            comm.Free()


class _MpiChannel:
    """The watchdog's channel: small messages on a communicator of their own, one under way to each rank at most."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm, self.rank = comm, comm.rank
        self._sent: dict[int, MPI.Request] = {}

    def send(self, value: Whereabouts | None, to: int) -> None:
        if value is None or to not in self._sent or self._sent[to].Test():
            self._sent[to] = self.comm.Isend([bytearray(write_report(self.rank, value)), MPI.BYTE], to)

    def receive(self) -> tuple[int, Whereabouts | None] | None:
        status = MPI.Status()
        while self.comm.Iprobe(status=status):
            data = bytearray(status.Get_count(MPI.BYTE))
            self.comm.Recv([data, MPI.BYTE], source=status.source)
            with suppress(UserError):
                return read_report(data)
        return None

    def abort(self, status: int) -> None:
        MPI.COMM_WORLD.Abort(status)


def open_world(launched: int) -> MpiWorld:
    """Check that the MPI library loaded is the launcher's, and join its ranks.

    Raises:
        ConfigError: it sees another number of ranks than were launched, or cannot serve several threads.
    """
    found = MPI.COMM_WORLD.size
    if found != launched:
        raise ConfigError(
            f"the launcher started {launched} ranks, but {library_version()} sees {found}: mpirun and the library "
            "that mpi4py loads are of different MPIs; start with the mpirun beside the python that holds mpi4py"
        )
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise ConfigError(f"{library_version()} gives no MPI_THREAD_MULTIPLE, which overlap and watchdog need")
    return MpiWorld()


def library_version() -> str:
    """The MPI library's name and version."""
    return MPI.Get_library_version().split(",")[0].strip("\0 \n")


def _reads_device_memory() -> bool:
    """Whether this MPI says that it takes pointers to GPU memory (`MPIX_Query_cuda_support`)."""
    try:
        return bool(ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support())
    except (OSError, AttributeError):
        return False


def _buffers(exchange: Exchange) -> tuple[Any, Any, MPI.Datatype, tuple[list[int], list[int]]]:
    """What mpi4py takes: numpy over a host tensor's memory or a GPU tensor as it is, the type, counts and starts."""
    host, parts = (t if t.is_cuda else t.numpy() for t in (exchange.host, exchange.parts))
    kind = {torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE}[exchange.host.dtype]
    return host, parts, kind, (exchange.counts, exchange.starts)
