"""The few operations in which the exported network is written, in torch; `ds2.export.onnx_operations` has them too."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Value = Any
"""A tensor of torch or of ONNX, whose sizes are known but for the batch and, in whole utterances, the time. ONNX's has
some of torch's operators and methods: + - * // @ >= < &, chunk, clamp, flip, float, log, log_softmax, long, permute,
sigmoid, sum, tanh and what the equations of the cells of ds2_ops call (only torch's are changed in place). A float of
Python is float32, an int is int64."""
Step = Callable[[Sequence[Value], Sequence[Value]], Sequence[Value]]
"""The next states from the states (B, H) and the inputs (B, D) of a frame; the first state is the output."""


class TorchOperations:
    """What the network needs besides the methods of a `Value`, in torch, which `torch.export` traces.

    Constants become buffers of a module, in the order of use.

    Args:
        holder: has the constants; a second pass over the same network reuses those of the first.
    """

    def __init__(self, holder: nn.Module, dtype: torch.dtype) -> None:
        self._holder, self._dtype, self._used = holder, dtype, 0

    def constant(self, tensor: Tensor) -> Value:
        """Return weights as a constant of the target: of the `dtype` here, float32 in ONNX."""
        name = f"constant_{self._used}"
        self._used += 1
        if not hasattr(self._holder, name):
            self._holder.register_buffer(name, tensor.to(self._dtype, copy=True))
        return getattr(self._holder, name)

    def concat(self, parts: Sequence[Tensor], axis: int) -> Value:
        """Concatenate along an axis."""
        return torch.cat(list(parts), axis)

    def slice(self, x: Tensor, axis: int, start: int, end: int | None) -> Value:
        """Elements from `start` to before `end` along an axis; negative numbers count from its end, None is the end."""
        return x[(slice(None),) * axis + (slice(start, end),)]

    def reshape(self, x: Tensor, shape: Sequence[int]) -> Value:
        """New sizes: 0 is the size of the same axis, -1 all that remains."""
        return x.reshape([x.shape[axis] if size == 0 else size for axis, size in enumerate(shape)])

    def pad(self, x: Tensor, axis: int, before: int, after: int) -> Value:
        """Zeros before and after along an axis."""
        return functional.pad(x, [0, 0] * (x.dim() - 1 - axis) + [before, after])

    def conv(self, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], bins: int) -> Value:
        """Convolve (B, C, F, T), padded with `bins` zeros below and above in frequency."""
        return functional.conv2d(x, weight, bias, list(stride), (bins, 0))

    def rms_norm(self, x: Tensor, eps: float) -> Value:
        """x / sqrt(mean(x^2) + eps), the mean along the last axis."""
        return functional.rms_norm(x, x.shape[-1:], None, eps)

    def where(self, condition: Tensor, x: Any, y: Any) -> Value:
        """x where true, else y."""
        return torch.where(condition, x, y)

    def arange(self, x: Tensor, axis: int) -> Value:
        """0, 1, 2, ... up to the size of an axis less 1, int64."""
        return torch.arange(x.shape[axis], device=x.device)

    def zeros(self, like: Tensor, width: int) -> Value:
        """(B, width) for the B of `like`."""
        return like.new_zeros(like.shape[0], width)

    def scan(
        self, step: Step, states: Sequence[Tensor], inputs: Sequence[Tensor], *, reverse: bool
    ) -> tuple[Value, Sequence[Value]]:
        """Run a step over the frames of inputs (B, T, D); return the first state of each (B, T, H), the last states."""
        frames = range(inputs[0].shape[1])
        out: list[Tensor] = []
        for t in reversed(frames) if reverse else frames:
            states = step(states, [x[:, t] for x in inputs])
            out.append(states[0])
        return torch.stack(out[::-1] if reverse else out, 1), states
