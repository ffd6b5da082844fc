"""The NCCL communicator: sums between GPUs. The process group carries all other values, and the watchdog.

Five functions of NCCL are called by ctypes: the maintained binding nccl4py is at version 0.6, without a stable
interface yet, and the NCCL groups of torch.distributed bring streams and a watchdog of their own.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from ds2_ops.checks import why_no_gpu
from ds2_ops.peers import MAX_RANKS, Mailbox, PeerExchange, PeerSum, exchange_bytes, sum_bytes
from torch import Tensor

from ds2.distributed.communicator import Communicator, GroupCommunicator, Moment, Pending
from ds2.distributed.process_group import ProcessGroup
from ds2.system import UserError

log = logging.getLogger(__name__)
_UNIQUE_ID_BYTES = 128
_SUM = 0  # ncclRedOp_t
_TYPES = {torch.float32: 7, torch.float64: 8, torch.bfloat16: 9}  # ncclDataType_t
_BLOCKS = 32  # of a sum of gradients
# Of a sum that overlaps with a backward pass. NCCL starts four blocks together, so these occupy two of the seven or
# eight groups of multiprocessors that a cluster of 16 needs one of.
_OVERLAPPED_BLOCKS = 8
_MAGIC, _UNSET = 0xCAFEBEEF, -(2**31)  # NCCL_API_MAGIC, NCCL_CONFIG_UNDEF_INT


class NcclError(UserError):
    """A call of NCCL failed; NCCL_DEBUG=INFO shows why."""


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * _UNIQUE_ID_BYTES)]


class _NcclConfig(ctypes.Structure):
    """ncclConfig_t of NCCL 2.18; later versions recognise it by its size and use defaults for their new fields."""

    _fields_ = [
        ("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint), ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int), ("min_ctas", ctypes.c_int), ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p), ("split_share", ctypes.c_int),
    ]  # fmt: skip


@cache
def load_library() -> Any:
    """Return the NCCL that torch has loaded, or the one of the system.

    Raises:
        OSError: there is none.
    """
    # One rank may record a sum into a CUDA graph while another runs it eagerly. So recording must not synchronise
    # with other ranks, as the registration of buffers would.
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    library = ctypes.CDLL("libnccl.so.2")
    library.ncclGetErrorString.restype = ctypes.c_char_p
    library.ncclCommInitRankConfig.argtypes = [
        ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, _UniqueId, ctypes.c_int, ctypes.POINTER(_NcclConfig),
    ]  # fmt: skip
    library.ncclAllReduce.argtypes = [
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
    ]  # fmt: skip
    library.ncclCommDestroy.argtypes = [ctypes.c_void_p]
    return library


class PeerMemory:
    """Memory of the GPUs of one host that all ranks have mapped: for small sums, and for sums by copy engines.

    Either all ranks map it or none. All ranks make the calls of this class together.

    Args:
        comm: the ranks; their devices are GPUs.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._mailboxes: list[Mailbox] = []
        self._sum: PeerSum | None = None
        reason = self._open(comm, comm.device.index or 0)
        if reason:
            self.close()
            if comm.rank == 0:
                log.info("statistics of batch norm are summed by NCCL: %s", reason)

    def _open(self, comm: Communicator, device_index: int) -> str:
        """Map the mailboxes of all ranks; return why a rank cannot, or ''."""
        obstacle = why_no_gpu(comm.device)
        answers = comm.allgather((comm.host, f"rank {comm.rank}: {obstacle}" if obstacle else ""))
        hosts = len({host for host, _ in answers})
        if hosts > 1 or comm.world > MAX_RANKS:
            return f"there are {comm.world} ranks on {hosts} hosts"
        if first := next((text for _, text in answers if text), ""):
            return first
        addresses, reason = self._map(comm, sum_bytes(comm.world), device_index)
        if not reason:
            self._sum = PeerSum(comm.rank, addresses)
        return reason

    def _map(self, comm: Communicator, size: int, device_index: int) -> tuple[list[int], str]:
        """Map `size` bytes of every rank; return their addresses, and why a rank cannot, or ''."""
        reason, mailbox = "", None
        try:
            mailbox = Mailbox(size, device_index)
            self._mailboxes.append(mailbox)
        except RuntimeError as error:
            reason = f"rank {comm.rank}: {error}"
        handles = comm.allgather(mailbox.handle if mailbox else b"")
        addresses = []
        if mailbox and all(handles):
            try:
                addresses = [mailbox.address if r == comm.rank else mailbox.open(h) for r, h in enumerate(handles)]
            except RuntimeError as error:
                reason = f"rank {comm.rank}: {error}"
        return addresses, next((text for text in comm.allgather(reason) if text), "")

    def exchanges(self, sizes: Sequence[int]) -> list[PeerExchange] | None:
        """Return for each size (in numbers) what sums it over two ranks by copies.

        None if there are other than two ranks, or too little memory. All ranks pass the same sizes.
        """
        comm = self._comm
        if self._sum is None or comm.world != 2:
            return None
        exchanges = []
        for size in sizes:
            addresses, reason = self._map(comm, exchange_bytes(size), comm.device.index or 0)
            if reason:
                if comm.rank == 0:
                    log.info("sums of gradients are not made by copies: %s", reason)
                return None
            exchanges.append(PeerExchange(addresses[comm.rank], addresses[1 - comm.rank]))
        return exchanges

    def sum_chunks(self, chunks: Tensor, own: Tensor | None = None) -> Tensor | None:
        """`Communicator.sum_chunks` for chunks on the GPU, into the first of them; None if they do not fit.

        A rank with too many chunks adds them up first and calls this again with one.
        """
        return self._sum(chunks, own) if self._sum is not None and self._sum.takes(chunks) else None

    def close(self) -> None:
        """Unmap the memory of other ranks."""
        for mailbox in self._mailboxes:
            mailbox.close()
        self._mailboxes, self._sum = [], None


class NcclCommunicator(GroupCommunicator):
    """Ranks with one GPU each.

    Gradients go through NCCL on a stream of their own. Small sums go through mapped memory if all ranks share a host,
    else through another NCCL communicator. NCCL's order of additions depends only on the number of ranks, the topology
    and the buffer size.
    """

    name = "nccl"
    path = "between GPUs over nccl"

    def __init__(self, group: ProcessGroup, device: torch.device, timeout_s: float) -> None:
        super().__init__(group, device, timeout_s)
        self._library = load_library()
        self._gradients, self._statistics = self._open(_BLOCKS), self._open(1)
        # With more than two ranks, the order of additions depends on the number of blocks.
        self._overlapped = self._open(_OVERLAPPED_BLOCKS) if self.world == 2 else self._gradients
        self._peers = PeerMemory(self)
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def _open(self, blocks: int) -> ctypes.c_void_p:
        """Open an NCCL communicator whose kernels use at most `blocks` blocks, of one multiprocessor each."""
        identifier = _UniqueId()
        if self.rank == 0:
            self._check(self._library.ncclGetUniqueId(ctypes.byref(identifier)))
        identifier = _UniqueId.from_buffer_copy(self.broadcast(bytes(identifier)))
        opened = ctypes.c_void_p()
        config = _NcclConfig(ctypes.sizeof(_NcclConfig), _MAGIC, 21800, *[_UNSET] * 3, blocks, None, _UNSET)
        call = self._library.ncclCommInitRankConfig
        with self.status.waiting("ncclCommInitRankConfig"):
            self._check(call(ctypes.byref(opened), self.world, identifier, self.rank, ctypes.byref(config)))
        return opened

    def _check(self, result: int) -> None:
        if result != 0:
            reason = self._library.ncclGetErrorString(result).decode()
            raise NcclError(
                f"NCCL: {reason}; NCCL_DEBUG=INFO in the environment says more (with mpirun: -x NCCL_DEBUG)"
            )

    def _all_reduce(self, tensor: Tensor, opened: ctypes.c_void_p, stream: torch.cuda.Stream) -> None:
        pointer = tensor.data_ptr()
        self._check(
            self._library.ncclAllReduce(
                pointer, pointer, tensor.numel(), _TYPES[tensor.dtype], _SUM, opened, stream.cuda_stream
            )
        )

    def sum_(self, tensor: Tensor) -> None:
        if tensor.is_cuda:
            if self._peers.sum_chunks(tensor.detach().view(1, -1)) is None:  # else that one chunk has the sum
                self._all_reduce(tensor.detach(), self._statistics, torch.cuda.current_stream(self.device))
        else:
            super().sum_(tensor)

    def sum_chunks(self, chunks: Tensor, own: Tensor | None = None) -> Tensor:
        total = self._peers.sum_chunks(chunks, own)
        return super().sum_chunks(chunks, own) if total is None else total

    def start_sum(self, tensor: Tensor, *, overlapped: bool = False) -> Pending:
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        started.record(self._stream)
        self._all_reduce(tensor.detach(), self._overlapped if overlapped else self._gradients, self._stream)
        ended.record(self._stream)
        return _StreamSum(self.device, started, ended)

    def copy_sums(self, tensors: Sequence[Tensor]) -> list[Callable[[], Pending]] | None:
        exchanges = self._peers.exchanges([tensor.numel() for tensor in tensors])
        if exchanges is None or not all(map(PeerExchange.takes, tensors)):
            return None
        pairs = zip(exchanges, tensors, strict=True)
        return [partial(_CopiedSum, exchange, tensor.detach(), self._stream) for exchange, tensor in pairs]

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        self._peers.close()
        for opened in {id(o): o for o in (self._gradients, self._overlapped, self._statistics)}.values():
            self._check(self._library.ncclCommDestroy(opened))
        super().close()


class _StreamSum:
    """A sum by NCCL on the gradient stream, between two events; the host does not wait."""

    def __init__(self, device: torch.device, started: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        self._device, self._started, self._ended = device, started, ended

    def wait(self) -> tuple[Moment, Moment]:
        torch.cuda.current_stream(self._device).wait_event(self._ended)
        return self._started, self._ended


class _CopiedSum:
    """A sum with copies on the gradient stream, and an addition in `wait`."""

    def __init__(self, exchange: PeerExchange, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        self._exchange, self._tensor = exchange, tensor
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        self._started, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            self._started.record()
            exchange.send(tensor)
            self._ended.record()

    def wait(self) -> tuple[Moment, Moment]:
        torch.cuda.current_stream(self._tensor.device).wait_event(self._ended)
        self._exchange.add(self._tensor)
        return self._started, self._ended
