"""A place for a gradient, as the owner of a parameter gives it to an op."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from ds2_ops.recurrent.deferred import DeferredGradients, Factors, GradientSink, product
from torch import Tensor


class StoredGradient:
    """A sink whose gradient is `value`: zeros until something is added."""

    def __init__(self, value: Tensor, deferred: DeferredGradients | None = None) -> None:
        self.value, self.deferred = value, deferred

    def add_products(self, factors: Factors, biases: Sequence[GradientSink] = ()) -> None:
        left, right = product(factors)
        self.add(lambda: left @ right)
        for bias in biases:
            bias.add(lambda: left.sum(1))

    def add(self, make: Callable[[], Tensor]) -> None:
        def work() -> None:
            self.value.add_(make())

        if self.deferred is None:
            work()
        else:
            self.deferred.later(work)

    def rows(self, start: int, stop: int) -> StoredGradient:
        return StoredGradient(self.value[start:stop], self.deferred)


def like(tensor: Tensor, deferred: DeferredGradients | None = None) -> StoredGradient:
    """A sink for the gradient of a tensor."""
    return StoredGradient(torch.zeros_like(tensor, requires_grad=False), deferred)
