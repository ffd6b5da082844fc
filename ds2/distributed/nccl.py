"""The NCCL member: sums between GPUs; the world carries NCCL's identifier, agreements and the watchdog."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from ds2_ops.peers.exchange import Exchange
from torch import Tensor

from ds2.distributed.communicator import Moment, Pending
from ds2.distributed.peers import Peers
from ds2.distributed.ranks import Ranks
from ds2.distributed.world import World
from ds2.system.errors import UserError

_UNIQUE_ID_BYTES = 128
_SUM = 0  # ncclRedOp_t
_TYPES = {torch.float32: 7, torch.float64: 8, torch.bfloat16: 9}  # ncclDataType_t


_BLOCKS = 32  # of a sum of gradients
# Of one beside a backward pass: NCCL starts four together, so they touch two of the seven or eight groups of
# multiprocessors in which a cluster of 16 finds its place.
_BLOCKS_BESIDE = 8
_MAGIC, _UNSET = 0xCAFEBEEF, -(2**31)  # NCCL_API_MAGIC, NCCL_CONFIG_UNDEF_INT


class NcclError(UserError):
    """NCCL refused a call; run again with NCCL_DEBUG=INFO to see why."""


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * _UNIQUE_ID_BYTES)]


class _Config(ctypes.Structure):
    """ncclConfig_t as of NCCL 2.18: later ones take it, by its size, and fill in what they added."""

    _fields_ = [
        ("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint), ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int), ("min_ctas", ctypes.c_int), ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p), ("split_share", ctypes.c_int),
    ]  # fmt: skip


@cache
def load_library() -> Any:
    """The NCCL that torch itself loaded, or the system's.

    Raises:
        OSError: there is none.
    """
    # A sum may be recorded into a CUDA graph on one rank and run at once on another: then none of them may meet the
    # others for a recording's sake, as registering its memory would.
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    library = ctypes.CDLL("libnccl.so.2")
    library.ncclGetErrorString.restype = ctypes.c_char_p
    library.ncclCommInitRankConfig.argtypes = [
        ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, _UniqueId, ctypes.c_int, ctypes.POINTER(_Config),
    ]  # fmt: skip
    library.ncclAllReduce.argtypes = [
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
    ]  # fmt: skip
    library.ncclCommDestroy.argtypes = [ctypes.c_void_p]
    return library


class NcclCommunicator(Ranks):
    """Ranks with a GPU each. Gradients go over NCCL communicators on a stream of their own, statistics between peers
    where all ranks share a host, else over another.

    NCCL adds in an order that its algorithm fixes for a number of ranks, a topology and a buffer size.
    """

    name = "nccl"

    def __init__(self, world: World, device: torch.device, timeout_s: float) -> None:
        super().__init__(world, device, timeout_s)
        self._library = load_library()
        self._gradients, self._statistics = self._open(_BLOCKS), self._open(1)
        # How many blocks there are decides in which order more than two numbers are added up.
        self._beside = self._open(_BLOCKS_BESIDE) if self.world == 2 else self._gradients
        self._peers = Peers(self)
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def _open(self, blocks: int) -> ctypes.c_void_p:
        """Open a communicator whose kernels take at most so many blocks, a multiprocessor each."""
        identifier = _UniqueId()
        if self.rank == 0:
            self._check(self._library.ncclGetUniqueId(ctypes.byref(identifier)))
        identifier = _UniqueId.from_buffer_copy(self.broadcast(bytes(identifier)))
        opened = ctypes.c_void_p()
        config = _Config(ctypes.sizeof(_Config), _MAGIC, 21800, *[_UNSET] * 3, blocks, None, _UNSET)
        call = self._library.ncclCommInitRankConfig
        with self.whereabouts.wait_in("ncclCommInitRankConfig"):
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
            if self._peers.sum_chunks(tensor.detach().view(1, -1)) is None:
                self._all_reduce(tensor.detach(), self._statistics, torch.cuda.current_stream(self.device))
        else:
            super().sum_(tensor)

    def sum_chunks(self, chunks: Tensor, own: Tensor | None = None) -> Tensor:
        total = self._peers.sum_chunks(chunks, own)
        return super().sum_chunks(chunks, own) if total is None else total

    def start_sum(self, tensor: Tensor, *, beside: bool = False) -> Pending:
        return _StreamSum(self, tensor.detach(), beside=beside)

    def enqueue(self, tensor: Tensor, *, beside: bool) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Sum a tensor of any shape on the gradients' stream, after the current one; returns events around the sum."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record(self._stream)
        self._all_reduce(tensor, self._beside if beside else self._gradients, self._stream)
        ended.record(self._stream)
        return began, ended

    def copies(self, tensors: Sequence[Tensor]) -> list[Callable[[], Pending]] | None:
        exchanges = self._peers.exchanges([tensor.numel() for tensor in tensors])
        if exchanges is None or not all(map(Exchange.takes, tensors)):
            return None
        pairs = zip(exchanges, tensors, strict=True)
        return [partial(_CopiedSum, exchange, tensor.detach(), self._stream) for exchange, tensor in pairs]

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        self._peers.close()
        for opened in {id(o): o for o in (self._gradients, self._beside, self._statistics)}.values():
            self._check(self._library.ncclCommDestroy(opened))
        super().close()


class _StreamSum:
    """A sum on the gradients' stream; nobody waits on the host."""

    def __init__(self, comm: NcclCommunicator, tensor: Tensor, *, beside: bool) -> None:
        self._device = comm.device
        self._began, self._ended = comm.enqueue(tensor, beside=beside)

    def wait(self) -> tuple[Moment, Moment]:
        torch.cuda.current_stream(self._device).wait_event(self._ended)
        return self._began, self._ended


class _CopiedSum:
    """A sum whose copies go on the gradients' stream, and whose addition is made when it is waited for."""

    def __init__(self, exchange: Exchange, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        self._exchange, self._tensor = exchange, tensor
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        self._began, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            self._began.record()
            exchange.send(tensor)
            self._ended.record()

    def wait(self) -> tuple[Moment, Moment]:
        torch.cuda.current_stream(self._tensor.device).wait_event(self._ended)
        self._exchange.add(self._tensor)
        return self._began, self._ended
