"""A kernel's translation unit, its parameters, and the one way in which every kernel is launched.

A table of parameters is written once. It gives the signature of the kernel, the arguments of the calls in its body, and
the C types of the arguments of a launch. `launch_on` needs no framework; `run` and `run_on` launch on torch's current
stream. Errors name what failed and on which GPU.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds2_ops.jit import runtime
from ds2_ops.jit.build import ENTRY

if TYPE_CHECKING:
    import torch

    Argument = torch.Tensor | float | None

_thread = threading.local()  # has `ready` once the thread has a CUDA context; a new thread has none


Parameters = tuple[tuple[str, str], ...]  # (C type, name), in the kernel's order


def parameters(declarations: str) -> Parameters:
    """Parse C declarations, ``type name, type name, ...``."""
    pairs = (" ".join(declaration.split()).rpartition(" ") for declaration in declarations.split(","))
    return tuple((kind, name) for kind, _, name in pairs)


def names(parameters: Parameters) -> str:
    """Return the names of the parameters, separated by commas: the arguments of a call or the members of a struct."""
    return ", ".join(name for _, name in parameters)


class Packed:
    """The arguments of one launch, 8 bytes each, and the array of their addresses, which the driver reads.

    Attributes:
        memory: the arguments.
        addresses: address of the array of their addresses.
    """

    def __init__(self, count: int) -> None:
        self.memory = (ctypes.c_uint64 * count)()
        first = ctypes.addressof(self.memory)
        self._addresses = (ctypes.c_void_p * count)(*range(first, first + 8 * count, 8))
        self.addresses = ctypes.addressof(self._addresses)


@dataclass(frozen=True)
class Source:
    """A translation unit for `build.build`, and the parameters of its kernel."""

    text: str
    parameters: Parameters

    def numbers(self, arguments: Sequence[Argument]) -> list[float]:
        """Convert arguments to the numbers that `pack` writes: a tensor to its address, None to a null pointer.

        Raises:
            ValueError: there are more or fewer arguments than parameters.
            TypeError: a fraction stands for a pointer or an integer, or a tensor for a number.
        """
        if len(arguments) != len(self.parameters):
            raise ValueError(
                f"{len(arguments)} arguments for the kernel's {len(self.parameters)} parameters: pass "
                f"{names(self.parameters)}"
            )
        return [convert(argument) for argument, convert in zip(arguments, self._converters, strict=True)]

    def pack(self, numbers: Sequence[float]) -> Packed:
        """Write one number for each parameter, addresses among them, in the form that the driver reads."""
        try:
            packed = self._free.pop()
        except IndexError:
            packed = Packed(len(self.parameters))
        self._layout.pack_into(packed.memory, 0, *numbers)
        return packed

    def take_back(self, packed: Packed) -> None:
        """Reuse the memory of `pack` for another launch, once the driver has read it."""
        self._free.append(packed)

    @functools.cached_property
    def _converters(self) -> list[Callable[[Any], Any]]:
        return [_SCALARS.get(kind, _POINTER)[1] for kind, _ in self.parameters]

    @functools.cached_property
    def _layout(self) -> struct.Struct:
        return struct.Struct("=" + "".join(_SCALARS.get(kind, _POINTER)[0] for kind, _ in self.parameters))

    @functools.cached_property
    def _free(self) -> list[Packed]:
        """Memory that no launch uses now: at most one for each thread that has launched the kernel."""
        return []


def translation_unit(
    header: str,
    parameters: Parameters,
    body: str,
    *,
    ahead: str = "",
    launch_bounds: str = "",
    alignment: int = 0,
    threads: tuple[str, int] | None = None,
) -> Source:
    """Write a kernel around functions of a header.

    Args:
        header: path in csrc.
        parameters: of the kernel.
        body: statements that use them.
        ahead: declarations between the header and the kernel.
        launch_bounds: threads of a block, and blocks of a multiprocessor, where the compiler needs to know them.
        alignment: bytes, of dynamic shared memory that the body calls `shared`; 0: it uses none.
        threads: a constant of the header and the threads of a block, which must be equal; these are then the bounds.
    """
    if threads is not None:
        name, count = threads
        ahead += f'static_assert(ds2::{name} == {count}, "the launch and {header} disagree on threads");\n'
        launch_bounds = launch_bounds or str(count)
    if alignment:
        body = f"    extern __shared__ __align__({alignment}) unsigned char shared[];\n{body}"
    bounds = f"__launch_bounds__({launch_bounds}) " if launch_bounds else ""
    signature = ", ".join(f"{kind} {name}" for kind, name in parameters)
    text = f'#include "{header}"\n{ahead}extern "C" __global__ void {bounds}{ENTRY}({signature}) {{\n{body}}}\n'
    return Source(text, parameters)


def _pointer(value: torch.Tensor | int | None) -> int:
    if isinstance(value, int):
        return value
    if value is None:
        return 0
    if hasattr(value, "data_ptr"):
        return value.data_ptr()
    raise TypeError(f"the argument {value!r} is not a pointer: pass a tensor, an address or None")


def _integer(value: Any) -> int:
    if isinstance(value, int):
        return value
    raise TypeError(f"the argument {value!r} is not an integer")


def _number(value: Any) -> float:
    if isinstance(value, (int, float)):
        return value
    raise TypeError(f"the argument {value!r} is not a number")


# Of each C type: the format of `struct`, 8 bytes wide, and the conversion of an argument.
_POINTER = ("Q", _pointer)
_SCALARS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "int": ("i4x", _integer),
    "long long": ("q", _integer),
    "float": ("f4x", _number),
    "double": ("d", _number),
}


@dataclass(frozen=True)
class Launch:
    """A kernel and how it is launched.

    Attributes:
        source: its translation unit.
        threads: of a block.
        grid: blocks (not clusters).
        cluster: blocks of a cluster.
        smem_bytes: dynamic shared memory of a block.
        cooperative: start all blocks at once or none, because they wait for each other.
        early: start while the previous kernel of the stream still runs, if that one allows it. Such a kernel must wait
            itself before it touches anything but weights (`await_kernel_before` in csrc/ptx/sync.cuh).
    """

    source: Source
    threads: int
    grid: int = 1
    cluster: int = 1
    smem_bytes: int = 0
    cooperative: bool = False
    early: bool = False


def why_not_early(device: torch.device) -> str | None:
    """Say why a CUDA device cannot run a launch with `early`; None if it can."""
    if runtime.capability(device_index(device)) < (9, 0):
        return "a kernel that starts before the previous one ends needs a Hopper GPU"
    return runtime.why_no_kernel(device_index(device))


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
        what: returns the op, its shapes and its tile, for the message of an error.
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


def multiprocessors(device: torch.device) -> int:
    """Return the streaming multiprocessors of a CUDA device."""
    return runtime.attribute(device_index(device), "MULTIPROCESSOR_COUNT")


def run(launch: Launch, arguments: Sequence[Argument], what: Callable[[], str], device: torch.device) -> None:
    """Run `launch_on` on torch's current stream of a device; tensors and None may be among the arguments.

    Nothing is launched for a grid without blocks.
    """
    if launch.grid:
        run_on(launch, launch.source.numbers(arguments), what, device_index(device))


def run_on(launch: Launch, numbers: Sequence[float], what: Callable[[], str], index: int) -> None:
    """Run `launch_on` on torch's current stream of CUDA device ``index``."""
    import torch

    stream = torch._C._cuda_getCurrentRawStream(index)  # these two take a tenth of the time of torch.cuda's functions
    if index == torch._C._cuda_getDevice():
        launch_on(launch, numbers, what, index, stream)
    else:
        with torch.cuda.device(index):
            launch_on(launch, numbers, what, index, stream)
