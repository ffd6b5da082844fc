"""The one way in which every kernel is launched; errors say what failed and on which GPU.

``launch_on`` knows no framework; ``run`` and ``run_on`` are torch's ways to it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds2_ops.jit import runtime
from ds2_ops.jit.source import Argument, Packed, Source

if TYPE_CHECKING:
    import torch

_thread = threading.local()  # `ready` where the thread has a context: one that has asked nothing of CUDA has none


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


def run_loaded(launch: Launch, kernel: Any, packed: Packed, stream: int) -> None:
    """Launch a loaded kernel with packed arguments on a stream, asynchronously; RuntimeError where it is refused."""
    grid, threads, cluster, smem_bytes = launch.grid, launch.threads, launch.cluster, launch.smem_bytes
    config = runtime.config(grid, threads, cluster, smem_bytes, launch.cooperative, launch.early, stream)
    if status := runtime.launch(config, kernel, packed.addresses):
        raise RuntimeError(
            f"launch of {grid} blocks x {threads} threads, cluster {cluster}, {smem_bytes} B shared memory: "
            f"{status.name}"
        )


def launch_on(
    launch: Launch, numbers: Sequence[float], what: Callable[[], str], device_index: int, stream: int
) -> None:
    """Build, load and launch a kernel on a stream of the current device, asynchronously.

    Args:
        launch: the kernel.
        numbers: one for each parameter of its source, addresses among them. Arrays must live until this returns.
        what: called where the launch fails: the op, its shapes and its tile, for the message.
        device_index: the CUDA device, which is the current one.
        stream: its handle.

    Raises:
        RuntimeError: the compiler's or driver's error, with `what` and the GPU's name.
    """
    source = launch.source
    try:
        if not hasattr(_thread, "ready"):
            runtime.set_current(device_index)
            _thread.ready = True
        kernel = runtime.load(source.text, device_index)
        packed = source.pack(numbers)
        run_loaded(launch, kernel, packed, stream)
    except RuntimeError as error:
        raise RuntimeError(f"{what()} failed on {runtime.device_name(device_index)}: {error}") from error
    source.take_back(packed)


def device_index(device: torch.device) -> int:
    """Return the number of a CUDA device; the current one where it has none."""
    if device.index is not None:
        return device.index
    import torch

    return torch.cuda.current_device()


def run(launch: Launch, arguments: Sequence[Argument], what: Callable[[], str], device: torch.device) -> None:
    """Do as ``launch_on`` on torch's current stream of a device; tensors and None may be among the arguments."""
    run_on(launch, launch.source.numbers(arguments), what, device_index(device))


def run_on(launch: Launch, numbers: Sequence[float], what: Callable[[], str], index: int) -> None:
    """Do as ``launch_on`` on torch's current stream of CUDA device ``index``."""
    import torch

    stream = torch._C._cuda_getCurrentRawStream(index)  # these two cost a tenth of what torch.cuda's take
    if index == torch._C._cuda_getDevice():
        launch_on(launch, numbers, what, index, stream)
    else:
        with torch.cuda.device(index):
            launch_on(launch, numbers, what, index, stream)
