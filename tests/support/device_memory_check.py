"""Sums over an MPI that takes pointers to GPU memory, on every rank, without a GPU; started under mpirun by the tests.

The "GPU" is CPU memory that says it is a GPU's: its tensors do so to PyTorch and, over DLPack, to mpi4py, which hands
their addresses to the real MPI as it does those of a GPU. Streams are in order because all work is done at once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from ds2.distributed import mpi
from ds2.distributed.communicator import OrderedCommunicator

DEVICE = torch.device("cuda", 0)
_empty = torch.empty


class DeviceTensor(torch.Tensor):
    """CPU memory that says it is a GPU's."""

    device = DEVICE
    is_cuda = True

    def numpy(self, **_: Any) -> Any:
        """Fail, as for memory of a GPU."""
        raise TypeError("memory of a GPU cannot be read by the host")


def values(rank: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of a rank."""
    return torch.randn(n, generator=torch.Generator().manual_seed(rank), dtype=dtype)


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a CPU tensor to the "GPU"."""
    return tensor.clone().as_subclass(DeviceTensor)


def empty(*size: Any, device: Any = None, pin_memory: bool = False, **options: Any) -> torch.Tensor:
    """As `torch.empty`; page-locked memory is only needed where MPI cannot read the GPU's."""
    assert not pin_memory, "sums go through page-locked host memory"
    made = _empty(*size, **options)
    return on_device(made) if device is not None and torch.device(device).type == "cuda" else made


@contextlib.contextmanager
def fake_gpu() -> Iterator[None]:
    """Let `communicator` find streams and memory of a GPU."""
    stream = mock.MagicMock()
    stream.record_event.return_value.query.return_value = True
    with (
        mock.patch.object(torch, "empty", empty),
        mock.patch.object(torch.cuda, "Stream", lambda *_: stream),
        mock.patch.object(torch.cuda, "current_stream", lambda *_: stream),
        mock.patch.object(torch.cuda, "current_device", lambda: 0),
        mock.patch.object(torch.cuda, "set_device", lambda _: None),
        mock.patch.object(torch.cuda, "stream", lambda _: contextlib.nullcontext()),
    ):
        yield


def main() -> None:
    """Check bits and path of sums."""
    with mock.patch.object(mpi, "_reads_device_memory", lambda: True):
        group = mpi.MpiGroup()
    with fake_gpu():
        comm = OrderedCommunicator(group, DEVICE, 600.0)
        for dtype in (torch.float32, torch.float64):
            for _ in range(2):  # the second time with the buffers of the first
                tensors = [on_device(values(comm.rank, n, dtype)) for n in (1, 37, 70_001)]
                for work in [comm.start_sum(tensor) for tensor in tensors]:
                    work.wait()
                for tensor in tensors:
                    wanted = functools.reduce(torch.add, [values(r, len(tensor), dtype) for r in range(comm.world)])
                    assert torch.equal(tensor.as_subclass(torch.Tensor), wanted)
    if comm.rank == 0:
        print(f"{comm.world} ranks agree; gradients {comm.path}", flush=True)
    comm.close()


if __name__ == "__main__":
    main()
