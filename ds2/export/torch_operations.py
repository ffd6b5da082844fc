"""The operations of an exported network in torch: what `torch.export` traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ds2.export.operations import Step


class TorchOperations:
    """See `ds2.export.operations.Operations`; constants become buffers of a module, in the order of their use.

    Args:
        holder: keeps the constants; a second pass over the same network finds those of the first.
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
