"""The one way in which every kernel is launched; errors say what failed and on which GPU.

``launch_on`` knows no framework; ``run`` is torch's way to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds2_ops.jit import runtime
from ds2_ops.jit.source import Argument, Source

if TYPE_CHECKING:
    import torch


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
        early: start while the kernel before it on the stream still runs, if that one says so: for a kernel that waits
            itself before it touches anything but weights (`await_kernel_before` in csrc/ptx/sync.cuh).
    """

    source: Source
    threads: int
    grid: int = 1
    cluster: int = 1
    smem_bytes: int = 0
    cooperative: bool = False
    early: bool = False


def run_loaded(launch: Launch, kernel: Any, packed: Any, stream: int) -> None:
    """Launch a loaded kernel with packed arguments on a stream, asynchronously; as `runtime.launch`."""
    runtime.launch(
        kernel,
        packed,
        grid=launch.grid,
        block=launch.threads,
        cluster=launch.cluster,
        smem_bytes=launch.smem_bytes,
        cooperative=launch.cooperative,
        early=launch.early,
        stream=stream,
    )


def launch_on(
    launch: Launch, arguments: Sequence[Argument], what: Callable[[], str], device_index: int, stream: int
) -> None:
    """Build, load and launch a kernel on a stream of the current device, asynchronously.

    Args:
        launch: the kernel.
        arguments: one for each parameter of its source. Arrays must live until this returns.
        what: called where the launch fails: the op, its shapes and its tile, for the message.
        device_index: the CUDA device, which is the current one.
        stream: its handle.

    Raises:
        RuntimeError: the compiler's or driver's error, with `what` and the GPU's name.
    """
    try:
        kernel = runtime.load(launch.source.text, device_index, runtime.arch(device_index))
        run_loaded(launch, kernel, launch.source.pack(arguments), stream)
    except RuntimeError as error:
        raise RuntimeError(f"{what()} failed on {runtime.device_name(device_index)}: {error}") from error


def device_index(device: torch.device) -> int:
    """Return the number of a CUDA device; the current one where it has none."""
    import torch

    return torch.cuda.current_device() if device.index is None else device.index


def run(launch: Launch, arguments: Sequence[Argument], what: Callable[[], str], device: torch.device) -> None:
    """Do as ``launch_on`` on torch's current stream of a device."""
    import torch

    index = device_index(device)
    with torch.cuda.device(index):
        launch_on(launch, arguments, what, index, torch.cuda.current_stream(index).cuda_stream)
