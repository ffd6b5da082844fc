"""The communicator for CPUs, and for GPUs without NCCL: sums in order of rank, driven by a progress thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator

import torch
from torch import Tensor

from ds2.distributed.communicator import GroupCommunicator, Moment, Pending
from ds2.distributed.process_group import ProcessGroup, SumBuffers, add_in_order

_POLL_S = 20e-6  # between tests of running transfers: MPI's non-blocking ones progress only during such tests


class OrderedCommunicator(GroupCommunicator):
    """Sums over a process group.

    A sum is an all-to-all of parts, an addition in order of rank by the owner of the part, and an all-gather. So each
    element has the same bits for every process group, bucket size and timing. It sends and receives 2 (N - 1) / N of
    the buffer, the optimum. GPU tensors go through page-locked host memory unless the group reads device memory.
    """

    def __init__(self, group: ProcessGroup, device: torch.device, timeout_s: float) -> None:
        super().__init__(group, device, timeout_s)
        self.name = group.name
        self.staged = device.type == "cuda" and not group.reads_device_memory

    def _use(self, group: ProcessGroup, on_hang: Callable[[str], None] | None = None) -> None:
        super()._use(group, on_hang)
        self.scattered = self.gathered = 0  # number of started ones; all ranks start them in the same order
        self._progress = _Progress()
        self._sums = 0
        self._buffers: dict[int, _Buffers] = {}
        self._progress.start()

    def start_sum(self, tensor: Tensor, *, overlapped: bool = False) -> Pending:
        flat = tensor.detach().view(-1)
        buffers = self._buffers.get(flat.data_ptr())
        if buffers is None or buffers.host.numel() != flat.numel():
            buffers = self._buffers[flat.data_ptr()] = _Buffers(self, flat)
        work = _Sum(self, buffers, flat, self._sums)
        self._sums += 1
        self._progress.submit(work)
        return work

    def close(self) -> None:
        self._progress.stop()
        super().close()


class _Buffers(SumBuffers):
    """The buffers of the sums of one tensor, reused in each step."""

    def __init__(self, comm: OrderedCommunicator, flat: Tensor) -> None:
        n, world = flat.numel(), comm.world
        host = torch.empty(n, dtype=flat.dtype, pin_memory=True) if comm.staged else flat
        counts = [n // world + (rank < n % world) for rank in range(world)]
        parts = torch.empty(world, counts[comm.rank], dtype=flat.dtype, device=host.device)
        super().__init__(host, parts, counts, [sum(counts[:rank]) for rank in range(world)])
        self.stream = torch.cuda.Stream(comm.device) if flat.is_cuda else None  # type: ignore[no-untyped-call]


class _Sum:
    """One running sum; the progress thread runs `advance` step by step."""

    def __init__(self, comm: OrderedCommunicator, buffers: _Buffers, flat: Tensor, number: int) -> None:
        self.comm, self.buffers, self.flat, self.number = comm, buffers, flat, number
        self.error: Exception | None = None
        self.done = threading.Event()
        self._started = self._ended = 0.0
        self._ready = torch.cuda.current_stream(flat.device).record_event() if flat.is_cuda else None

    def wait(self) -> tuple[Moment, Moment]:
        with self.comm.status.waiting("gradient all-reduce"):
            self.done.wait()
        if self.error is not None:
            raise self.error
        if self.buffers.stream is not None:
            torch.cuda.current_stream(self.flat.device).wait_stream(self.buffers.stream)
        return self._started, self._ended

    def advance(self) -> Generator[None, None, None]:
        comm, b = self.comm, self.buffers
        self._started = time.perf_counter()
        yield from self._on_stream(lambda: b.host.copy_(self.flat, non_blocking=True) if comm.staged else None)
        while comm.scattered != self.number:
            yield
        is_done = comm.group.scatter(b)
        comm.scattered += 1
        while not is_done():
            yield
        yield from self._on_stream(lambda: add_in_order(b.parts))
        while comm.gathered != self.number:
            yield
        is_done = comm.group.gather(b)
        comm.gathered += 1
        while not is_done():
            yield
        yield from self._on_stream(lambda: self.flat.copy_(b.host, non_blocking=True) if comm.staged else None)
        self._ended = time.perf_counter()

    def _on_stream(self, work: Callable[[], object]) -> Generator[None, None, None]:
        """Run `work`; on a GPU on the stream of the buffers, after the gradients, and yield until it is complete."""
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
    """Drives the sums: MPI's non-blocking collectives make no progress while nobody tests them."""

    def __init__(self) -> None:
        super().__init__(name="ds2-progress", daemon=True)
        self._incoming: queue.SimpleQueue[_Sum | None] = queue.SimpleQueue()

    def submit(self, work: _Sum) -> None:
        """Add a sum."""
        self._incoming.put(work)

    def stop(self) -> None:
        """End the thread after all submitted sums."""
        self._incoming.put(None)
        self.join()

    def run(self) -> None:
        """Advance all sums in turn; block while there is none."""
        running: list[tuple[_Sum, Generator[None, None, None]]] = []
        while True:
            while not running or not self._incoming.empty():
                work = self._incoming.get()
                if work is None:
                    return
                running.append((work, work.advance()))
            running = [(work, steps) for work, steps in running if _advance(work, steps)]
            time.sleep(_POLL_S)


def _advance(work: _Sum, steps: Generator[None, None, None]) -> bool:
    """Run one step of a sum; return whether more remain."""
    try:
        next(steps)
        return True
    except StopIteration:
        pass
    except Exception as error:
        work.error = error
    work.done.set()
    return False
