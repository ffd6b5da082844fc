"""Arrays of primitives: on the GPU by address and strides, on the CPU as NumPy's."""

from __future__ import annotations

from typing import Any

import numpy as np

from ds2_ops.recurrent.primitives import ALIGNMENT, Array, contiguous, product, view

_CPU = 1  # kDLCPU of DLPack
Shape = tuple[int, ...]


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


def check_shape(name: str, shape: Shape, expected: Shape) -> None:
    """Raise ValueError unless a shape is the expected one."""
    if tuple(shape) != tuple(expected):
        raise ValueError(f"{name} has shape {tuple(shape)}, expected {tuple(expected)}")


def on_gpu(name: str, array: Any, shape: Shape, dtype: str, device: int, stream: int) -> Array:
    """Read where an array of a GPU lies.

    Raises:
        ValueError: its shape or its device is another, or it lies on the CPU.
        TypeError: its dtype is another, or it has neither DLPack nor the CUDA array interface.
    """
    source = view(name, array, stream)
    check_shape(name, source.shape, shape)
    if str(source.dtype) != dtype:
        raise TypeError(f"{name} is {source.dtype}, expected {dtype}")
    if source.device_id != device:
        raise ValueError(f"{name} is on device {source.device_id}, the op is for device {device}")
    return Array(int(source.ptr), tuple(shape), tuple(source.strides or contiguous(tuple(shape))))


def contiguous_address(name: str, array: Any, shape: Shape, dtype: str, device: int, stream: int) -> int:
    """Return the address of an array of a GPU that must be contiguous and start at a multiple of 16 bytes.

    Raises:
        ValueError, TypeError: as `on_gpu`, or it is not.
    """
    placed = on_gpu(name, array, shape, dtype, device, stream)
    if not placed.plain or placed.address % 16:
        raise ValueError(f"{name} is not contiguous, or does not start at a multiple of 16 bytes: make a copy")
    return placed.address


def workspace_address(workspace: Any, size: int, stream: int) -> int:
    """Return the address of a workspace of at least ``size`` bytes; ValueError where it is smaller or not aligned."""
    source = view("workspace", workspace, stream)
    most, address = source.dtype.itemsize * product(source.shape), int(source.ptr)
    if most < size or address % ALIGNMENT:
        raise ValueError(
            f"workspace has {most} bytes from {address:#x} on, expected workspace_bytes = {size} from a multiple of "
            f"{ALIGNMENT}"
        )
    return address
