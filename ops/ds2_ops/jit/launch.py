"""The one way in which every kernel is launched; errors say what failed and on which GPU."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds2_ops.jit import runtime
from ds2_ops.jit.source import Source


@dataclass(frozen=True)
class Launch:
    """A kernel and how it is launched.

    Attributes:
        source: its translation unit.
        threads: a block.
        grid: blocks (not clusters).
        cluster: blocks a cluster.
        smem_bytes: dynamic shared memory a block.
        cooperative: start all blocks at once or none, because they wait for each other.
    """

    source: Source
    threads: int
    grid: int = 1
    cluster: int = 1
    smem_bytes: int = 0
    cooperative: bool = False


def device_index(device: torch.device) -> int:
    """Return the number of a CUDA device; the current one where it has none."""
    return torch.cuda.current_device() if device.index is None else device.index


def run(
    launch: Launch, arguments: Sequence[Tensor | float | None], what: Callable[[], str], device: torch.device
) -> None:
    """Build, load and launch a kernel on torch's current stream of a device, asynchronously.

    Args:
        launch: the kernel.
        arguments: one for each parameter of its source. Tensors must live until this returns.
        what: called where the launch fails: the op, its shapes and its tile, for the message.
        device: a CUDA device.

    Raises:
        RuntimeError: the compiler's or driver's error, with `what` and the GPU's name.
    """
    index = device_index(device)
    with torch.cuda.device(index):
        try:
            runtime.launch(
                runtime.load(launch.source.text, index, runtime.arch(index)),
                launch.source.pack(arguments),
                grid=launch.grid,
                block=launch.threads,
                cluster=launch.cluster,
                smem_bytes=launch.smem_bytes,
                cooperative=launch.cooperative,
                stream=torch.cuda.current_stream(index).cuda_stream,
            )
        except RuntimeError as error:
            raise RuntimeError(f"{what()} failed on {torch.cuda.get_device_name(index)}: {error}") from error
