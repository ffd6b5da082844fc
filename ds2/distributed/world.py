"""The ranks that a launcher started, before a member of the communicator is chosen: who is where, and how to send."""

from __future__ import annotations

import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor

from ds2.distributed.watchdog import Channel
from ds2.system.messages import MessageError, decode, encode

T = TypeVar("T")
_LONGEST_MESSAGE = 1 << 31  # bytes
Finished = Callable[[], bool]  # whether a transfer is over; it moves, at times, only while somebody asks


@dataclass
class Exchange:
    """The memory of one sum: the ranks own a part of it each.

    Attributes:
        host: (n,) elements in memory that the world reads and writes.
        parts: (N, own) what the ranks hold of this rank's part; the first row then holds their sum.
        counts, starts: length and beginning of each rank's part of `host`.
    """

    host: Tensor
    parts: Tensor
    counts: list[int]
    starts: list[int]


class World(ABC):
    """All ranks of a job, and plain transfers between them: what a member of the communicator builds upon.

    All ranks make the same calls in the same order: of `scatter`, of `gather` and of all others, each for itself, so
    that three threads may call them. Values travel as messages (`ds2.system.messages`), which run no code.

    Attributes:
        name: of what carries the transfers.
        library: its implementation, for the table of ranks.
        rank, size: this process's number and how many there are.
        hosts: the names of all ranks' machines.
        local_rank: how many ranks before this one share its machine.
    """

    name: ClassVar[str]
    library: str
    rank: int
    size: int
    reads_device_memory = False

    def locate(self) -> None:
        """Learn who is on which host; the last act of opening."""
        self.hosts: list[str] = self.allgather(platform.node())
        self.local_rank = self.hosts[: self.rank].count(self.hosts[self.rank])

    def first(self, value: str) -> str:
        """The first value of any rank that is not empty."""
        return next((v for v in self.allgather(value) if v), "")

    def share_a_gpu(self, device: torch.device) -> bool:
        """Whether two ranks have chosen the same GPU."""
        on_gpu = device.type == "cuda"
        chosen = self.allgather(str(torch.cuda.get_device_properties(device).uuid) if on_gpu else f"rank {self.rank}")
        return len(set(chosen)) < len(chosen)

    def allgather(self, value: T, classes: Iterable[type] = ()) -> list[T]:
        """Return every rank's small value, in order of rank.

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

    def broadcast(self, value: T, classes: Iterable[type] = ()) -> T:
        """Return rank 0's small value; arguments and errors as `allgather`."""
        data = _octets(encode(value) if self.rank == 0 else b"\0")
        length = torch.tensor([len(data)])
        self.broadcast_(length.view(torch.uint8))
        if self.rank != 0:
            data = torch.empty(_checked(int(length)), dtype=torch.uint8)
        self.broadcast_(data)
        return cast(T, decode(data.numpy().data, classes))

    @abstractmethod
    def broadcast_(self, octets: Tensor) -> None:
        """Overwrite a flat uint8 tensor of the CPU, of one element or more, with rank 0's."""

    @abstractmethod
    def allgather_(self, parts: Tensor, mine: Tensor) -> None:
        """Write all ranks' (n,) tensors of the CPU into (N, n), in order of rank."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until all ranks are here."""

    @abstractmethod
    def scatter(self, exchange: Exchange) -> Finished:
        """Begin to send each rank its part of `host`, into the row of `parts` that is the sender's number."""

    @abstractmethod
    def gather(self, exchange: Exchange) -> Finished:
        """Begin to send the first row of `parts` to all, into the sender's part of `host`; other rows are lost."""

    @abstractmethod
    def channel(self) -> Channel:
        """A new channel for the watchdog, apart from all other calls."""

    @abstractmethod
    def abort(self, status: int) -> None:
        """End all ranks at once with an exit status."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what was opened; all ranks call it together."""


def _octets(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _checked(size: int) -> int:
    """The length of a message that another rank announced."""
    if not 0 < size <= _LONGEST_MESSAGE:
        raise MessageError(f"another rank announced a message of {size} bytes; allowed are 1 to {_LONGEST_MESSAGE}")
    return size


def add_in_order(parts: Tensor) -> Tensor:
    """Add up (N, n) over N, from first to last, into the first row, which is returned."""
    total: Any = parts if parts.is_cuda else parts.numpy()  # numpy starts no threads, of which the cores have enough
    for part in total[1:]:
        total[0] += part
    return parts[0]
