"""The process group over torch.distributed's Gloo, for ranks that torchrun started."""

import os
import platform
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
from ds2.distributed.process_group import IsDone, LostRankError, ProcessGroup, SumBuffers
from ds2.distributed.watchdog import RankStatus, read_report, write_report
from ds2.system import UserError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_POLL_S = 0.01  # while ranks meet
_NO_TIMEOUT = timedelta(days=365)  # of Gloo: our watchdog decides how long a rank may wait


class GlooGroup(ProcessGroup):
    """All ranks of torchrun, over new Gloo groups; the reports of the watchdog go through torchrun's store."""

    name = "gloo"

    def __init__(self) -> None:
        self.library = f"torch {torch.__version__}"
        with _lost_rank_errors():
            self._store = _join()
            self._blocking, self._scatter, self._gather = (dist.new_group(timeout=_NO_TIMEOUT) for _ in range(3))
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            self.hosts = self.allgather(platform.node())

    def broadcast_(self, octets: Tensor) -> None:
        with _lost_rank_errors():
            dist.broadcast(octets, 0, self._blocking)

    def allgather_(self, parts: Tensor, own: Tensor) -> None:
        with _lost_rank_errors():
            dist.all_gather(list(parts), own, self._blocking)

    def scatter(self, buffers: SumBuffers) -> IsDone:
        rows = [buffers.parts.shape[1]] * self.size
        return self._all_to_all(buffers.parts.view(-1), buffers.host, rows, buffers.counts, self._scatter)

    def gather(self, buffers: SumBuffers) -> IsDone:
        parts = buffers.parts
        parts[1:] = parts[0]  # Gloo's all-gather needs equal sizes; its all-to-all does not
        rows = [parts.shape[1]] * self.size
        return self._all_to_all(buffers.host, parts.view(-1), buffers.counts, rows, self._gather)

    @staticmethod
    def _all_to_all(output: Tensor, source: Tensor, received: list[int], sent: list[int], group: Any) -> IsDone:
        with _lost_rank_errors():
            work = dist.all_to_all_single(output, source, received, sent, group, async_op=True)

        def is_done() -> bool:
            done: bool = work.is_completed()
            if done:
                with _lost_rank_errors():
                    work.wait()
            return done

        return is_done

    def channel(self) -> "StoreChannel":
        name = self.broadcast(uuid4().hex)  # the trainings of a sweep follow each other in one store
        store = dist.PrefixStore(name, self._store.clone())  # type: ignore[attr-defined]
        return StoreChannel(store, self.rank)

    def abort(self, status: int) -> None:
        """End this process although threads may wait; torchrun then ends the others, or their transfers fail."""
        os._exit(status)

    def close(self) -> None:
        for group in (self._blocking, self._scatter, self._gather):
            dist.destroy_process_group(group)


class StoreChannel:
    """The channel of the watchdog: one queue per rank in torchrun's store, over a connection of its own.

    Whoever reaches the port of the store can write into these queues; messages that are no reports are ignored.
    """

    def __init__(self, store: "Store", rank: int) -> None:
        self._store, self.rank = store, rank

    # Errors of the store are ignored: without reports the watchdog of another rank finds this one silent.
    def send(self, value: RankStatus | None, to: int) -> None:
        with suppress(RuntimeError):
            self._store.queue_push(str(to), write_report(self.rank, value))

    def receive(self) -> tuple[int, RankStatus | None] | None:
        with suppress(RuntimeError):
            while self._store.queue_len(str(self.rank)):
                with suppress(UserError):
                    return read_report(self._store.queue_pop(str(self.rank)))
        return None


@contextmanager
def _lost_rank_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise LostRankError(
            f"lost contact with another rank, whose own message, or torchrun's, says why ({error})"
        ) from error


@cache
def _join() -> "Store":
    """Initialise torch.distributed, once in a process: the trainings of a sweep use the same ranks."""
    store, rank, size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    own = dist.PrefixStore(_common_name(store, rank, size), store)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=_NO_TIMEOUT)
    return cast("Store", own)


def _common_name(store: "Store", rank: int, size: int) -> str:
    """Return a prefix for keys in torchrun's store that only the running ranks know.

    The store outlives ranks that fail and are started again, and their old addresses would be used (issue 135712 of
    PyTorch); no environment variable counts the starts equally on all hosts. So each rank asks rank 0 under a new
    random name, and rank 0 answers until all ranks have the prefix; questions of ranks that failed are harmless.
    """
    name = uuid4().hex
    if rank != 0:
        store.queue_push("ds2/questions", name)
        name = store.get(f"ds2/answers/{name}").decode()
        store.add(f"ds2/received/{name}", 1)
        return name
    while store.add(f"ds2/received/{name}", 0) < size - 1:
        if store.queue_len("ds2/questions"):
            store.set(f"ds2/answers/{store.queue_pop('ds2/questions').decode()}", name)
        time.sleep(_POLL_S)
    return name


def open_gloo() -> GlooGroup:
    """Join the ranks that torchrun started.

    Raises:
        ConfigError: this torch has no Gloo.
        LostRankError: a rank failed before all have joined.
    """
    if not (dist.is_available() and dist.is_gloo_available()):
        raise ConfigError(
            f"torchrun started this rank, but torch {torch.__version__} was built without torch.distributed's Gloo: "
            "start with mpirun -n N ds2 ..., or install a torch that has it"
        )
    return GlooGroup()
