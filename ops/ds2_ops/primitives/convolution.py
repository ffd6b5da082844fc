"""Convolution over two axes and both gradients, on arrays of any framework (Chetlur et al. 2014, section 2.1.1).

    op = Convolution(images=16, channels=3, outputs=96, size=(128, 128), taps=(11, 11), dtype="float32")
    op.forward(x, weight, y, stream=stream)
    workspace = cupy.empty(op.workspace_bytes, cupy.uint8)
    op.weight_gradient(x, grad_y, grad_weight, workspace, stream=stream)

Products of lazily gathered tiles in float32 (float64 for float64), without the matrix unit and without auxiliary memory
but for the gradient of the weights. Arrays may have any strides, so any order of axes and parts of larger arrays; a
kernel is built for each layout. Arrays on the CPU are computed in float64 by NumPy. Gradients and results overwrite, or
with ``beta`` add to what is there. A row convolution is one of ``groups`` = channels = outputs with padding behind.
Shape letters: N images, C channels, K outputs, H x W data, R x S taps, P x Q results, G groups.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ds2_ops.jit import runtime
from ds2_ops.jit.launch import Launch, Source, launch_on, names, parameters, translation_unit
from ds2_ops.primitives.arrays import multiprocessors_of, on_cpu, read_cpu, write_cpu
from ds2_ops.recurrent.primitives import Array, on_gpu, stream_handle, workspace_address

THREADS, TILE_COLUMNS, TILE_DEPTH = 256, 128, 8
_TILE_ROWS, _FEW_ROWS = (32, 64, 96, 128), 8  # below so many rows of a group a thread makes one sum
_BLOCKS = 2  # of a multiprocessor: in so many parts a long sum is divided
_MIN_DEPTH = 512  # of a split
_NUMBERS = {"float32": "Fp32", "float16": "Fp16", "bfloat16": "Bf16", "float64": "Fp64"}
_MOST = 2**31 - 1
_PARAMETERS = parameters(
    """const void* x, const void* w, const void* y, void* result, void* parts, int images, int splits, double beta"""
)
_KINDS = {"forward": "Outputs", "data_gradient": "DataGradient", "weight_gradient": "WeightGradient"}
Pair = tuple[int, int]


class Convolution:
    """One convolution of one shape.

    y[n, k, p, q] = sum over c, r, s of w[k, c, r, s] x[n, c, U p + r - top, V q + s - left], with zeros outside of x.

    Args:
        images, channels, outputs: N, C, K.
        size, taps: (H, W), (R, S).
        stride: (U, V), of the results.
        padding: zeros (top, bottom, left, right) around the data; may differ.
        groups: G; output k sees the C / G channels of its group.
        dtype: of all arrays on a GPU: "float32", "float16", "bfloat16" or "float64".
        flip: turn the taps around, the mathematician's convolution; False: cross-correlation, as frameworks have it.
        device: number of the GPU.
        sms: multiprocessors among which work is divided; None: those of the GPU, or, without one, 1.

    Attributes:
        shapes: of the arrays "x" (N, C, H, W), "weight" (K, C / G, R, S) and "y" (N, K, P, Q).
        workspace_bytes: what `weight_gradient` needs on a GPU.

    Raises:
        ValueError: a size is not allowed; the message says which are.
    """

    def __init__(
        self,
        *,
        images: int,
        channels: int,
        outputs: int,
        size: Pair,
        taps: Pair,
        stride: Pair = (1, 1),
        padding: tuple[int, int, int, int] = (0, 0, 0, 0),
        groups: int = 1,
        dtype: str = "float32",
        flip: bool = False,
        device: int = 0,
        sms: int | None = None,
    ) -> None:
        if dtype not in _NUMBERS:
            raise ValueError(f"dtype is {dtype!r}, allowed are {', '.join(_NUMBERS)}")
        if min(images, channels, outputs, groups, *size, *taps, *stride) < 1 or min(padding) < 0:
            raise ValueError(
                f"images, channels, outputs, groups are {images, channels, outputs, groups}, size {size}, taps "
                f"{taps}, stride {stride}, padding {padding}: allowed are numbers from 1 on, of padding from 0 on"
            )
        if channels % groups or outputs % groups:
            raise ValueError(f"{channels} channels and {outputs} outputs are not multiples of {groups} groups")
        top, bottom, left, right = padding
        padded = (size[0] + top + bottom, size[1] + left + right)
        if padded[0] < taps[0] or padded[1] < taps[1]:
            raise ValueError(f"{taps} taps do not fit into data of {padded} with its padding")
        out = tuple((whole - tap) // step + 1 for whole, tap, step in zip(padded, taps, stride, strict=True))
        self.images, self.channels, self.outputs, self.groups = images, channels // groups, outputs // groups, groups
        self.size, self.taps, self.stride, self.padding = size, taps, stride, padding
        self.out: Pair = (out[0], out[1])
        self.dtype, self.flip, self.device = dtype, flip, device
        self._sms = multiprocessors_of(device) if sms is None else sms
        self.shapes = {
            "x": (images, channels, *size),
            "weight": (outputs, channels // groups, *taps),
            "y": (images, outputs, *out),
        }
        splits = self._splits("weight_gradient")
        self._sum_bytes = 8 if dtype == "float64" else 4
        self.workspace_bytes = splits * math.prod(self.shapes["weight"]) * self._sum_bytes if splits > 1 else 0

    def forward(self, x: Any, weight: Any, y: Any, *, stream: Any = None, beta: float = 0.0) -> None:
        """Make y = weight * x + beta y, queued on a stream (any of those that the recurrence's primitives take).

        Raises:
            ValueError, TypeError: an array is not what is expected.
            RuntimeError: the compiler's or driver's error.
        """
        self._run("forward", {"x": x, "weight": weight, "y": y}, "y", None, stream, beta)

    def data_gradient(self, grad_y: Any, weight: Any, grad_x: Any, *, stream: Any = None, beta: float = 0.0) -> None:
        """Make grad_x = (gradient of x) + beta grad_x; as `forward`."""
        self._run("data_gradient", {"x": grad_x, "weight": weight, "y": grad_y}, "x", None, stream, beta)

    def weight_gradient(
        self, x: Any, grad_y: Any, grad_weight: Any, workspace: Any = None, *, stream: Any = None, beta: float = 0.0
    ) -> None:
        """Make grad_weight = (gradient of weight) + beta grad_weight; as `forward`.

        Args:
            x, grad_y, grad_weight, stream, beta: as there.
            workspace: `workspace_bytes` of the GPU, in use until the launches have ended.
        """
        self._run("weight_gradient", {"x": x, "weight": grad_weight, "y": grad_y}, "weight", workspace, stream, beta)

    @property
    def operations(self) -> int:
        """Multiplications and additions of a pass, those with padding among them."""
        return 2 * math.prod(self.shapes["y"]) * self.channels * math.prod(self.taps)

    def _sizes(self, kind: str) -> tuple[int, int, int]:
        """Rows, columns and depth of the products of a group."""
        taps = math.prod(self.taps)
        places = self.images * math.prod(self.out)
        return {
            "forward": (self.outputs, places, self.channels * taps),
            "data_gradient": (self.channels, self.images * math.prod(self.size), self.outputs * taps),
            "weight_gradient": (self.outputs, self.channels * taps, places),
        }[kind]

    def _splits(self, kind: str) -> int:
        """Into how many parts the sum over the depth is divided, so that blocks fill the GPU."""
        rows, columns, depth = self._sizes(kind)
        if kind != "weight_gradient" or rows < _FEW_ROWS:
            return 1
        tiles = self.groups * -(-rows // _tile_rows(rows)) * -(-columns // TILE_COLUMNS)
        return max(1, min(_BLOCKS * self._sms // tiles, depth // _MIN_DEPTH))

    def _run(self, kind: str, arrays: dict[str, Any], result: str, workspace: Any, stream: Any, beta: float) -> None:
        if all(on_cpu(array) for array in arrays.values()):
            values = {name: read_cpu(name, a, self.shapes[name]) for name, a in arrays.items() if name != result}
            write_cpu(result, arrays[result], _REFERENCES[kind](self, **values), beta)
            return
        handle = stream_handle(stream)
        with runtime.current(self.device):
            placed = {n: on_gpu(n, a, self.shapes[n], self.dtype, self.device, handle) for n, a in arrays.items()}
            splits = self._splits(kind)
            parts = workspace_address(workspace, self.workspace_bytes if splits > 1 else 0, handle)
            addresses = [placed[name].address for name in ("x", "weight", "y")]
            numbers = [*addresses, placed[result].address, parts, self.images, splits, beta]
            for launch in self.launches(kind, placed):
                launch_on(launch, numbers, lambda: f"{kind} of {self.shapes}", self.device, handle)

    def launches(self, kind: str, arrays: dict[str, Array]) -> list[Launch]:
        """What to launch for a pass on arrays with these strides.

        Raises:
            ValueError: an array reaches over 2^31 numbers, or has negative strides.
        """
        for name, array in arrays.items():
            reach = sum((count - 1) * step for count, step in zip(array.shape, array.strides, strict=True))
            if min(array.strides) < 0 or reach > _MOST or math.prod(array.shape) > _MOST:
                raise ValueError(f"{name} has strides {array.strides}: allowed are those from 0 on within 2^31 numbers")
        rows, columns, _ = self._sizes(kind)
        geometry = self._geometry(arrays)
        each = -(-self.groups * rows * columns // THREADS)
        number = f"ds2::{_NUMBERS[self.dtype]}"
        kernel = f"{number}, Geometry, ds2::{_KINDS[kind]}<{number}, Geometry>"

        def launch(function: str, arguments: str, grid: int, smem_bytes: int = 0) -> Launch:
            return Launch(_source(self.dtype, geometry, function + arguments), THREADS, grid, smem_bytes=smem_bytes)

        if rows < _FEW_ROWS:
            return [launch(f"multiply_each<{kernel}>", "(convolution)", each)]
        splits = self._splits(kind)
        tile = _tile_rows(rows, 0 if splits > 1 else self.groups * -(-columns // TILE_COLUMNS), self._sms)
        grid = splits * self.groups * -(-rows // tile) * -(-columns // TILE_COLUMNS)
        smem_bytes = 2 * TILE_DEPTH * (tile + 4 + TILE_COLUMNS) * self._sum_bytes
        launches = [launch(f"multiply_tiles<{kernel}, {tile}>", "(convolution, shared)", grid, smem_bytes)]
        return launches + ([launch(f"add_parts<{kernel}>", "(convolution)", each)] if splits > 1 else [])

    def _geometry(self, arrays: dict[str, Array]) -> tuple[tuple[str, int], ...]:
        top, _, left, _ = self.padding
        numbers = {
            "CHANNELS": self.channels, "OUTPUTS": self.outputs, "GROUPS": self.groups, "HEIGHT": self.size[0],
            "WIDTH": self.size[1], "TAPS_H": self.taps[0], "TAPS_W": self.taps[1], "OUT_H": self.out[0],
            "OUT_W": self.out[1], "STEP_H": self.stride[0], "STEP_W": self.stride[1], "TOP": top, "LEFT": left,
            "FLIP": int(self.flip),
        }  # fmt: skip
        for name, letters in (("x", ("X_N", "X_C", "X_H", "X_W")), ("y", ("Y_N", "Y_C", "Y_H", "Y_W"))):
            numbers |= dict(zip(letters, arrays[name].strides, strict=True))
        numbers |= dict(zip(("W_K", "W_C", "W_R", "W_S"), arrays["weight"].strides, strict=True))
        return tuple(numbers.items())


def _tile_rows(rows: int, others: int = 0, sms: int = 1) -> int:
    """Rows of a tile that pads the last one least; with `others` tiles beside it, that which fills the `sms` best.

    A round of blocks takes a time that grows with the rows of a tile, and as 32 more for the data.
    """
    if others:
        return min(reversed(_TILE_ROWS), key=lambda tile: -(-others * -(-rows // tile) // sms) * (tile + 32))
    return min(reversed(_TILE_ROWS), key=lambda tile: -(-rows // tile) * tile)


@functools.cache
def _source(dtype: str, geometry: tuple[tuple[str, int], ...], call: str) -> Source:
    constants = ", ".join(f"{name} = {value}" for name, value in geometry)
    return translation_unit(
        "convolution/general.cuh",
        _PARAMETERS,
        f"""    const ds2::Convolution convolution{{{names(_PARAMETERS)}}};
    ds2::{call};
""",
        ahead=f"""struct Geometry {{ static constexpr int {constants}; }};
static_assert(ds2::TILE_COLUMNS == {TILE_COLUMNS} && ds2::TILE_DEPTH == {TILE_DEPTH}, "convolution.py differs");
""",
        launch_bounds=f"{THREADS}, {1 if dtype == 'float64' else 2}",
        alignment=128,
        threads=("CONVOLUTION_THREADS", THREADS),
    )


def _windows(op: Convolution, x: Any) -> Any:
    """Every window of the data, (N, G, C / G, P, Q, R, S), as a view of a padded copy."""
    top, bottom, left, right = op.padding
    padded = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, op.taps, axis=(2, 3))
    windows = windows[:, :, :: op.stride[0], :: op.stride[1]]
    return windows.reshape(op.images, op.groups, op.channels, *op.out, *op.taps)


def _taps(op: Convolution, weight: Any) -> Any:
    turned = weight[:, :, ::-1, ::-1] if op.flip else weight
    return turned.reshape(op.groups, op.outputs, op.channels, *op.taps)


def _forward(op: Convolution, x: Any, weight: Any) -> Any:
    y = np.einsum("ngcpqrs,gkcrs->ngkpq", _windows(op, x), _taps(op, weight), optimize=True)
    return y.reshape(op.shapes["y"])


def _data_gradient(op: Convolution, y: Any, weight: Any) -> Any:
    grad_y, taps = y.reshape(op.images, op.groups, op.outputs, *op.out), _taps(op, weight)
    top, bottom, left, right = op.padding
    padded = np.zeros((op.images, op.groups, op.channels, op.size[0] + top + bottom, op.size[1] + left + right))
    for r, s in np.ndindex(*op.taps):
        rows = slice(r, r + op.stride[0] * (op.out[0] - 1) + 1, op.stride[0])
        columns = slice(s, s + op.stride[1] * (op.out[1] - 1) + 1, op.stride[1])
        padded[..., rows, columns] += np.einsum("ngkpq,gkc->ngcpq", grad_y, taps[..., r, s], optimize=True)
    inside = padded[..., top : top + op.size[0], left : left + op.size[1]]
    return inside.reshape(op.shapes["x"])


def _weight_gradient(op: Convolution, x: Any, y: Any) -> Any:
    grad_y = y.reshape(op.images, op.groups, op.outputs, *op.out)
    taps = np.einsum("ngcpqrs,ngkpq->gkcrs", _windows(op, x), grad_y, optimize=True)
    return (taps[..., ::-1, ::-1] if op.flip else taps).reshape(op.shapes["weight"])


_REFERENCES: dict[str, Callable[..., Any]] = {
    "forward": _forward,
    "data_gradient": _data_gradient,
    "weight_gradient": _weight_gradient,
}
