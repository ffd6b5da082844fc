"""What runs beside recurrences: when it is launched, and after what."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ds2_ops.recurrent import gemm, persistent, rnn, weights
from ds2_ops.recurrent.deferred import DeferredGradients
from ds2_ops.recurrent.rnn import recurrence
from support.recording import pretend_to_record
from torch import Tensor


class Layer:
    """What the backward pass of a recurrence needs, and its launch."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def allocate(self) -> Callable[[], None]:
        return lambda: self.log.append(f"transpose of {self.name}")


def test_what_is_held_back_runs_beside_a_recurrence_and_is_waited_for_before_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = pretend_to_record(monkeypatch)
    beside = DeferredGradients(lambda: log.append("joined"))
    layers = [Layer(name, log) for name in "abcd"]
    for layer in layers:
        beside.expect_backward(layer)
    for layer in (layers[2], layers[0]):  # nobody goes back through d; b is skipped
        with beside.during_recurrence(layer):
            log.append(f"recurrence {layer.name}")
        beside.later(*(functools.partial(log.append, f"{what} of {layer.name}") for what in ("product", "done")))
        log.append(f"projection of {layer.name}")
    beside.flush()
    assert log == [
        "recurrence c",
        "side waits for what came before 0",
        "transpose of b",
        "projection of c",
        "main waits for side",
        "joined",
        "recurrence a",
        "side waits for what came before 6",
        "product of c",
        "projection of a",
        "main waits for side",
        "done of c",
        "joined",
        "product of a",
        "done of a",
        "joined",
    ]
    beside.flush()
    assert log[-1] == "joined" and len(log) == 16


def test_what_is_done_for_the_first_time_behind_a_pass_that_failed_is_not_told_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = pretend_to_record(monkeypatch)
    beside = DeferredGradients(lambda: log.append("joined"))
    layer = Layer("a", log)
    beside.expect_backward(layer)
    beside.later(lambda: log.append("product"), lambda: log.append("done"))
    with beside.during_recurrence(layer):
        log.append("recurrence a")
    beside.begin()
    beside.flush()
    assert log == ["recurrence a", "side waits for what came before 0", "product"]


def test_launch_by_launch_nothing_is_held_back() -> None:
    done: list[int] = []
    beside = DeferredGradients()
    beside.later(lambda: done.append(1), lambda: done.append(2))
    assert done == [1, 2] and not beside.recording()


class Gradient:
    """A sink that keeps a gradient."""

    def __init__(self, beside: DeferredGradients) -> None:
        self.deferred, self.value = beside, torch.zeros(0)

    def add_product(self, left: Tensor, right: Tensor) -> None:
        def work() -> None:
            self.value = left @ right

        self.deferred.later(work)


def test_gradients_with_products_and_transposes_beside_are_those_without(monkeypatch: pytest.MonkeyPatch) -> None:
    frames, batch, hidden, depth = 6, 2, 8, 3
    asked: list[Tensor] = []

    def backward_data(*given: Any) -> tuple[Tensor, Tensor]:
        asked.append(given[-1])
        return gemm.backward_data(*given[:-1])

    def transpose(result: Tensor, matrix: Tensor) -> None:
        result.copy_(matrix.t())

    results = []
    for beside in (False, True):
        if beside:
            log = pretend_to_record(monkeypatch)
            monkeypatch.setattr(rnn, "settle", lambda *_: "persistent")
            monkeypatch.setattr(persistent, "forward", gemm.forward)
            monkeypatch.setattr(persistent, "backward_data", backward_data)
            monkeypatch.setattr(weights, "transpose_into", transpose)
        generator = torch.Generator().manual_seed(1)
        held = DeferredGradients()
        sinks = [Gradient(held) for _ in range(depth)]
        matrices = [(0.3 * torch.randn(hidden, hidden, generator=generator)).requires_grad_() for _ in sinks]
        x = torch.randn(frames, batch, hidden, generator=generator).requires_grad_()
        y = x
        for matrix, sink in zip(matrices, sinks, strict=True):
            y = recurrence(y, matrix, weight_sink=sink)[0]
        y.square().sum().backward()
        held.flush()
        results.append([x.grad, *(sink.value for sink in sinks)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert all(torch.equal(given, matrix.t()) for given, matrix in zip(asked, reversed(matrices), strict=True))
    assert log.count("main waits for side") == depth
