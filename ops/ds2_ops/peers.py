"""Sums over the GPUs of one host, which write into one another's memory through CUDA's interprocess handles.

A `Mailbox` is memory on a GPU that other processes can map. `PeerSum` adds up a few numbers over all ranks in one
launch; `PeerExchange` adds up a large tensor over two ranks by a copy and an addition.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ds2_ops.jit import runtime
from ds2_ops.jit.launch import Launch, Source, multiprocessors, parameters, run, translation_unit

_HANDLE_BYTES = 64
_GRANULE = 2 << 20  # CUDA maps whole granules: a smaller allocation would map other tensors with it
_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS

MAX_RANKS = 8
MAX_NUMBERS = 8192  # of a `PeerSum`
SUM_THREADS = 256
_MAX_CHUNKS = 64  # one thread loads all chunks of a number
_COUNTERS_BYTES = 4 * (MAX_NUMBERS // SUM_THREADS)

EXCHANGE_THREADS = 512
_EXCHANGE_BLOCKS = 2  # of a multiprocessor: memory, not arithmetic, limits the speed
_MAX_EXCHANGE_BLOCKS = 2048  # of any GPU
_HEADER_BYTES = 512  # counters before the numbers


class Mailbox:
    """Zeros on a GPU, into which other processes may write.

    Args:
        size: bytes, at least.
        device_index: the CUDA device.

    Attributes:
        address: of its first byte.
        handle: by which another process opens it.

    Raises:
        RuntimeError: the driver refuses it.
    """

    def __init__(self, size: int, device_index: int) -> None:
        self._device_index = device_index
        self._opened: list[int] = []
        with runtime.current(device_index):
            size += -size % _GRANULE
            self.address = int(runtime.call("cuMemAlloc", size))
            runtime.call("cuMemsetD8", self.address, 0, size)
            runtime.call("cuCtxSynchronize")
            self.handle = ctypes.string_at(runtime.call("cuIpcGetMemHandle", self.address).getPtr(), _HANDLE_BYTES)

    def open(self, handle: bytes) -> int:
        """Map another process's mailbox until `close`; return its address in this process.

        Raises:
            RuntimeError: the GPUs cannot reach each other's memory.
        """
        from cuda.bindings import driver

        ipc_handle = driver.CUipcMemHandle()
        ctypes.memmove(ipc_handle.getPtr(), handle, _HANDLE_BYTES)
        with runtime.current(self._device_index):
            self._opened.append(int(runtime.call("cuIpcOpenMemHandle", ipc_handle, _ENABLE_PEER_ACCESS)))
        return self._opened[-1]

    def close(self) -> None:
        """Unmap the mailboxes of other processes. This one lives until the process ends: others may have it mapped."""
        with runtime.current(self._device_index):
            for address in self._opened:
                runtime.call("cuIpcCloseMemHandle", address)
        self._opened.clear()


def sum_bytes(ranks: int) -> int:
    """Size of a rank's mailbox for `PeerSum`: counters of blocks, and two buffers of 16 bytes a number and rank."""
    return _COUNTERS_BYTES + 2 * ranks * MAX_NUMBERS * 16


class PeerSum:
    """Sums over ranks, which all make the same calls in the same order, each on one stream at a time.

    Args:
        rank: of this process.
        mailboxes: addresses of all ranks' mailboxes in this process, `sum_bytes` zeros each.
    """

    def __init__(self, rank: int, mailboxes: Sequence[int]) -> None:
        self._launch = functools.partial(Launch, _sum_source(len(mailboxes)), SUM_THREADS)
        numbers = [address + _COUNTERS_BYTES for address in mailboxes]
        self._arguments = [mailboxes[rank], rank, MAX_NUMBERS, numbers[rank], *numbers]

    @staticmethod
    def takes(chunks: Tensor) -> bool:
        """Return whether chunks (K, ...) are float64, at most 64, and of up to `MAX_NUMBERS` numbers each."""
        return chunks.dtype == torch.float64 and 0 < len(chunks) <= _MAX_CHUNKS and chunks[0].numel() <= MAX_NUMBERS

    def __call__(self, chunks: Tensor, own: Tensor | None = None) -> Tensor:
        """Add up chunks, then the sums of all ranks in order of rank.

        On torch's current stream; can be captured in a CUDA graph. The kernel waits for those of all other ranks.

        Args:
            chunks: (K, ...) contiguous, for which `takes` holds; the first is overwritten with the result.
            own: (...) float32, contiguous; receives the sum of this rank's chunks.

        Returns:
            The first chunk, (1, ...).

        Raises:
            RuntimeError: the driver's or compiler's error, with size and GPU.
        """
        count = chunks[0].numel()
        launch, arguments = self._launch(grid=-(-count // SUM_THREADS)), (chunks, len(chunks), count, own)
        run(launch, [*self._arguments, *arguments], lambda: f"the sum over ranks of {count} numbers", chunks.device)
        return chunks[:1]


def exchange_bytes(count: int) -> int:
    """Size of a rank's mailbox for a `PeerExchange` of so many numbers."""
    return _HEADER_BYTES + 4 * count


class PeerExchange:
    """Sums of one size over two ranks, one after another. Both add the same two tensors, so they get the same bits.

    Args:
        own: address of `exchange_bytes` zeros on this rank's GPU, into which the other rank writes.
        other: address of the other rank's, in this process.
    """

    def __init__(self, own: int, other: int) -> None:
        self._own, self._other = own, other

    @staticmethod
    def takes(tensor: Tensor) -> bool:
        """Return whether a tensor is float32, contiguous, aligned to 16 bytes and not too large."""
        aligned = tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.data_ptr() % 16 == 0
        return aligned and 0 < tensor.numel() < 2**31 - _MAX_EXCHANGE_BLOCKS * EXCHANGE_THREADS

    def send(self, tensor: Tensor) -> None:
        """Copy the numbers (N,) to the other rank, on torch's current stream; they must not change until `add`.

        Raises:
            RuntimeError: the driver's error.
        """
        count, device = tensor.numel(), tensor.device
        run(Launch(AWAIT, 32), [self._own], lambda: f"a copy of {count} numbers to another rank", device)
        _copy(self._other + _HEADER_BYTES, tensor)

    def add(self, tensor: Tensor) -> None:
        """Add the other rank's numbers to the numbers (N,), on a stream that follows `send`; wait for them there.

        Raises:
            RuntimeError: the driver's or compiler's error.
        """
        count, device = tensor.numel(), tensor.device
        grid = min(_EXCHANGE_BLOCKS * multiprocessors(device), _MAX_EXCHANGE_BLOCKS, -(-count // EXCHANGE_THREADS))
        arguments = (self._own, self._other, tensor, self._own + _HEADER_BYTES, count, grid)
        launch = Launch(ADD, EXCHANGE_THREADS, grid)
        run(launch, arguments, lambda: f"the addition of {count} numbers of another rank", device)


def _copy(to: int, tensor: Tensor) -> None:
    with torch.cuda.device(tensor.device):
        stream = torch.cuda.current_stream(tensor.device).cuda_stream
        runtime.call("cuMemcpyDtoDAsync", to, tensor.data_ptr(), 4 * tensor.numel(), stream)


@functools.cache
def _sum_source(ranks: int) -> Source:
    buffers = ["mailbox", *(f"of{rank}" for rank in range(ranks))]
    pointers = ", ".join(f"void* {name}" for name in buffers)
    mailbox, *others = (f"reinterpret_cast<unsigned long long*>({name})" for name in buffers)
    return translation_unit(
        "peers/sum.cuh",
        parameters(f"unsigned* sums, int rank, int most, {pointers}, double* chunks, int rows, int count, float* own"),
        f"""    const ds2::Mailboxes<{ranks}> mailboxes{{sums, rank, most, {mailbox}, {{{", ".join(others)}}}}};
    ds2::sum_over_peers(mailboxes, chunks, rows, count, own);
""",
        threads=("PEER_THREADS", SUM_THREADS),
    )


AWAIT = translation_unit("peers/exchange.cuh", parameters("unsigned* own"), "    ds2::await_taken(own);\n")
ADD = translation_unit(
    "peers/exchange.cuh",
    parameters("unsigned* own, unsigned* other, float* numbers, float* came, int count, int grid"),
    "    ds2::add_arrived(own, other, numbers, came, count, grid);\n",
    threads=("EXCHANGE_THREADS", EXCHANGE_THREADS),
)
