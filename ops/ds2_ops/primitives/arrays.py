"""Arrays of primitives by their names: on the GPU by address and strides, on the CPU as NumPy's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ds2_ops.jit import runtime
from ds2_ops.jit.launch import Launch, launch_on
from ds2_ops.recurrent.primitives import check_shape, on_gpu, stream_handle, workspace_address

_CPU = 1  # kDLCPU of DLPack
Shape = tuple[int, ...]
Arrays = dict[str, Any]


def multiprocessors_of(device: int) -> int:
    """Return the multiprocessors of a GPU by its number; 1 where there is none, and arrays are on the CPU."""
    try:
        return runtime.attribute(device, "MULTIPROCESSOR_COUNT")
    except RuntimeError:
        return 1


def on_cpu(array: Any) -> bool:
    """Whether an array lies on the CPU."""
    if hasattr(array, "__dlpack_device__"):
        return int(array.__dlpack_device__()[0]) == _CPU
    return hasattr(array, "__array_interface__")


def read_cpu(name: str, array: Any, shape: Shape) -> Any:
    """Read an array of the CPU as float64, or as it is if it holds integers; ValueError for another shape."""
    values = np.from_dlpack(array) if hasattr(array, "__dlpack__") else np.asarray(array)
    check_shape(name, values.shape, shape)
    return values if values.dtype.kind in "iu" else values.astype(np.float64)


def write_cpu(name: str, array: Any, values: Any, beta: float = 0.0) -> None:
    """Make an array of the CPU values + beta array.

    Raises:
        TypeError: NumPy cannot write into it.
        ValueError: it has another shape.
    """
    target = np.asarray(array)
    check_shape(name, target.shape, values.shape)
    if hasattr(array, "__dlpack__") and not np.shares_memory(target, np.from_dlpack(array)):
        raise TypeError(f"{name} is {type(array).__name__}, which NumPy reads as a copy: pass a NumPy array as result")
    target[...] = values + beta * target.astype(np.float64) if beta else values


def contiguous_address(name: str, array: Any, shape: Shape, dtype: str, device: int, stream: int) -> int:
    """Return the address of an array of a GPU that must be contiguous and start at a multiple of 16 bytes.

    Raises:
        ValueError, TypeError: as `on_gpu`, or it is not.
    """
    placed = on_gpu(name, array, shape, dtype, device, stream)
    if not placed.plain or placed.address % 16:
        raise ValueError(f"{name} is not contiguous, or does not start at a multiple of 16 bytes: make a copy")
    return placed.address


class ContiguousOp:
    """An operation on contiguous arrays, by NumPy where its inputs lie on the CPU and by kernels elsewhere.

    Attributes:
        shapes, dtypes: of the arrays by their names; the dtypes on a GPU.
        workspace_bytes: of a GPU.
        device: number of the GPU.
        _launch: returns the launch of a kernel on the current device, by its name.
        _numbers: returns the parameters of the kernels that are not arrays of the caller, by their names, from the
            address of the workspace.
    """

    shapes: dict[str, Shape]
    dtypes: dict[str, str]
    workspace_bytes: int
    device: int
    _launch: Callable[[str], Launch]
    _numbers: Callable[[int], dict[str, float]]

    def _run(
        self,
        reference: Callable[[Arrays], Mapping[str, Any]],
        kernels: Sequence[str],
        inputs: Arrays,
        results: Arrays,
        workspace: Any,
        stream: Any,
    ) -> None:
        """Compute the results by their names, or queue the kernels that do; inputs may be None."""
        present = {name: array for name, array in inputs.items() if array is not None}
        if all(map(on_cpu, present.values())):
            values = reference({name: read_cpu(name, array, self.shapes[name]) for name, array in present.items()})
            for name, array in results.items():
                write_cpu(name, array, values[name])
            return
        handle = stream_handle(stream)
        with runtime.current(self.device):
            numbers = self._numbers(workspace_address(workspace, self.workspace_bytes, handle))
            for name, array in (inputs | results).items():
                kind = self.shapes[name], self.dtypes[name]
                absent = array is None and name in inputs
                numbers[name] = 0 if absent else contiguous_address(name, array, *kind, self.device, handle)
            for kernel in kernels:
                launch = self._launch(kernel)
                arguments = [numbers[name] for _, name in launch.source.parameters]
                launch_on(launch, arguments, self.__str__, self.device, handle)
