"""The world over torch.distributed's Gloo, for ranks that torchrun started."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

from ds2.config.schema import ConfigError
from ds2.distributed.watchdog import Whereabouts, read_report, write_report
from ds2.distributed.world import Exchange, Finished, World
from ds2.system.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_POLL_S = 0.01  # between looks for ranks that come to meet
_NEVER = timedelta(days=365)  # Gloo's own limit: who waits too long is the watchdog's to say


class LostRankError(UserError):
    """A transfer broke because another rank is gone: its own message, or the launcher's, says why."""


class GlooWorld(World):
    """All ranks of torchrun, over process groups of their own; the watchdog's messages lie in torchrun's store."""

    name = "gloo"

    def __init__(self) -> None:
        self.library = f"torch {torch.__version__}"
        with _contact():
            self._store = _join()
            self._blocking, self._scatter, self._gather = (dist.new_group(timeout=_NEVER) for _ in range(3))
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            self.locate()

    def broadcast_(self, octets: Tensor) -> None:
        with _contact():
            dist.broadcast(octets, 0, self._blocking)

    def allgather_(self, parts: Tensor, mine: Tensor) -> None:
        with _contact():
            dist.all_gather(list(parts), mine, self._blocking)

    def barrier(self) -> None:
        with _contact():
            dist.barrier(self._blocking)

    def scatter(self, exchange: Exchange) -> Finished:
        rows = [exchange.parts.shape[1]] * self.size
        return self._all_to_all(exchange.parts.view(-1), exchange.host, rows, exchange.counts, self._scatter)

    def gather(self, exchange: Exchange) -> Finished:
        parts = exchange.parts
        parts[1:] = parts[0]  # Gloo gathers equal parts only, but sends unequal ones, the same to everybody too
        rows = [parts.shape[1]] * self.size
        return self._all_to_all(exchange.host, parts.view(-1), exchange.counts, rows, self._gather)

    @staticmethod
    def _all_to_all(output: Tensor, given: Tensor, received: list[int], sent: list[int], group: Any) -> Finished:
        with _contact():
            work = dist.all_to_all_single(output, given, received, sent, group, async_op=True)

        def finished() -> bool:
            over: bool = work.is_completed()
            if over:
                with _contact():
                    work.wait()
            return over

        return finished

    def channel(self) -> StoreChannel:
        name = self.broadcast(uuid4().hex)  # one after the other, as trainings of a sweep have them, are kept apart
        store = dist.PrefixStore(name, self._store.clone())  # type: ignore[attr-defined]
        return StoreChannel(store, self.rank)

    def abort(self, status: int) -> None:
        _leave(status)

    def close(self) -> None:
        for group in (self._blocking, self._scatter, self._gather):
            dist.destroy_process_group(group)


class StoreChannel:
    """The watchdog's channel: a queue for each rank in torchrun's store, over a connection that nothing else uses.

    Whoever reaches the store's port can write into these queues, so messages are data, and others are ignored.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self.rank = store, rank

    # A store that cannot be reached carries no messages, and a rank that sends none is found to be silent.
    def send(self, value: Whereabouts | None, to: int) -> None:
        with suppress(RuntimeError):
            self._store.queue_push(str(to), write_report(self.rank, value))

    def receive(self) -> tuple[int, Whereabouts | None] | None:
        with suppress(RuntimeError):
            while self._store.queue_len(str(self.rank)):
                with suppress(UserError):
                    return read_report(self._store.queue_pop(str(self.rank)))
        return None

    def abort(self, status: int) -> None:
        _leave(status)


def _leave(status: int) -> None:
    """End this process, whatever its threads wait for; torchrun then ends the others, or their transfers break."""
    os._exit(status)


@contextmanager
def _contact() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise LostRankError(
            f"lost contact with another rank, whose own message, or torchrun's, says why ({error})"
        ) from error


@cache
def _join() -> Store:
    """Meet the other ranks, once in a process: trainings of a sweep follow one another on the same ranks."""
    store, rank, size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    own = dist.PrefixStore(_name_of_all(store, rank, size), store)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=_NEVER)
    return cast("Store", own)


def _name_of_all(store: Store, rank: int, size: int) -> str:
    """A name that only the ranks which live now know, for what they keep in torchrun's store.

    The store outlives ranks that failed and were started again, whose addresses would be taken for those of the living
    (issue 135712 of PyTorch); and no variable counts the starts alike on all hosts. So each rank asks rank 0 under a
    name that nobody had before, and rank 0 answers until all have heard it: what the dead asked hurts nobody.
    """
    name = uuid4().hex
    if rank != 0:
        store.queue_push("ds2/asking", name)
        name = store.get(f"ds2/answer/{name}").decode()
        store.add(f"ds2/heard/{name}", 1)
        return name
    while store.add(f"ds2/heard/{name}", 0) < size - 1:
        if store.queue_len("ds2/asking"):
            store.set(f"ds2/answer/{store.queue_pop('ds2/asking').decode()}", name)
        time.sleep(_POLL_S)
    return name


def open_world() -> GlooWorld:
    """Join the ranks that torchrun started.

    Raises:
        ConfigError: this torch has no Gloo.
        LostRankError: a rank is gone before all have met.
    """
    if not (dist.is_available() and dist.is_gloo_available()):
        raise ConfigError(
            f"torchrun started this rank, but torch {torch.__version__} was built without torch.distributed's Gloo: "
            "start with mpirun -n N ds2 ..., or install a torch that has it"
        )
    return GlooWorld()
