"""The interface of ranks that train together, and its first member: a single process."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ds2.distributed.watchdog import Whereabouts
from ds2.system.errors import UserError

T = TypeVar("T")
Moment = float | torch.cuda.Event  # seconds of `time.perf_counter`, or an event on a CUDA stream


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
        name: single, mpi, gloo or nccl.
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

    def allgather(self, value: T, classes: Iterable[type] = ()) -> list[T]:
        """Return every rank's small value, in order of rank.

        Args:
            value: of a kind that `ds2.system.messages` sends.
            classes: the dataclasses that it may hold.
        """
        return [value]

    def broadcast(self, value: T, classes: Iterable[type] = ()) -> T:
        """Return rank 0's small value; arguments as `allgather`."""
        return value

    def broadcast_(self, tensor: Tensor) -> None:
        """Overwrite a contiguous tensor of any shape and dtype, the same on all ranks, with rank 0's."""

    def sum_(self, tensor: Tensor) -> None:
        """Overwrite a small contiguous float tensor of any shape, the same on all ranks, with its sum over ranks."""

    def sum_chunks(self, chunks: Tensor, own: Tensor | None = None) -> Tensor:
        """Return (1, ...), the sum of chunks (K, ...) float64, contiguous, the same shape behind K on all ranks, over
        chunks and ranks; they may be overwritten. `own`, (...) float32, is given the sum of this rank's chunks."""
        total = chunks.sum(0, keepdim=True)
        if own is not None:
            own.copy_(total[0])
        self.sum_(total)
        return total

    def start_sum(self, tensor: Tensor, *, beside: bool = False) -> Pending:
        """Begin to overwrite a contiguous float tensor of any shape with its sum; leave it alone until `wait` returns.

        `beside`, the same on all ranks: whether the device computes meanwhile, so that the sum is to take little of it.
        """
        raise NotImplementedError("a single process has nothing to sum")

    def copies(self, tensors: Sequence[Tensor]) -> list[Callable[[], Pending]] | None:
        """For each tensor what begins its sum in another way: as copies, which take nothing of what computes, and an
        addition once `wait` is called. The same bits as `start_sum`; None where that cannot be. All ranks call it
        together, with as many tensors of the same sizes, which keep their places."""
        return None

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Run the block on rank 0, then on one rank of every other host, then on all: what one writes, others find."""
        yield

    def broadcast_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return rank 0's tensors by name, of any shape, on the CPU where not this rank's own; others' are ignored."""
        shapes = self.broadcast({name: (tuple(value.shape), value.new_empty(0)) for name, value in tensors.items()})
        if self.rank != 0:
            tensors = {name: torch.empty(shape, dtype=empty.dtype) for name, (shape, empty) in shapes.items()}
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
