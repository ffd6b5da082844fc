"""The few operations in which the exported network is written, and their form in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

Value = Any
"""A tensor of the target. It has + - * // @ >= < and &, with Python's float for float32 and int for int64."""
Step = Callable[[Sequence[Value], Sequence[Value]], Sequence[Value]]
"""The next states from the states (B, H) and the inputs (B, D) of a frame; the first state is what comes out."""


class Operations(Protocol):
    """Operations whose shapes are known but for the batch, and for time for whole utterances."""

    def constant(self, tensor: Tensor) -> Value:
        """Weights."""

    def concat(self, parts: Sequence[Value], axis: int) -> Value:
        """Concatenate along an axis."""

    def cut(self, x: Value, axis: int, start: int, end: int | None) -> Value:
        """Elements start to end along an axis; negative ones count from its end, None is the end."""

    def flip(self, x: Value, axis: int) -> Value:
        """Reverse an axis."""

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        """New sizes: 0 is the size of the same axis, -1 all that remains."""

    def transpose(self, x: Value, axes: Sequence[int]) -> Value:
        """Permute axes."""

    def pad(self, x: Value, axis: int, before: int, after: int) -> Value:
        """Zeros before and after along an axis."""

    def split(self, x: Value, parts: int) -> Sequence[Value]:
        """Equal parts along the last axis."""

    def conv(self, x: Value, weight: Value, bias: Value | None, stride: Sequence[int], bins: int) -> Value:
        """2-D convolution (B, C, F, T), with that many zeros below and above in frequency."""

    def clip(self, x: Value, low: float, high: float | None) -> Value:
        """Values from low to high."""

    def sigmoid(self, x: Value) -> Value:
        """1 / (1 + exp(-x))."""

    def tanh(self, x: Value) -> Value:
        """Hyperbolic tangent."""

    def log(self, x: Value) -> Value:
        """Natural logarithm."""

    def log_softmax(self, x: Value) -> Value:
        """Along the last axis."""

    def divided_by_rms(self, x: Value, eps: float) -> Value:
        """x / sqrt(mean(x^2) + eps), the mean along the last axis."""

    def where(self, condition: Value, x: Value, y: Value) -> Value:
        """x where true, else y."""

    def to_float(self, x: Value) -> Value:
        """As float32."""

    def to_int(self, x: Value) -> Value:
        """As int64."""

    def total(self, x: Value, axis: int) -> Value:
        """Sum over an axis."""

    def steps(self, x: Value, axis: int) -> Value:
        """0, 1, 2, ... to the size of an axis, int64."""

    def zeros(self, like: Value, width: int) -> Value:
        """(B, width) for the B of `like`."""

    def scan(self, step: Step, states: Sequence[Value], inputs: Sequence[Value], *, reverse: bool) -> tuple[Value, Any]:
        """Run a step over the frames of inputs (B, T, D): what comes out (B, T, H), and the last states."""


class TorchOperations:
    """The operations in torch, which `torch.export` traces; constants become buffers of a module, in the order of use.

    Args:
        holder: has the constants; a second pass over the same network reuses those of the first.
        dtype: of the constants.
    """

    def __init__(self, holder: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        self._holder, self._dtype, self._used = holder, dtype, 0

    def constant(self, tensor: Tensor) -> Tensor:
        name = f"constant_{self._used}"
        self._used += 1
        if not hasattr(self._holder, name):
            self._holder.register_buffer(name, tensor.to(self._dtype, copy=True))
        return getattr(self._holder, name)  # type: ignore[no-any-return]

    def concat(self, parts: Sequence[Tensor], axis: int) -> Tensor:
        return torch.cat(list(parts), axis)

    def cut(self, x: Tensor, axis: int, start: int, end: int | None) -> Tensor:
        return x[(slice(None),) * axis + (slice(start, end),)]

    def flip(self, x: Tensor, axis: int) -> Tensor:
        return x.flip(axis)

    def reshape(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        return x.reshape([x.shape[axis] if size == 0 else size for axis, size in enumerate(shape)])

    def transpose(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        return x.permute(list(axes))

    def pad(self, x: Tensor, axis: int, before: int, after: int) -> Tensor:
        return functional.pad(x, [0, 0] * (x.dim() - 1 - axis) + [before, after])

    def split(self, x: Tensor, parts: int) -> Sequence[Tensor]:
        return x.chunk(parts, -1)

    def conv(self, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], bins: int) -> Tensor:
        return functional.conv2d(x, weight, bias, list(stride), (bins, 0))

    def clip(self, x: Tensor, low: float, high: float | None) -> Tensor:
        return x.clamp(low, high)

    def sigmoid(self, x: Tensor) -> Tensor:
        return x.sigmoid()

    def tanh(self, x: Tensor) -> Tensor:
        return x.tanh()

    def log(self, x: Tensor) -> Tensor:
        return x.log()

    def log_softmax(self, x: Tensor) -> Tensor:
        return x.log_softmax(-1)

    def divided_by_rms(self, x: Tensor, eps: float) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], None, eps)

    def where(self, condition: Tensor, x: Any, y: Any) -> Tensor:
        return torch.where(condition, x, y)

    def to_float(self, x: Tensor) -> Tensor:
        return x.float()

    def to_int(self, x: Tensor) -> Tensor:
        return x.long()

    def total(self, x: Tensor, axis: int) -> Tensor:
        return x.sum(axis)

    def steps(self, x: Tensor, axis: int) -> Tensor:
        return torch.arange(x.shape[axis], device=x.device)

    def zeros(self, like: Tensor, width: int) -> Tensor:
        return like.new_zeros(like.shape[0], width)

    def scan(
        self, step: Step, states: Sequence[Tensor], inputs: Sequence[Tensor], *, reverse: bool
    ) -> tuple[Tensor, Sequence[Tensor]]:
        frames = range(inputs[0].shape[1])
        out: list[Tensor] = []
        for t in reversed(frames) if reverse else frames:
            states = step(states, [x[:, t] for x in inputs])
            out.append(states[0])
        return torch.stack(out[::-1] if reverse else out, 1), states
