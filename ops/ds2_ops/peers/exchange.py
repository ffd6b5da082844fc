"""Sums of something large over two GPUs of a host: copies into the other's memory, then an addition."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ds2_ops.jit import runtime
from ds2_ops.jit.launch import Launch, run
from ds2_ops.jit.source import Source, parameters, translation_unit

THREADS = 512
_BLOCKS = 264  # two a multiprocessor: memory, not arithmetic, sets the pace
_AHEAD = 512  # bytes of words ahead of the numbers


def exchange_bytes(count: int) -> int:
    """What a sum of so many numbers takes of either rank's memory."""
    return _AHEAD + 4 * count


class Exchange:
    """Sums of one size over two ranks, one after another; each adds its own numbers and the other's, so both have the
    same bits.

    Args:
        own: address of `exchange_bytes` zeros on this rank's GPU, into which the other writes.
        other: that of the other rank's, as this process sees it.
    """

    def __init__(self, own: int, other: int) -> None:
        self._own, self._other = own, other

    @staticmethod
    def takes(tensor: Tensor) -> bool:
        """Whether a tensor is such that it can be summed: float32, contiguous, on 16 bytes."""
        whole = tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.data_ptr() % 16 == 0
        return whole and 0 < tensor.numel() < 2**31 - _BLOCKS * THREADS

    def send(self, tensor: Tensor) -> None:
        """Copy the numbers (N,) to the other rank, on torch's current stream; they are to stay as they are until `add`.

        Raises:
            RuntimeError: the driver's error.
        """
        what = lambda: f"a copy of {tensor.numel()} numbers to another rank"  # noqa: E731
        run(Launch(_await_source(), 32), [self._own], what, tensor.device)
        _copy(self._other + _AHEAD, tensor)

    def add(self, tensor: Tensor) -> None:
        """Add to the numbers (N,) those of the other rank, on a stream that is behind `send`; waits for them there.

        Raises:
            RuntimeError: the driver's or compiler's error.
        """
        count = tensor.numel()
        what = lambda: f"the addition of {count} numbers of another rank"  # noqa: E731
        launch = Launch(_add_source(), THREADS, grid=min(_BLOCKS, -(-count // THREADS)))
        run(launch, [self._own, self._other, tensor, self._own + _AHEAD, count, launch.grid], what, tensor.device)


def _copy(to: int, tensor: Tensor) -> None:
    with torch.cuda.device(tensor.device):
        stream = torch.cuda.current_stream(tensor.device).cuda_stream
        runtime.call("cuMemcpyDtoDAsync", to, tensor.data_ptr(), 4 * tensor.numel(), stream)


@functools.cache
def _await_source() -> Source:
    return translation_unit("peers/exchange.cuh", parameters("unsigned* own"), "    ds2::await_taken(own);\n")


@functools.cache
def _add_source() -> Source:
    return translation_unit(
        "peers/exchange.cuh",
        parameters("unsigned* own, unsigned* other, float* numbers, float* came, int count, int grid"),
        "    ds2::add_arrived(own, other, numbers, came, count, grid);\n",
        ahead=f'static_assert(ds2::EXCHANGE_THREADS == {THREADS}, "exchange.py and exchange.cuh disagree");\n',
        launch_bounds=str(THREADS),
    )
