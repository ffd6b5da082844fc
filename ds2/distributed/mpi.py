"""The MPI member: sums through host buffers, or device buffers where MPI reads them, driven by a progress thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from ds2.distributed.communicator import Communicator, Moment, Pending
from ds2.distributed.watchdog import Watchdog, Whereabouts
from ds2.distributed.world import World, reads_device_memory

T = TypeVar("T")
_POLL_S = 20e-6  # between tests of what is under way: non-blocking collectives move only while someone asks


class MpiCommunicator(Communicator):
    """Ranks over MPI alone.

    A sum is an all-to-all of the ranks' parts, an addition in order of rank by the part's owner, and an all-gather:
    each element gets the same bits from every MPI, bucket size and timing. It moves 2 (N - 1) / N of the buffer both
    ways, as the best algorithms do. GPU tensors go through page-locked host memory unless MPI reads device memory.
    """

    name = "mpi"

    def __init__(self, world: World, device: torch.device, timeout_s: float) -> None:
        super().__init__(device)
        self.rank, self.world = world.comm.rank, world.comm.size
        self._blocking, self.scatter, self.gather, heartbeats = (world.comm.Dup() for _ in range(4))
        self._local_rank, self._hosts = world.local_rank, world.hosts
        self.scattered = self.gathered = 0  # collectives begun on each; all ranks begin them in the same order
        self._progress = _Progress()
        self._sums = 0
        self._buffers: dict[int, _Buffers] = {}
        self.staged = device.type == "cuda" and not reads_device_memory()
        self._channel = _Heartbeats(heartbeats)
        self.watchdog = Watchdog(self._channel, world.hosts, self.whereabouts, timeout_s)
        self._progress.start()
        self.watchdog.start()

    def allgather(self, value: T) -> list[T]:
        with self.whereabouts.wait_in("allgather"):
            return self._blocking.allgather(value)

    def broadcast(self, value: T) -> T:
        with self.whereabouts.wait_in("broadcast"):
            return cast(T, self._blocking.bcast(value))

    def broadcast_(self, tensor: Tensor) -> None:
        host = tensor.detach().cpu()
        with self.whereabouts.wait_in("broadcast"):
            self._blocking.Bcast(host.view(-1).view(torch.uint8).numpy() if host.numel() else np.empty(0, np.uint8))
        if self.rank != 0:
            tensor.detach().copy_(host)

    def sum_(self, tensor: Tensor) -> None:
        host = tensor.detach().cpu().view(-1).numpy()
        parts = np.empty((self.world, host.size), host.dtype)
        with self.whereabouts.wait_in("sum"):
            self._blocking.Allgather(host, parts)
        tensor.detach().view(-1).copy_(torch.from_numpy(_add_in_order(parts)))

    def start_sum(self, tensor: Tensor) -> Pending:
        flat = tensor.detach().view(-1)
        buffers = self._buffers.get(flat.data_ptr())
        if buffers is None or buffers.host.numel() != flat.numel():
            buffers = self._buffers[flat.data_ptr()] = _Buffers(self, flat)
        work = _Sum(self, buffers, flat, self._sums)
        self._sums += 1
        self._progress.submit(work)
        return work

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        turn = 0 if self.rank == 0 else 1 if self._local_rank == 0 else 2
        for _ in range(turn):
            self.barrier()
        yield
        for _ in range(turn, 3):
            self.barrier()

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        with self.whereabouts.wait_in("barrier"):
            self._blocking.Barrier()

    def abort(self, status: int) -> None:
        MPI.COMM_WORLD.Abort(status)

    def close(self) -> None:
        self.barrier()
        self.watchdog.stop()
        self._progress.stop()
        for comm in (self._blocking, self.scatter, self.gather, self._channel.comm):
            comm.Free()


class _Buffers:
    """What a sum of one tensor needs, kept for the next step: parts received, staging memory, who owns how much."""

    def __init__(self, comm: MpiCommunicator, flat: Tensor) -> None:
        n, world = flat.numel(), comm.world
        self.host = torch.empty(n, dtype=flat.dtype, pin_memory=True) if comm.staged else flat
        self.counts = [n // world + (rank < n % world) for rank in range(world)]
        self.starts = [sum(self.counts[:rank]) for rank in range(world)]
        self.own = self.counts[comm.rank]
        self.parts = torch.empty(world, self.own, dtype=flat.dtype, device=self.host.device)
        self.type = {torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE}[flat.dtype]
        self.stream = torch.cuda.Stream(comm.device) if flat.is_cuda else None  # type: ignore[no-untyped-call]


class _Sum:
    """One sum under way; `advance` is run by the progress thread, a little at a time."""

    def __init__(self, comm: MpiCommunicator, buffers: _Buffers, flat: Tensor, number: int) -> None:
        self.comm, self.buffers, self.flat, self.number = comm, buffers, flat, number
        self.error: Exception | None = None
        self.done = threading.Event()
        self._began = self._ended = 0.0
        self._ready = torch.cuda.current_stream(flat.device).record_event() if flat.is_cuda else None

    def wait(self) -> tuple[Moment, Moment]:
        with self.comm.whereabouts.wait_in("gradient all-reduce"):
            self.done.wait()
        if self.error is not None:
            raise self.error
        if self.buffers.stream is not None:
            torch.cuda.current_stream(self.flat.device).wait_stream(self.buffers.stream)
        return self._began, self._ended

    def advance(self) -> Generator[None, None, None]:
        comm, b = self.comm, self.buffers
        self._began = time.perf_counter()
        yield from self._on_stream(lambda: b.host.copy_(self.flat, non_blocking=True) if comm.staged else None)
        while comm.scattered != self.number:
            yield
        host, parts = _for_mpi(b.host), _for_mpi(b.parts)
        received = [b.own] * comm.world, [rank * b.own for rank in range(comm.world)]
        request = comm.scatter.Ialltoallv([host, (b.counts, b.starts), b.type], [parts, received, b.type])
        comm.scattered += 1
        while not request.Test():
            yield
        yield from self._on_stream(lambda: _add_in_order(parts))
        while comm.gathered != self.number:
            yield
        request = comm.gather.Iallgatherv([parts[0], b.own, b.type], [host, (b.counts, b.starts), b.type])
        comm.gathered += 1
        while not request.Test():
            yield
        yield from self._on_stream(lambda: self.flat.copy_(b.host, non_blocking=True) if comm.staged else None)
        self._ended = time.perf_counter()

    def _on_stream(self, work: Callable[[], object]) -> Generator[None, None, None]:
        """Run `work`; on a GPU on the buffers' stream, after the gradients, until it is finished."""
        if self.buffers.stream is None or self._ready is None:
            work()
            return
        with torch.cuda.stream(self.buffers.stream):
            self.buffers.stream.wait_event(self._ready)
            work()
            finished = self.buffers.stream.record_event()
        while not finished.query():
            yield


class _Progress(threading.Thread):
    """Moves sums along: MPI's non-blocking collectives stand still while nobody tests them."""

    def __init__(self) -> None:
        super().__init__(name="ds2-mpi-progress", daemon=True)
        self._incoming: queue.SimpleQueue[_Sum | None] = queue.SimpleQueue()

    def submit(self, work: _Sum) -> None:
        """Take over a sum."""
        self._incoming.put(work)

    def stop(self) -> None:
        """End the thread after what was submitted."""
        self._incoming.put(None)
        self.join()

    def run(self) -> None:
        """Advance all sums in turn; sleep while there is none."""
        under_way: list[tuple[_Sum, Generator[None, None, None]]] = []
        while True:
            while not under_way or not self._incoming.empty():
                work = self._incoming.get()
                if work is None:
                    return
                under_way.append((work, work.advance()))
            under_way = [(work, steps) for work, steps in under_way if _advance(work, steps)]
            time.sleep(_POLL_S)


def _advance(work: _Sum, steps: Generator[None, None, None]) -> bool:
    """Take one step of a sum; returns whether more are left."""
    try:
        next(steps)
        return True
    except StopIteration:
        pass
    except Exception as error:
        work.error = error
    work.done.set()
    return False


class _Heartbeats:
    """The watchdog's channel: small messages on a communicator of their own, one under way to each rank at most."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm, self.rank = comm, comm.rank
        self._sent: dict[int, MPI.Request] = {}

    def send(self, value: Whereabouts | None, to: int) -> None:
        if value is None or to not in self._sent or self._sent[to].Test():
            self._sent[to] = self.comm.isend(value, to)

    def receive(self) -> tuple[int, Whereabouts | None] | None:
        status = MPI.Status()
        if not self.comm.iprobe(status=status):
            return None
        return status.source, self.comm.recv(source=status.source)

    def abort(self, status: int) -> None:
        MPI.COMM_WORLD.Abort(status)


def _add_in_order(parts: Any) -> Any:
    """Add up (N, n) over N, from first to last, into the first row, which is returned; of numpy or torch."""
    total = parts[0]
    for part in parts[1:]:
        total += part
    return total


def _for_mpi(tensor: Tensor) -> Any:
    """What mpi4py takes as a buffer: numpy over a host tensor's memory, a GPU tensor as it is."""
    return tensor if tensor.is_cuda else tensor.numpy()
