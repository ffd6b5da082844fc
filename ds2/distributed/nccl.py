"""The NCCL member: sums between GPUs; the world carries NCCL's identifier, agreements and the watchdog."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ds2.distributed.communicator import Moment, Pending
from ds2.distributed.ranks import Ranks
from ds2.distributed.world import World
from ds2.system.errors import UserError

_UNIQUE_ID_BYTES = 128
_SUM = 0  # ncclRedOp_t
_TYPES = {torch.float32: 7, torch.float64: 8, torch.bfloat16: 9}  # ncclDataType_t


class NcclError(UserError):
    """NCCL refused a call; run again with NCCL_DEBUG=INFO to see why."""


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * _UNIQUE_ID_BYTES)]


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
    library.ncclCommInitRank.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, _UniqueId, ctypes.c_int]
    library.ncclAllReduce.argtypes = [
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
    ]  # fmt: skip
    library.ncclCommDestroy.argtypes = [ctypes.c_void_p]
    return library


class NcclCommunicator(Ranks):
    """Ranks with a GPU each. Gradients go over one NCCL communicator on a stream of their own, statistics over another.

    NCCL adds in an order that its algorithm fixes for a number of ranks, a topology and a buffer size.
    """

    name = "nccl"

    def __init__(self, world: World, device: torch.device, timeout_s: float) -> None:
        super().__init__(world, device, timeout_s)
        self._library = load_library()
        self._gradients, self._statistics = self._open(), self._open()
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def _open(self) -> ctypes.c_void_p:
        identifier = _UniqueId()
        if self.rank == 0:
            self._check(self._library.ncclGetUniqueId(ctypes.byref(identifier)))
        identifier = _UniqueId.from_buffer_copy(self.broadcast(bytes(identifier)))
        opened = ctypes.c_void_p()
        with self.whereabouts.wait_in("ncclCommInitRank"):
            self._check(self._library.ncclCommInitRank(ctypes.byref(opened), self.world, identifier, self.rank))
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
            self._all_reduce(tensor.detach(), self._statistics, torch.cuda.current_stream(self.device))
        else:
            super().sum_(tensor)

    def start_sum(self, tensor: Tensor) -> Pending:
        return _StreamSum(self, tensor.detach())

    def enqueue(self, tensor: Tensor) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Sum a tensor on the gradients' stream after what the current stream holds; returns events around the sum."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record(self._stream)
        self._all_reduce(tensor, self._gradients, self._stream)
        ended.record(self._stream)
        return began, ended

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        for opened in (self._gradients, self._statistics):
            self._check(self._library.ncclCommDestroy(opened))
        super().close()


class _StreamSum:
    """A sum on the gradients' stream; nobody waits on the host."""

    def __init__(self, comm: NcclCommunicator, tensor: Tensor) -> None:
        self._device = comm.device
        self._began, self._ended = comm.enqueue(tensor)

    def wait(self) -> tuple[Moment, Moment]:
        torch.cuda.current_stream(self._device).wait_event(self._ended)
        return self._began, self._ended
