"""A process group: the ranks that a launcher started, their hosts, and transfers between them on the CPU."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor

from ds2.distributed.watchdog import Channel
from ds2.system import UserError
from ds2.system.messages import MessageError, decode, encode

T = TypeVar("T")
_LONGEST_MESSAGE = 1 << 31  # bytes
IsDone = Callable[[], bool]  # whether a transfer is complete; some transfers progress only during such calls


class LostRankError(UserError):
    """A transfer failed because another rank is gone; the message says which one, or where that is written."""


@dataclass
class SumBuffers:
    """The memory of one sum, of which each rank adds up one part."""

    host: Tensor  # (n,) elements in memory that the group can read and write
    parts: Tensor  # (N, own) this rank's part as each rank has it; its first row receives the sum
    counts: list[int]  # length of each rank's part of `host`, one after the other


class ProcessGroup(ABC):
    """All ranks of a job, with transfers between them, on which communicators are built.

    All ranks make the same calls in the same order, where `scatter`, `gather` and all other calls are three separate
    sequences: a thread each may make them. Values travel as messages (`ds2.system.messages`), which run no code.
    """

    name: ClassVar[str]  # mpi, gloo or tcp
    library: str  # its implementation, for the table of ranks
    rank: int
    size: int  # the number of processes
    hosts: list[str]  # the machine names of all ranks
    reads_device_memory = False  # whether transfers take tensors on a GPU

    @property
    def local_rank(self) -> int:
        """The number of lower ranks on the same machine."""
        return self.hosts[: self.rank].count(self.hosts[self.rank])

    def first_nonempty(self, value: str) -> str:
        """Return the first value of any rank that is not empty."""
        return next((v for v in self.allgather(value) if v), "")

    def any_gpu_shared(self, device: torch.device) -> bool:
        """Return whether two ranks have chosen the same GPU."""
        on_gpu = device.type == "cuda"
        chosen = self.allgather(str(torch.cuda.get_device_properties(device).uuid) if on_gpu else f"rank {self.rank}")
        return len(set(chosen)) < len(chosen)

    def allgather(self, value: T, classes: Iterable[type] = ()) -> list[T]:
        """Return the small values of all ranks, in order of rank.

        Args:
            value: of a kind that `ds2.system.messages` sends.
            classes: the dataclasses that it may hold.

        Raises:
            MessageError: another rank sent something else.
        """
        data = _octets(encode(value))
        lengths = torch.empty(self.size, 1, dtype=torch.int64)
        self.allgather_(lengths, torch.tensor([len(data)]))
        sizes = [_checked(length) for length in lengths[:, 0].tolist()]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(data)] = data
        received = torch.empty(self.size, len(padded), dtype=torch.uint8)
        self.allgather_(received, padded)
        return [decode(row[:size].numpy().data, classes) for row, size in zip(received, sizes, strict=True)]

    def broadcast(self, value: T) -> T:
        """Return rank 0's small value, which holds no dataclass; errors as `allgather`."""
        data = _octets(encode(value) if self.rank == 0 else b"\0")
        length = torch.tensor([len(data)])
        self.broadcast_(length.view(torch.uint8))
        if self.rank != 0:
            data = torch.empty(_checked(int(length)), dtype=torch.uint8)
        self.broadcast_(data)
        return cast(T, decode(data.numpy().data))

    @abstractmethod
    def broadcast_(self, octets: Tensor) -> None:
        """Overwrite a flat, non-empty uint8 tensor on the CPU with rank 0's."""

    def send_(self, octets: Tensor, receivers: Collection[int]) -> None:
        """As `broadcast_`, to these ranks; the others make no call. For groups of ranks that come and go."""
        raise NotImplementedError(f"{self.name} broadcasts to all ranks")

    @abstractmethod
    def allgather_(self, parts: Tensor, own: Tensor) -> None:
        """Write the (n,) CPU tensors of all ranks into `parts` (N, n), in order of rank."""

    def barrier(self) -> None:
        """Wait until all ranks have made this call."""
        self.allgather_(torch.empty(self.size, 1, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8))

    @abstractmethod
    def scatter(self, buffers: SumBuffers) -> IsDone:
        """Start to send each rank its part of `host`, into the row of its `parts` that has the sender's number."""

    @abstractmethod
    def gather(self, buffers: SumBuffers) -> IsDone:
        """Start to send the first row of `parts` to all ranks, into the sender's part of `host`; may change `parts`."""

    @abstractmethod
    def channel(self) -> Channel:
        """Return a new channel for the watchdog, independent of all other calls."""

    @abstractmethod
    def abort(self, status: int) -> None:
        """End all ranks at once with an exit status."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources; all ranks call it together."""


def _octets(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _checked(size: int) -> int:
    """Return the length of a message that another rank announced, if it is allowed."""
    if not 0 < size <= _LONGEST_MESSAGE:
        raise MessageError(f"another rank announced a message of {size} bytes; allowed are 1 to {_LONGEST_MESSAGE}")
    return size


def add_in_order(parts: Tensor) -> Tensor:
    """Add up (N, n) over N, from first to last, into the first row, and return it."""
    total: Any = parts if parts.is_cuda else parts.numpy()  # numpy starts no threads: other ranks use the cores
    for part in total[1:]:
        total[0] += part
    return parts[0]
