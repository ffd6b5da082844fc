"""The world of ranks before a member of the communicator is chosen: hosts, local ranks, and what this MPI can do."""

from __future__ import annotations

import ctypes
import platform
from functools import cache

import torch
from mpi4py import MPI

from ds2.config.schema import ConfigError


class World:
    """All ranks, before a member of the communicator is chosen."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.host = platform.node()
        self.hosts: list[str] = comm.allgather(self.host)
        self.local_rank = self.hosts[: comm.rank].count(self.host)

    def first(self, value: str) -> str:
        """The first value of any rank that is not empty."""
        return next((v for v in self.comm.allgather(value) if v), "")

    def share_a_gpu(self, device: torch.device) -> bool:
        """Whether two ranks have chosen the same GPU."""
        on_gpu = device.type == "cuda"
        chosen = self.comm.allgather(
            str(torch.cuda.get_device_properties(device).uuid) if on_gpu else f"rank {self.comm.rank}"
        )
        return len(set(chosen)) < len(chosen)


def open_world(launched: int) -> World:
    """Check that the MPI library loaded is the launcher's.

    Raises:
        ConfigError: it sees another number of ranks than were launched, or cannot serve several threads.
    """
    found = MPI.COMM_WORLD.size
    if found != launched:
        raise ConfigError(
            f"the launcher started {launched} ranks, but {library_version()} sees {found}: mpirun and the library that "
            "mpi4py loads are of different MPIs; start with the mpirun beside the python that holds mpi4py"
        )
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise ConfigError(f"{library_version()} gives no MPI_THREAD_MULTIPLE, which overlap and watchdog need")
    return World(MPI.COMM_WORLD)


def library_version() -> str:
    """The MPI library's name and version."""
    return MPI.Get_library_version().split(",")[0].strip("\0 \n")


@cache
def reads_device_memory() -> bool:
    """Whether this MPI says that it takes pointers to GPU memory (`MPIX_Query_cuda_support`)."""
    try:
        return bool(ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support())
    except (OSError, AttributeError):
        return False
