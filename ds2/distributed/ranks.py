"""What all members with several ranks have in common: values, small sums, turns, and the watchdog."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from ds2.distributed.communicator import Communicator
from ds2.distributed.watchdog import Watchdog
from ds2.distributed.world import World, add_in_order

T = TypeVar("T")


class Ranks(Communicator):
    """Ranks over a world, which carries all but the sums of gradients: those are the member's own."""

    def __init__(self, world: World, device: torch.device, timeout_s: float) -> None:
        super().__init__(device)
        self.rank, self.world = world.rank, world.size
        self.carrier = world
        self.watchdog = Watchdog(world.channel(), world.hosts, self.whereabouts, timeout_s)
        self.watchdog.start()

    def allgather(self, value: T, classes: Iterable[type] = ()) -> list[T]:
        with self.whereabouts.wait_in("allgather"):
            return self.carrier.allgather(value, classes)

    def broadcast(self, value: T, classes: Iterable[type] = ()) -> T:
        with self.whereabouts.wait_in("broadcast"):
            return self.carrier.broadcast(value, classes)

    def broadcast_(self, tensor: Tensor) -> None:
        host = tensor.detach().cpu()
        with self.whereabouts.wait_in("broadcast"):
            if host.numel():
                self.carrier.broadcast_(host.view(-1).view(torch.uint8))
        if self.rank != 0:
            tensor.detach().copy_(host)

    def sum_(self, tensor: Tensor) -> None:
        host = tensor.detach().cpu().view(-1)
        parts = torch.empty(self.world, host.numel(), dtype=host.dtype)
        with self.whereabouts.wait_in("sum"):
            self.carrier.allgather_(parts, host)
        tensor.detach().view(-1).copy_(add_in_order(parts))

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        turn = 0 if self.rank == 0 else 1 if self.carrier.local_rank == 0 else 2
        for _ in range(turn):
            self.barrier()
        yield
        for _ in range(turn, 3):
            self.barrier()

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        with self.whereabouts.wait_in("barrier"):
            self.carrier.barrier()

    def abort(self, status: int) -> None:
        self.carrier.abort(status)

    def close(self) -> None:
        self.barrier()
        self.watchdog.stop()
        self.carrier.close()
