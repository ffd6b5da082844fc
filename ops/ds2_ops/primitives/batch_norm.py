"""Batch norm of rows of channels, forward and backward, on arrays of any framework (Deep Speech 2, section 3.2).

    op = BatchNorm(shape=(400, 8, 1152), dtype="bfloat16")
    workspace = cupy.empty(op.workspace_bytes, cupy.uint8)
    op.forward(x, weight, bias, count, y, mean, inverse, workspace, stream=stream)
    op.backward(grad_y, x, weight, bias, count, mean, inverse, grad_x, grad_weight, grad_bias, workspace, stream=stream)

Arrays on the CPU are computed in float64 by NumPy.
Shape letters: B utterances, F bins, T frames, C channels.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ds2_ops.batch_norm.rows import NUMBERS, Rows
from ds2_ops.jit.launch import Launch
from ds2_ops.primitives.arrays import Arrays, ContiguousOp, multiprocessors_of


class BatchNorm(ContiguousOp):
    """Batch norm of one shape: y = (x - mean) / sqrt(var + eps) * weight + bias over the rows that count.

    Args:
        shape: (..., C) of x; (B, F, T, C) with `ragged`.
        dtype: of x, y and their gradients on a GPU: "bfloat16", "float16" or "float32".
        ragged: calls take lengths: frames past an utterance's are ignored, come out as 0 and have no gradient. Without,
            x and the gradient of y must be 0 in rows that do not count.
        eps: added to the variance.
        clip: clipped ReLU up to this value follows; None: no nonlinearity.
        device: number of the GPU.

    Attributes:
        workspace_bytes: what each call needs on a GPU.

    Raises:
        ValueError: a shape or dtype that is not allowed.
    """

    def __init__(
        self,
        *,
        shape: tuple[int, ...],
        dtype: str = "float32",
        ragged: bool = False,
        eps: float = 1e-5,
        clip: float | None = None,
        device: int = 0,
    ) -> None:
        if dtype not in NUMBERS:
            raise ValueError(f"dtype is {dtype!r}, allowed are {', '.join(NUMBERS)}")
        if min(shape, default=0) < 1 or (ragged and len(shape) != 4):
            raise ValueError(f"shape is {shape}, allowed are sizes of 1 or more, (B, F, T, C) with ragged=True")
        bins, frames = (shape[1], shape[2]) if ragged else (0, 0)
        sms = multiprocessors_of(device)
        self.rows = Rows(dtype, math.prod(shape[:-1]), shape[-1], sms, bins, frames, clip is not None)
        if shape[-1] % self.rows.numbers:
            raise ValueError(f"there are {shape[-1]} channels, allowed in {dtype} are multiples of {self.rows.numbers}")
        self.shape, self.ragged, self.eps, self.clip, self.device = shape, ragged, eps, clip, device
        of_channels = ("weight", "bias", "mean", "inverse", "grad_weight", "grad_bias")
        self.shapes = dict.fromkeys(("x", "y", "grad_x", "grad_y"), shape) | dict.fromkeys(of_channels, shape[-1:])
        self.dtypes = dict.fromkeys(self.shapes, dtype) | dict.fromkeys(of_channels, "float32")
        self.shapes |= {"count": (1,), "lengths": shape[:1]}
        self.dtypes |= {"count": "int32", "lengths": "int32"}
        self.workspace_bytes = self.rows.chunk[1] * 2 * shape[-1] * 8

    def forward(
        self,
        x: Any,
        weight: Any,
        bias: Any,
        count: Any,
        y: Any,
        mean: Any,
        inverse: Any,
        workspace: Any = None,
        *,
        stream: Any = None,
        lengths: Any = None,
    ) -> None:
        """Write y, and what `backward` needs, queued on a stream.

        Args:
            x: `shape`.
            weight, bias: (C,) float32.
            count: (1,) int32, rows that count, at least 1.
            y: `shape`, written.
            mean, inverse: (C,) float32, written: mean, and 1 / sqrt(variance + eps).
            workspace: `workspace_bytes` of a GPU, in use until the launches have ended.
            stream: as of the recurrence's primitives.
            lengths: (B,) int32 with `ragged`, else None.

        Raises:
            ValueError, TypeError: an array is not what is expected.
            RuntimeError: the compiler's or driver's error.
        """
        inputs = {"x": x, "weight": weight, "bias": bias, "count": count, "lengths": self._lengths(lengths)}
        results = {"y": y, "mean": mean, "inverse": inverse}
        self._run(self._forward, ("sum_rows", "normalise"), inputs, results, workspace, stream)

    def backward(
        self,
        grad_y: Any,
        x: Any,
        weight: Any,
        bias: Any,
        count: Any,
        mean: Any,
        inverse: Any,
        grad_x: Any,
        grad_weight: Any,
        grad_bias: Any,
        workspace: Any = None,
        *,
        stream: Any = None,
        lengths: Any = None,
    ) -> None:
        """Write all gradients, queued on a stream; arguments as of `forward`, gradients like what they belong to."""
        inputs = {"grad_y": grad_y, "x": x, "weight": weight, "bias": bias, "count": count}
        inputs |= {"mean": mean, "inverse": inverse, "lengths": self._lengths(lengths)}
        results = {"grad_x": grad_x, "grad_weight": grad_weight, "grad_bias": grad_bias}
        self._run(self._backward, ("sum_gradients", "backward_rows"), inputs, results, workspace, stream)

    def _lengths(self, lengths: Any) -> Any:
        if (lengths is None) == self.ragged:
            raise ValueError("lengths belong to ragged=True: pass them there, and None elsewhere")
        return lengths

    def _launch(self, kernel: str) -> Launch:
        return self.rows.launch(kernel)

    def _numbers(self, workspace: int) -> dict[str, float]:
        numbers = {"partial": workspace, "eps": self.eps, "clip": self.clip or 0.0}
        of_rows = ("rows", "channels", "chunk_rows", "chunks", "column_blocks", "bins", "frames")
        numbers |= dict(zip(of_rows, self.rows.shape(self.rows.chunk[1]), strict=True))
        return numbers | {"running_mean": 0, "running_var": 0, "share": 0.0}

    def __str__(self) -> str:
        return f"batch norm of {self.rows}"

    def _counted(self, arrays: Arrays, rows: Any) -> Any:
        """Rows with zeros where they do not count."""
        if not self.ragged:
            return rows
        inside = np.arange(self.shape[2]) < arrays["lengths"][:, None]
        return np.where(inside[:, None, :, None], rows, 0.0)

    def _forward(self, arrays: Arrays) -> Arrays:
        x, count = self._counted(arrays, arrays["x"]), int(arrays["count"][0])
        over = tuple(range(x.ndim - 1))
        mean = x.sum(over) / count
        inverse = 1 / np.sqrt(np.maximum((x * x).sum(over) / count - mean * mean, 0.0) + self.eps)
        y = (x - mean) * inverse * arrays["weight"] + arrays["bias"]
        if self.clip is not None:
            y = y.clip(0.0, self.clip)
        return {"y": self._counted(arrays, y), "mean": mean, "inverse": inverse}

    def _backward(self, arrays: Arrays) -> Arrays:
        x, grad, count = arrays["x"], self._counted(arrays, arrays["grad_y"]), int(arrays["count"][0])
        over = tuple(range(x.ndim - 1))
        normal = self._counted(arrays, (x - arrays["mean"]) * arrays["inverse"])
        if self.clip is not None:
            y = normal * arrays["weight"] + arrays["bias"]
            grad = np.where((y > 0) & (y < self.clip), grad, 0.0)
        grad_bias, grad_weight = grad.sum(over), (grad * normal).sum(over)
        centred = grad - grad_bias / count - normal * (grad_weight / count)
        grad_x = self._counted(arrays, centred * arrays["weight"] * arrays["inverse"])
        return {"grad_x": grad_x, "grad_weight": grad_weight, "grad_bias": grad_bias}
