"""Gradients that go to sinks: the same as autograd's, of every cell, in one and two directions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ds2_ops import bidirectional, gru, lstm, recurrence
from ds2_ops.recurrent.cells import CELLS
from ds2_ops.recurrent.deferred import DeferredGradients
from support.op_cases import CPU, CUDA, assert_same_bits, draw, ragged_lengths, relative_error
from support.sinks import like
from torch import Tensor

SINKS = ("weight_sink", "bias_sink")


def call(cell: str, x: Tensor, weight_hh: Tensor, bias: Tensor | None, h0: Tensor | None, **options: Any) -> Tensor:
    """y of a cell in one direction, or both for x of both."""
    if x.dim() == 4:
        return bidirectional(cell, x, weight_hh, bias, **options)
    if cell == "lstm":
        return lstm(x, weight_hh, h0, **options)[0]
    if bias is not None:
        return gru(x, weight_hh, bias, h0, reset_after=cell == "gru_after", **options)[0]
    return recurrence(x, weight_hh, h0, nonlinearity=cell, **options)[0]


def tensors(cell: str, device: torch.device, dtype: torch.dtype, ways: tuple[int, ...] = ()) -> list[Tensor | None]:
    """x, weight_hh and bias_hn."""
    gates, hidden = CELLS[cell].gates, 8
    x = draw(1, 5, 3, *ways, gates * hidden, device=device, dtype=dtype)
    weight = draw(2, *ways, gates * hidden, hidden, device=device, dtype=dtype, scale=0.9 * hidden**-0.5)
    bias = draw(3, *ways, hidden, device=device, dtype=dtype) if cell.startswith("gru") else None
    return [x, weight, bias]


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(("ways", "with_h0"), [((), False), ((), True), ((2,), False)])
def test_sinks_get_what_autograd_would(cell: str, ways: tuple[int, ...], with_h0: bool) -> None:
    h0 = draw(4, 3, 8, device=CPU, dtype=torch.float32) if with_h0 else None
    results = []
    for with_sinks in (False, True):
        x, *parameters = (None if t is None else t.requires_grad_() for t in tensors(cell, CPU, torch.float32, ways))
        assert x is not None
        present = [t for t in parameters if t is not None]
        pairs = [[like(way) for way in (t if ways else [t])] for t in present] if with_sinks else []
        sinks = {name: pair if ways else pair[0] for name, pair in zip(SINKS, pairs, strict=False)}
        call(cell, x, *parameters, h0, lengths=ragged_lengths(5, 3), **sinks).sin().sum().backward()
        if with_sinks:
            assert all(t.grad is None for t in present)
            results.append([x.grad, *(torch.stack([s.value for s in p]) if ways else p[0].value for p in pairs)])
        else:
            results.append([x.grad, *(t.grad for t in present)])
    assert_same_bits(*results)


@pytest.mark.gpu
@pytest.mark.parametrize("ways", [(), (2,)])
@pytest.mark.parametrize("cell", CELLS)
def test_a_recorded_step_with_deferred_gradients_gives_those_of_an_eager_one(cell: str, ways: tuple[int, ...]) -> None:
    """Two layers, so that the first one's recurrence runs beside products and the transpose of the second's."""
    x, weight, bias = tensors(cell, CUDA, torch.bfloat16, ways)
    assert x is not None and weight is not None
    deferred = DeferredGradients()
    places: list[list[Any]] = []
    for t in (weight, bias):
        if t is not None:
            places.append([like(way.float(), deferred) for way in (t if ways else [t])])
    leaves = [t.requires_grad_() for t in (x, weight, bias) if t is not None]

    def step(*, with_sinks: bool) -> None:
        sinks: dict[str, Any] = {}
        if with_sinks:
            for name, pair in zip(SINKS, places, strict=False):
                for place in pair:
                    place.value.zero_()
                sinks[name] = pair if ways else pair[0]
        deferred.begin()
        inputs = x
        for _ in range(2):
            y = call(cell, inputs, weight, bias, None, backend="persistent", **sinks)
            inputs = y.repeat_interleave(CELLS[cell].gates, dim=-1)
        y.sin().sum().backward()
        deferred.flush()

    step(with_sinks=False)
    expected = [leaf.grad.clone() for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step(with_sinks=True)
    torch.cuda.synchronize()
    x.grad = None
    torch.cuda.current_blas_handle()  # of this thread: a capture cannot create it
    with torch.cuda.graph(graph):
        step(with_sinks=True)
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits([x.grad], expected[:1])
    values = [torch.stack([p.value for p in pair]) if ways else pair[0].value for pair in places]
    for value, true in zip(values, expected[1:], strict=True):
        assert relative_error(value, true) <= 2 * torch.finfo(torch.bfloat16).eps  # both round, the sink at its end
