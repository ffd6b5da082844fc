"""Arrays of any framework: where they lie, and how numbers move between layouts; no framework is imported."""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ds2_ops.jit.launch import Launch
from ds2_ops.jit.source import names, parameters, translation_unit
from ds2_ops.recurrent.plan.problem import NUMBERS

ALIGNMENT = 256  # bytes, of each part of a workspace
_MOVE = parameters(
    """const void* source, long long s0, long long s1, long long s2, void* target, long long t0, long long t1,
    long long t2, int count_0, int count_1, int count_2, float beta"""
)


@dataclass(frozen=True)
class Array:
    """Where an array lies: address, and strides in elements."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def plain(self) -> bool:
        """True if the kernels can use it as it is."""
        expected, steps = 1, []
        for count in reversed(self.shape):
            steps.append(expected)
            expected *= count
        pairs = zip(self.shape, self.strides, reversed(steps), strict=True)
        return self.address % 4 == 0 and all(count == 1 or stride == step for count, stride, step in pairs)


def product(shape: Sequence[int]) -> int:
    """How many elements an array of a shape has."""
    return functools.reduce(operator.mul, shape, 1)


def aligned(count: int) -> int:
    """Bytes that a part of a workspace takes."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of an array whose rows follow one another."""
    return tuple(product(shape[i + 1 :]) for i in range(len(shape)))


def view(name: str, array: Any, stream: int) -> Any:
    """Read an array of a CUDA device by DLPack, or by the CUDA array interface.

    Nothing waits, as the caller orders: -1 says so. JAX does not know it, and makes the stream wait for the array.

    Raises:
        TypeError: it has neither.
        ValueError: it is on the CPU.
    """
    from cuda.core.utils import StridedMemoryView

    read = StridedMemoryView.from_any_interface
    try:
        try:
            found = read(array, stream_ptr=-1)
        except RuntimeError:
            found = read(array, stream_ptr=stream or 1)  # 1 is the default stream there
    except (BufferError, TypeError, AttributeError) as error:
        raise TypeError(f"{name} is {type(array).__name__}, expected an array with __dlpack__: {error}") from error
    if not found.is_device_accessible:
        raise ValueError(f"{name} is on the CPU, expected an array on a CUDA device")
    return found


def stream_handle(stream: Any) -> int:
    """Read the handle of a framework's stream; TypeError where it has none."""
    if isinstance(stream, int):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    for attribute in ("cuda_stream", "ptr"):
        if hasattr(stream, attribute):
            return int(getattr(stream, attribute))
    raise TypeError(f"stream is {stream!r}, expected a handle or what has __cuda_stream__, cuda_stream or ptr")


def move(source: Array, target: Array, beta: float, dtype: str) -> tuple[Launch, list[float]]:
    """What to launch, with which arguments, to make target = source + beta target; with beta 0 it is not read."""
    missing = 3 - len(source.shape)
    numbers: list[float] = []
    for array in (source, target):
        numbers += [array.address, *(0,) * missing, *array.strides]
    launch = replace(_move_launch(dtype), grid=min(-(-product(source.shape) // 1024), 2048))
    return launch, [*numbers, *(1,) * missing, *source.shape, beta]


@functools.cache
def _move_launch(dtype: str) -> Launch:
    body = (
        f"    ds2::move_numbers<ds2::{NUMBERS[dtype][0]}>(source, {{s0, s1, s2}}, target, {{t0, t1, t2}}, "
        f"{names(_MOVE[8:])});\n"
    )
    source = translation_unit("recurrent/layout.cuh", _MOVE, body)
    return Launch(source, threads=256)
