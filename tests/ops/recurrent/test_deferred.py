"""What runs beside recurrences: when it is launched, and after what."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from ds2_ops import recurrence
from ds2_ops.recurrent import op
from ds2_ops.recurrent.backends import gemm, persistent
from ds2_ops.recurrent.cells import CELLS
from ds2_ops.recurrent.deferred import DeferredGradients, Prefetch, is_recording
from support.op_cases import assert_same_bits
from support.recording import pretend_to_record
from support.sinks import like
from torch import Tensor


class Layer(Prefetch):
    """What the backward pass of a recurrence needs, and its launch."""

    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__(lambda: torch.empty(0), lambda _: log.append(f"transpose of {name}"))
        self.name = name


def test_what_is_held_back_runs_beside_a_recurrence_and_is_waited_for_before_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = pretend_to_record(monkeypatch)
    deferred = DeferredGradients(lambda: log.append("joined"))
    layers = [Layer(name, log) for name in "abcd"]
    for layer in layers:
        deferred.expect_backward(layer)
    for layer in (layers[2], layers[0]):  # nobody goes back through d; b is skipped
        with deferred.during_recurrence(layer):
            log.append(f"recurrence {layer.name}")
        deferred.later(*(functools.partial(log.append, f"{what} of {layer.name}") for what in ("product", "done")))
        log.append(f"projection of {layer.name}")
    deferred.flush()
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
    deferred.flush()
    assert log[-1] == "joined" and len(log) == 16


def test_what_is_done_for_the_first_time_behind_a_pass_that_failed_is_not_told_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = pretend_to_record(monkeypatch)
    deferred = DeferredGradients(lambda: log.append("joined"))
    layer = Layer("a", log)
    deferred.expect_backward(layer)
    deferred.later(lambda: log.append("product"), lambda: log.append("done"))
    with deferred.during_recurrence(layer):
        log.append("recurrence a")
    deferred.begin()
    deferred.flush()
    assert log == ["recurrence a", "side waits for what came before 0", "product"]


def test_work_of_another_stream_waits_for_the_end_of_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    log = pretend_to_record(monkeypatch)
    deferred = DeferredGradients()
    deferred.later(functools.partial(log.append, "product of main"))
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        deferred.later(functools.partial(log.append, "product of a layer"))
        deferred.run_on_side_stream()
    assert log == ["side waits for what came before 0", "product of a layer"]
    deferred.run_on_side_stream()
    assert log[2:] == ["side waits for what came before 2", "product of main"]
    deferred.flush()
    assert log[4:] == ["main waits for side"]


def test_launch_by_launch_nothing_is_held_back() -> None:
    done: list[int] = []
    deferred = DeferredGradients()
    deferred.later(lambda: done.append(1), lambda: done.append(2))
    assert done == [1, 2] and not is_recording()


def test_gradients_with_products_and_transposes_beside_are_those_without(monkeypatch: pytest.MonkeyPatch) -> None:
    frames, batch, hidden, depth = 6, 2, 8, 3
    loaded: list[Tensor] = []

    def backward_data(above: Any, options: Any, weight_t: Tensor) -> Any:
        loaded.append(weight_t)
        return gemm.backward_data(above, options)

    def transpose(result: Tensor, matrix: Tensor) -> None:
        result.copy_(matrix.t())

    for cell in ("relu", "lstm", "gru_after"):
        results = []
        rows = CELLS[cell].gates * hidden
        for recorded in (False, True):
            with monkeypatch.context() as patch:
                if recorded:
                    loaded.clear()
                    log = pretend_to_record(patch)
                    patch.setattr(op, "resolve", lambda *_: "persistent")
                    patch.setattr(persistent, "forward", gemm.forward)
                    patch.setattr(persistent, "backward_data", backward_data)
                    patch.setattr(persistent, "transpose_into", transpose)
                generator = torch.Generator().manual_seed(1)
                deferred = DeferredGradients()
                matrices = [0.3 * torch.randn(rows, hidden, generator=generator) for _ in range(depth)]
                sinks = [like(matrix, deferred) for matrix in matrices]
                x = torch.randn(frames, batch, hidden, generator=generator).requires_grad_()
                y = x
                for matrix, sink in zip(matrices, sinks, strict=True):
                    z = y.repeat(1, 1, CELLS[cell].gates)
                    y = recurrence(z, matrix.requires_grad_(), cell=cell, weight_sink=sink)[0]
                y.square().sum().backward()
                deferred.flush()
                results.append([x.grad, *(sink.value for sink in sinks)])
        assert_same_bits(*results)
        assert all(torch.equal(one, matrix.t()) for one, matrix in zip(loaded, reversed(matrices), strict=True))
        assert log.count("main waits for side") == depth
