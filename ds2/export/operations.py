"""What the exported network is written in: few operations, that a torch module and an ONNX graph both have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

Value = Any
"""A tensor of the target. It has + - * // @ >= < and &, with Python's float for float32 and int for int64."""
Step = Callable[[Sequence[Value], Sequence[Value]], Sequence[Value]]
"""The next states from the states (B, H) and the inputs (B, D) of a frame; the first state is what comes out."""


class Operations(Protocol):
    """Operations whose shapes are known but for the batch, and for time where whole utterances are heard."""

    def constant(self, tensor: Tensor) -> Value:
        """Numbers of the model."""

    def concat(self, parts: Sequence[Value], axis: int) -> Value:
        """Join along an axis."""

    def cut(self, x: Value, axis: int, start: int, end: int | None) -> Value:
        """Elements start to end along an axis; negative ones count from its end, None is the end."""

    def flip(self, x: Value, axis: int) -> Value:
        """The other way round along an axis."""

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        """Sizes, of which 0 is that of the same place and -1 whatever is left."""

    def transpose(self, x: Value, axes: Sequence[int]) -> Value:
        """Axes in another order."""

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

    def where(self, condition: Value, x: Value, y: Value) -> Value:
        """x where true, else y."""

    def to_float(self, x: Value) -> Value:
        """As float32."""

    def to_int(self, x: Value) -> Value:
        """As int64."""

    def total(self, x: Value, axis: int) -> Value:
        """Sum along an axis, which goes away."""

    def steps(self, x: Value, axis: int) -> Value:
        """0, 1, 2, ... to the size of an axis, int64."""

    def zeros(self, like: Value, width: int) -> Value:
        """(B, width) for the B of `like`."""

    def scan(self, step: Step, states: Sequence[Value], inputs: Sequence[Value], *, reverse: bool) -> tuple[Value, Any]:
        """Run a step over the frames of inputs (B, T, D): what comes out (B, T, H), and the last states."""
