"""Sums between GPUs by NCCL. The process group carries all other values, and the watchdog.

Six functions of NCCL are called by ctypes: the maintained binding nccl4py is at version 0.6, without a stable
interface yet, and the NCCL groups of torch.distributed bring streams and a watchdog of their own.
"""

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from ds2_ops.checks import why_no_gpu
from ds2_ops.peers import MAX_RANKS, Mailbox, PeerExchange, PeerSum, exchange_bytes, sum_bytes
from torch import Tensor

from ds2.distributed.communicator import Communicator, GroupCommunicator, Moment, Pending
from ds2.distributed.process_group import LostRankError, ProcessGroup
from ds2.system import UserError

log = logging.getLogger(__name__)
_UNIQUE_ID_BYTES = 128
_SUM = 0  # ncclRedOp_t
_REMOTE_ERROR = 6  # ncclResult_t
_TYPES = {torch.float32: 7, torch.float64: 8, torch.bfloat16: 9}  # ncclDataType_t
_BLOCKS = 32  # of a sum of gradients
# Of a sum that overlaps with a backward pass. NCCL starts four blocks together, so these occupy two of the seven or
# eight groups of multiprocessors that a cluster of 16 needs one of.
_OVERLAPPED_BLOCKS = 8
_MAGIC, _UNSET = 0xCAFEBEEF, -(2**31)  # NCCL_API_MAGIC, NCCL_CONFIG_UNDEF_INT
_POLL_S = 0.02
_CALL_S = 1.0  # a call of NCCL takes microseconds, unless it waits for a GPU whose queue a broken sum has filled


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
    """Return the NCCL that torch has loaded, or the one of the system; raises OSError where there is none."""
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
    library.ncclCommDestroy.argtypes = library.ncclCommAbort.argtypes = [ctypes.c_void_p]
    return library


def why_no_nccl(group: ProcessGroup, device: torch.device) -> str:
    """Return why the ranks of a group cannot sum by NCCL, or ''; all ranks make this call together."""
    reason = "" if device.type == "cuda" else f"a rank runs on {device}"
    if not reason:
        try:
            load_library()
        except OSError as error:
            reason = f"libnccl.so.2 cannot be loaded ({error})"
    shared = group.any_gpu_shared(device)
    return group.first_nonempty(reason or ("two ranks share a GPU" if shared else ""))


class PeerMemory:
    """Memory of the GPUs of one host that all ranks have mapped: for small sums, and for sums by copy engines.

    Either all ranks map it or none. All ranks make the calls of this class together.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._mailboxes: list[Mailbox] = []
        self._sum: PeerSum | None = None
        reason = self._open()
        if reason:
            self.close()
            if comm.rank == 0:
                log.info("statistics of batch norm are summed by NCCL: %s", reason)

    def _open(self) -> str:
        """Map the mailboxes of all ranks; return why a rank cannot, or ''."""
        comm = self._comm
        obstacle = why_no_gpu(comm.device)
        answers = comm.allgather((comm.host, f"rank {comm.rank}: {obstacle}" if obstacle else ""))
        hosts = len({host for host, _ in answers})
        if hosts > 1 or comm.world > MAX_RANKS:
            return f"there are {comm.world} ranks on {hosts} hosts"
        if first := next((text for _, text in answers if text), ""):
            return first
        addresses, reason = self._map(sum_bytes(comm.world))
        if not reason:
            self._sum = PeerSum(comm.rank, addresses)
        return reason

    def _map(self, size: int) -> tuple[list[int], str]:
        """Map `size` bytes of every rank; return their addresses, and why a rank cannot, or ''."""
        comm, reason, mailbox = self._comm, "", None
        try:
            mailbox = Mailbox(size, comm.device.index or 0)
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
            addresses, reason = self._map(exchange_bytes(size))
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


class NcclSums:
    """Sums over the ranks of a communicator, each of which has a GPU of its own.

    NCCL's order of additions depends only on the number of ranks, the topology and the buffer size. All ranks make all
    calls but `abort` together.

    Raises:
        NcclError: NCCL cannot connect them.
        LostRankError: a rank was lost meanwhile.
    """

    name = "nccl"
    path = "between GPUs over nccl"

    def __init__(self, comm: GroupCommunicator) -> None:
        self._library, self._device = load_library(), comm.device
        self._calling, self._ending = threading.Lock(), threading.Lock()
        self._aborted = False
        # With more than two ranks, the order of additions depends on the number of blocks.
        blocks = [_BLOCKS, 1, *([_OVERLAPPED_BLOCKS] if comm.world == 2 else [])]
        self._opened = self._open(comm, blocks)
        self._gradients, self._statistics = self._opened[:2]
        self._overlapped = self._opened[2] if comm.world == 2 else self._gradients
        self.stream = torch.cuda.Stream(comm.device, priority=-1)  # type: ignore[no-untyped-call]

    def _open(self, comm: GroupCommunicator, blocks: Sequence[int]) -> list[ctypes.c_void_p]:
        """Open communicators of NCCL whose kernels use at most so many blocks, of one multiprocessor each."""
        identifiers = [_UniqueId() for _ in blocks]
        results = [self._library.ncclGetUniqueId(ctypes.byref(one)) for one in identifiers if comm.rank == 0]
        octets = comm.broadcast([] if any(results) else [bytes(identifier) for identifier in identifiers])
        if not octets:  # on all ranks, so that none waits for the others
            self._check(max(results, default=_REMOTE_ERROR))
        opened = [ctypes.c_void_p() for _ in blocks]
        results = []

        def call() -> None:
            torch.cuda.set_device(comm.device)
            for one, count, octets_of_one in zip(opened, blocks, octets, strict=True):
                identifier = _UniqueId.from_buffer_copy(octets_of_one)
                config = _NcclConfig(ctypes.sizeof(_NcclConfig), _MAGIC, 21800, *[_UNSET] * 3, count, None, _UNSET)
                arguments = ctypes.byref(one), comm.world, identifier, comm.rank, ctypes.byref(config)
                results.append(self._library.ncclCommInitRankConfig(*arguments))

        # In a thread of its own: the call waits for all ranks, also for one that is lost, and nothing can end it.
        thread = threading.Thread(target=call, name="ds2-nccl", daemon=True)
        with comm.status.waiting("ncclCommInitRankConfig"):
            thread.start()
            while thread.is_alive():
                thread.join(_POLL_S)
                comm.check()
        for result in results:
            self._check(result)
        return opened

    def _check(self, result: int) -> None:
        if result != 0:
            reason = self._library.ncclGetErrorString(result).decode()
            raise NcclError(
                f"NCCL: {reason}; NCCL_DEBUG=INFO in the environment says more (with mpirun: -x NCCL_DEBUG)"
            )

    def _all_reduce(self, tensor: Tensor, opened: ctypes.c_void_p, stream: torch.cuda.Stream) -> None:
        pointer = tensor.data_ptr()
        with self._calling:
            if self._aborted:
                raise LostRankError("a rank was lost")
            result = self._library.ncclAllReduce(
                pointer, pointer, tensor.numel(), _TYPES[tensor.dtype], _SUM, opened, stream.cuda_stream
            )
        self._check(result)

    def sum_(self, tensor: Tensor) -> None:
        """Overwrite a small contiguous tensor on the GPU with its sum over ranks, on the current stream."""
        self._all_reduce(tensor.detach(), self._statistics, torch.cuda.current_stream(self._device))

    def start(self, tensor: Tensor, *, overlapped: bool) -> Pending:
        """See `Communicator.start_sum`; the sum runs on `stream`."""
        opened = self._overlapped if overlapped else self._gradients
        return _StreamSum(self.stream, lambda: self._all_reduce(tensor.detach(), opened, self.stream))

    def abort(self) -> None:
        """End all sums, also those that wait for a lost rank; what they were to overwrite has any values then.

        From any thread. Later sums raise LostRankError.
        """
        with self._ending:
            if self._aborted:
                return
            self._aborted = True
        # If a call waits for the GPU, the aborts let it return, long before memory that it uses is freed.
        in_turn = self._calling.acquire(timeout=_CALL_S)
        # All at once, and without waiting: each ends its kernels at once, but then looks a minute for a lost rank.
        for opened in self._opened:
            threading.Thread(target=self._abort_one, args=(opened,), name="ds2-abort", daemon=True).start()
        if in_turn:
            self._calling.release()

    def _abort_one(self, opened: ctypes.c_void_p) -> None:
        torch.cuda.set_device(self._device)
        self._library.ncclCommAbort(opened)

    def close(self) -> None:
        """Free what NCCL holds; no sum runs any more."""
        for opened in self._opened:
            self._check(self._library.ncclCommDestroy(opened))


class NcclCommunicator(GroupCommunicator):
    """Ranks with one GPU each.

    Gradients go through NCCL on a stream of their own. Small sums go through mapped memory if all ranks share a host,
    else through another NCCL communicator.
    """

    name, path = NcclSums.name, NcclSums.path

    def __init__(self, group: ProcessGroup, device: torch.device, timeout_s: float) -> None:
        super().__init__(group, device, timeout_s)
        self._sums = NcclSums(self)
        self._peers = PeerMemory(self)

    def sum_(self, tensor: Tensor) -> None:
        if not tensor.is_cuda:
            super().sum_(tensor)
        elif self._peers.sum_chunks(tensor.detach().view(1, -1)) is None:  # else that one chunk has the sum
            self._sums.sum_(tensor)

    def sum_chunks(self, chunks: Tensor, own: Tensor | None = None) -> Tensor:
        total = self._peers.sum_chunks(chunks, own)
        return super().sum_chunks(chunks, own) if total is None else total

    def start_sum(self, tensor: Tensor, *, overlapped: bool = False) -> Pending:
        return self._sums.start(tensor, overlapped=overlapped)

    def copy_sums(self, tensors: Sequence[Tensor]) -> list[Callable[[], Pending]] | None:
        exchanges = self._peers.exchanges([tensor.numel() for tensor in tensors])
        if exchanges is None or not all(map(PeerExchange.takes, tensors)):
            return None
        pairs = zip(exchanges, [tensor.detach() for tensor in tensors], strict=True)
        stream = self._sums.stream
        return [partial(_StreamSum, stream, partial(peer.send, t), partial(peer.add, t)) for peer, t in pairs]

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        self._peers.close()
        self._sums.close()
        super().close()


class _StreamSum:
    """A sum on the gradient stream, after what the current stream has launched; the host does not wait.

    Args:
        launch: launches it on the stream.
        add: launches what is left of it once it has travelled, on the stream that waits for it.
    """

    def __init__(
        self, stream: torch.cuda.Stream, launch: Callable[[], object], add: Callable[[], object] = lambda: None
    ) -> None:
        self._device, self._add = stream.device, add
        stream.wait_stream(torch.cuda.current_stream(self._device))
        self._started, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            self._started.record()
            launch()
            self._ended.record()

    def wait(self) -> tuple[Moment, Moment]:
        torch.cuda.current_stream(self._device).wait_event(self._ended)
        self._add()
        return self._started, self._ended
