"""The communicator: the interface between ranks, for a single process and for process groups.

`OrderedCommunicator` is for CPUs, and for GPUs without NCCL: sums in order of rank, driven by a progress thread.
Last come the facts that all ranks must share, for `Communicator.agree`: program, settings and weights.
"""

import hashlib
import platform
import queue
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Protocol, TypeVar

import ds2_ops
import numpy as np
import torch
from torch import Tensor, nn

from ds2.config.convert import flat
from ds2.config.schema import Config
from ds2.distributed.process_group import ProcessGroup, SumBuffers, add_in_order
from ds2.distributed.watchdog import Hang, RankStatus, Watchdog
from ds2.system import UserError
from ds2.system.machine import VERSION

T = TypeVar("T")
Moment = float | torch.cuda.Event  # seconds of `time.perf_counter`, or an event on a CUDA stream


class Pending(Protocol):
    """An asynchronous sum."""

    def wait(self) -> tuple[Moment, Moment]:
        """Wait until the sum is visible to the current stream (or on the CPU); return when it started and ended."""
        ...


class Communicator:
    """Collectives between ranks. This class is the single process, for which they return at once.

    All ranks make the same calls in the same order. Sums have a fixed order of additions, so equal inputs on the same
    number of ranks give equal bits.
    """

    name = "single"  # or mpi, gloo, nccl
    path = "stay on one rank"  # the memory and library that sums of gradients use, in words
    elastic = False  # whether ranks may come and go
    rank, world = 0, 1  # the number of this process, and the number of processes

    def __init__(self, device: torch.device) -> None:
        self.device = device  # of the tensors of this rank
        self.host = platform.node()
        self.status = RankStatus()  # the step and phase of this rank, for messages about failures and the watchdog

    def allgather(self, value: T, classes: Iterable[type] = ()) -> list[T]:
        """Return the small values of all ranks, in order of rank; see `ProcessGroup.allgather`."""
        return [value]

    def broadcast(self, value: T) -> T:
        """Return rank 0's small value, which holds no dataclass."""
        return value

    def broadcast_(self, tensor: Tensor, holders: Collection[int] = (0,)) -> None:
        """Overwrite a contiguous tensor with rank 0's; shape and dtype are the same on all ranks.

        Args:
            tensor: on the device or on the CPU.
            holders: ranks that have it, rank 0 among them: of these, rank 0 alone makes this call.
        """

    def sum_(self, tensor: Tensor) -> None:
        """Overwrite a small contiguous float tensor with its sum over ranks; the shape is the same on all ranks."""

    def sum_chunks(self, chunks: Tensor, own: Tensor | None = None) -> Tensor:
        """Sum over chunks and ranks; return (1, ...) float64.

        Args:
            chunks: (K, ...) float64, contiguous; all dimensions but K are the same on all ranks. May be overwritten.
            own: (...) float32, receives the sum of the chunks of this rank.
        """
        total = chunks.sum(0, keepdim=True)
        if own is not None:
            own.copy_(total[0])
        self.sum_(total)
        return total

    def start_sum(self, tensor: Tensor, *, overlapped: bool = False) -> Pending:
        """Start to overwrite a contiguous float tensor with its sum over ranks.

        Args:
            tensor: of any shape; do not touch it before `wait` has returned.
            overlapped: the device computes meanwhile, so the sum uses few multiprocessors; the same on all ranks.
        """
        raise NotImplementedError("a single process has nothing to sum")

    def copy_sums(self, tensors: Sequence[Tensor]) -> list[Callable[[], Pending]] | None:
        """Return for each tensor a function that starts its sum by copy engines, or None if this is not supported.

        The copies use no multiprocessors; `wait` does the addition. The bits are those of `start_sum`. All ranks make
        this call together, with tensors of the same sizes, whose memory must stay where it is.
        """
        return None

    @property
    def confirms(self) -> bool:
        """Whether sums may end with wrong values where a rank is lost: they count once `confirm_sums` has returned."""
        return False

    def confirm_sums(self) -> None:
        """Check, on all ranks together, that sums that have ended are complete; LostRankError where they may not be."""

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Run the block on rank 0 first, then on one rank of every other host, then on all others, so that they find
        the files that it writes."""
        yield

    def broadcast_tensors(self, tensors: dict[str, Tensor], holders: Collection[int] = (0,)) -> dict[str, Tensor]:
        """Return rank 0's tensors by name, on other ranks as new tensors on the CPU; their own are ignored.

        Args:
            holders: ranks whose own tensors have rank 0's bits, rank 0 among them: they return these, and nothing is
                sent to them. More than one where ranks come and go alone.
        """
        if len(holders) == self.world:
            return tensors
        shapes = self.broadcast({n: (tuple(v.shape), str(v.dtype).removeprefix("torch.")) for n, v in tensors.items()})
        if self.rank != 0 and self.rank in holders:
            return tensors
        if self.rank != 0:
            tensors = {name: torch.empty(shape, dtype=getattr(torch, kind)) for name, (shape, kind) in shapes.items()}
        tensors = {name: value.contiguous() for name, value in tensors.items()}
        for name in shapes:
            self.broadcast_(tensors[name], holders)
        return tensors

    def agree(self, facts: Mapping[str, object], remedy: str) -> None:
        """Check that all ranks have the same facts as rank 0.

        Args:
            remedy: what the user can do about a difference.

        Raises:
            UserError: on all ranks; names the first rank that differs, its host, the facts, and the remedy.
        """
        host, expected = self.broadcast((self.host, dict(facts)))
        differing = differing_facts(facts, expected)
        difference = f"rank {self.rank} on {self.host} differs from rank 0 on {host}: {differing}" if differing else ""
        first = next((text for text in self.allgather(difference) if text), "")
        if first:
            raise UserError(f"{first}; {remedy}")

    def joiners_wait(self) -> bool:
        """Whether a process wants to become a rank of an elastic group, as far as this rank knows."""
        return False

    def superseded(self) -> bool:
        """Whether an elastic group went on without this rank, which did not answer: it must write no more."""
        return False

    def check(self) -> None:
        """Raise LostRankError if a rank was lost; long work without calls to other ranks calls it now and then."""

    def abort(self, status: int) -> None:
        """End all ranks at once with an exit status."""
        sys.exit(status)

    def close(self) -> None:
        """Release all resources; all ranks call it together."""


class GroupCommunicator(Communicator):
    """Ranks of a process group, which carries everything but `start_sum`: subclasses define that.

    Args:
        device: of the tensors of this rank.
        timeout_s: of the watchdog, see `ds2.distributed.watchdog.find_hang`.
    """

    def __init__(self, group: ProcessGroup, device: torch.device, timeout_s: float) -> None:
        super().__init__(device)
        self._timeout_s = timeout_s
        self._use(group)

    def _use(self, group: ProcessGroup) -> None:
        """Exchange values over a group from now on."""
        self.rank, self.world = group.rank, group.size
        self.group = group
        timeout_s, elastic = self._timeout_s, self.elastic
        self.watchdog = Watchdog(group.channel(), group.hosts, self.status, timeout_s, self._end_hang, elastic=elastic)
        self.watchdog.start()

    def _end_hang(self, hang: Hang) -> None:
        """End the job: the watchdog has found that a rank hangs."""
        self.abort(1)

    def allgather(self, value: T, classes: Iterable[type] = ()) -> list[T]:
        with self.status.waiting("allgather"):
            return self.group.allgather(value, classes)

    def broadcast(self, value: T) -> T:
        with self.status.waiting("broadcast"):
            return self.group.broadcast(value)

    def broadcast_(self, tensor: Tensor, holders: Collection[int] = (0,)) -> None:
        host = tensor.detach().cpu()
        octets = host.view(-1).view(torch.uint8)
        with self.status.waiting("broadcast"):
            if host.numel() and len(holders) == 1:
                self.group.broadcast_(octets)
            elif host.numel():
                self.group.send_(octets, [rank for rank in range(self.world) if rank not in holders])
        if self.rank != 0:
            tensor.detach().copy_(host)

    def sum_(self, tensor: Tensor) -> None:
        if self.world == 1:  # then no GPU need be waited for
            return
        host = tensor.detach().cpu().view(-1)
        parts = torch.empty(self.world, host.numel(), dtype=host.dtype)
        with self.status.waiting("sum"):
            self.group.allgather_(parts, host)
        tensor.detach().view(-1).copy_(add_in_order(parts))

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        turn = 0 if self.rank == 0 else 1 if self.group.local_rank == 0 else 2
        for _ in range(turn):
            self.barrier()
        yield
        for _ in range(turn, 3):
            self.barrier()

    def barrier(self) -> None:
        """Wait until all ranks have made this call."""
        with self.status.waiting("barrier"):
            self.group.barrier()

    def abort(self, status: int) -> None:
        self.group.abort(status)

    def close(self) -> None:
        self.barrier()
        self.watchdog.stop()
        self.group.close()


_POLL_S = 20e-6  # between tests of running transfers


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
        memory = "memory" if device.type == "cpu" else "GPU memory"
        self.path = f"from {memory}{' through page-locked host memory' if self.staged else ''} over {group.name}"

    def _use(self, group: ProcessGroup) -> None:
        super()._use(group)
        self.scattered = self.gathered = 0  # the sums whose transfer was started: all ranks start them in one order
        self._sums = 0  # the sums that were started
        self._buffers: dict[int, _Buffers] = {}
        self._started: queue.SimpleQueue[_Sum | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._advance_sums, name="ds2-progress", daemon=True)
        self._thread.start()

    def start_sum(self, tensor: Tensor, *, overlapped: bool = False) -> Pending:
        flat = tensor.detach().view(-1)
        buffers = self._buffers.get(flat.data_ptr())
        if buffers is None or buffers.host.numel() != flat.numel():
            buffers = self._buffers[flat.data_ptr()] = _Buffers(self, flat)
        pending = _Sum(self, buffers, flat, self._sums)
        self._sums += 1
        self._started.put(pending)
        return pending

    def _advance_sums(self) -> None:
        """Advance all sums in turn: MPI's transfers progress only while somebody tests them. Wait while none runs."""
        if self.device.type == "cuda":  # else this thread would also open the first GPU, and take memory there
            torch.cuda.set_device(self.device)
        started, running = self._started, list[_Sum]()
        while True:
            while not running or not started.empty():
                pending = started.get()
                if pending is None:
                    return
                running.append(pending)
            running = [each for each in running if each.advance()]
            time.sleep(_POLL_S)

    def end_sums(self) -> None:
        """End the thread of the sums; those that run are given up."""
        self._started.put(None)
        self._thread.join()

    def close(self) -> None:
        self.end_sums()
        super().close()


class _Buffers(SumBuffers):
    """The buffers of the sums of one tensor, reused in each step."""

    def __init__(self, comm: OrderedCommunicator, flat: Tensor) -> None:
        n, world = flat.numel(), comm.world
        host = torch.empty(n, dtype=flat.dtype, pin_memory=True) if comm.staged else flat
        counts = [n // world + (rank < n % world) for rank in range(world)]
        parts = torch.empty(world, counts[comm.rank], dtype=flat.dtype, device=host.device)
        super().__init__(host, parts, counts)
        self.stream = torch.cuda.Stream(comm.device) if flat.is_cuda else None  # type: ignore[no-untyped-call]


class _Sum:
    """One running sum, which the progress thread advances."""

    def __init__(self, comm: OrderedCommunicator, buffers: _Buffers, flat: Tensor, number: int) -> None:
        self.comm, self.buffers, self.flat, self.number = comm, buffers, flat, number
        self._moments: Future[tuple[float, float]] = Future()  # when it began and ended
        self._ready = torch.cuda.current_stream(flat.device).record_event() if flat.is_cuda else None
        self._steps = self._run()

    def wait(self) -> tuple[Moment, Moment]:
        with self.comm.status.waiting("gradient all-reduce"):
            moments = self._moments.result()
        if self.buffers.stream is not None:
            torch.cuda.current_stream(self.flat.device).wait_stream(self.buffers.stream)
        return moments

    def advance(self) -> bool:
        """Go on as far as possible without waiting; return whether something remains."""
        try:
            next(self._steps)
            return True
        except StopIteration as end:
            self._moments.set_result(end.value)
        except Exception as error:
            self._moments.set_exception(error)
        return False

    def _run(self) -> Generator[None, None, tuple[float, float]]:
        """Transfer and add, and yield where this would wait."""
        comm, buffers, began = self.comm, self.buffers, time.perf_counter()
        yield from self._on_stream(lambda: buffers.host.copy_(self.flat, non_blocking=True) if comm.staged else None)
        while comm.scattered != self.number:
            yield
        is_done = comm.group.scatter(buffers)
        comm.scattered += 1
        while not is_done():
            yield
        yield from self._on_stream(lambda: add_in_order(buffers.parts))
        while comm.gathered != self.number:
            yield
        is_done = comm.group.gather(buffers)
        comm.gathered += 1
        while not is_done():
            yield
        yield from self._on_stream(lambda: self.flat.copy_(buffers.host, non_blocking=True) if comm.staged else None)
        return began, time.perf_counter()

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


_HOST_SETTINGS = {  # the content of files is compared where it decides a result
    "run_dir", "device", "data.train", "data.dev", "data.test", "data.corpus", "data.work_dir", "data.workers",
    "data.cache", "data.cache_gb", "augment.noise", "alphabet.lexicon", "train.intermediate_lexicon",
}  # fmt: skip


def differing_facts(facts: Mapping[str, object], expected: Mapping[str, object]) -> str:
    """Say which of the expected facts differ, and how; '' if none does."""
    pairs = ((name, facts.get(name), value) for name, value in expected.items())
    return ", ".join(f"{name}: {own} instead of {value}" for name, own, value in pairs if own != value)


@cache
def program() -> dict[str, object]:
    """Return the versions of ds2, with a digest of its sources, of torch, and of what makes batches and labels."""
    digest = hashlib.sha256()
    for name, file in sources():
        digest.update(name.encode() + b"\0" + file.read_bytes())
    return {
        "ds2": f"{VERSION} ({digest.hexdigest()[:12]})", "torch": torch.__version__, "NumPy": np.__version__,
        "Unicode of Python": unicodedata.unidata_version,  # transcripts are lowered and composed by its tables
    }  # fmt: skip


def sources() -> list[tuple[str, Path]]:
    """Return all source files of ds2 and ds2_ops with their paths in the package."""
    return [
        (file.relative_to(package).as_posix(), file)
        for package in (Path(__file__).parents[1], Path(str(ds2_ops.__file__)).parent)
        for file in sorted(package.rglob("*"))
        if file.suffix in (".py", ".cuh", ".h", ".json")
    ]


def settings(config: Config) -> dict[str, object]:
    """Return all settings by dotted key, without paths and devices, in which hosts may differ."""
    return {key: value for key, value in flat(asdict(config)).items() if key not in _HOST_SETTINGS}


def weights(model: nn.Module) -> dict[str, object]:
    """Return a checksum of all float32 parameters and buffers: the exact sum of their bits as integers."""
    tensors = [t.detach() for t in (*model.parameters(), *model.buffers()) if t.dtype == torch.float32]
    sums = [t.contiguous().view(torch.int32).sum(dtype=torch.int64) for t in tensors if t.numel()]
    return {"weights": f"sum {int(torch.stack(sums).sum()) if sums else 0}"}
