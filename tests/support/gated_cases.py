"""Inputs of the cells with gates on any backend, and how far they may be from the truth."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from ds2_ops import recurrence
from ds2_ops.recurrent.cells import GATED, Options
from ds2_ops.recurrent.plan.problem import Choice, Problem
from torch import Tensor

from support.op_cases import (
    CUDA,
    assert_same_bits,
    draw,
    nan_filled_memory,
    on_cpu,
    on_gpu,
    outputs_and_gradients,
    poison_padding,
    ragged_lengths,
    relative_error,
)
from support.persistent_cases import each_tile

on_every_target = pytest.mark.parametrize(("device", "backend"), [on_cpu("cpu"), on_gpu("gemm"), on_gpu("persistent")])


def has_bias(cell: str) -> bool:
    """Whether a cell takes `bias_hn`, which `recurrence` refuses for others."""
    return cell.startswith("gru")


def _names(cell: str) -> tuple[str, ...]:
    outputs = ("y", "h_n", "c_n") if GATED[cell].carries_c else ("y", "h_n")
    bias = ("grad_bias_hn",) if has_bias(cell) else ()
    states = ("grad_h0", "grad_c0") if GATED[cell].carries_c else ("grad_h0",)
    return (*outputs, "grad_x", "grad_weight_hh", *bias, *states)


NAMES = {cell: _names(cell) for cell in GATED}
"""The outputs and gradients of each cell, in the order of `run`."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of c."""
    return torch.promote_types(dtype, torch.float32)


def gated(
    cell: str,
    x: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None,
    h0: Tensor | None,
    c0: Tensor | None,
    lengths: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, h_n and c_n of a cell, the last empty where it has none."""
    y, h_n, *c_n = recurrence(x, weight_hh, h0, lengths, cell=cell, bias_hn=bias, c0=c0, **options)
    return y, h_n, c_n[0] if c_n else y.new_empty(0)


def both_passes(
    backend: Any,
    cell: str,
    inputs: Sequence[Tensor | None],
    cotangents: Sequence[Tensor | None],
    lengths: Tensor | None,
    between: Callable[[], None] = lambda: None,
) -> list[Tensor]:
    """What a backend's module returns of both passes, less what the cell does not have and what is saved."""
    options = Options(cell)
    y, h_n, c_n, saved = backend.forward((*inputs, lengths), options, True)
    between()
    back = backend.backward_data((*cotangents, y, saved, inputs[1], lengths), options)
    return [t for t in (y, h_n, c_n, *back) if t is not None]


def problem(
    cell: str, shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype
) -> tuple[list[Tensor | None], list[Tensor]]:
    """x, weight_hh, bias, h0 and c0, those that the cell has, and gradients of its outputs."""
    (frames, batch, hidden), row = shape, GATED[cell]

    def state(seed: int, dtype: torch.dtype = dtype) -> Tensor:
        return draw(seed, batch, hidden, device=device, dtype=dtype)

    x = draw(1, frames, batch, row.gates * hidden, device=device, dtype=dtype)
    weight_hh = draw(2, row.gates * hidden, hidden, device=device, dtype=dtype, scale=hidden**-0.5)
    bias = draw(6, hidden, device=device, dtype=dtype) if has_bias(cell) else None
    c0 = state(7, wide(dtype)) if row.carries_c else None
    cotangents = [draw(4, *shape, device=device, dtype=dtype), state(5)]
    if row.carries_c:
        cotangents.append(state(8, wide(dtype)))
    return [x, weight_hh, bias, state(3), c0], cotangents


def run(
    cell: str,
    inputs: Sequence[Tensor | None],
    cotangents: Sequence[Tensor],
    lengths: Tensor | None,
    *,
    backend: str,
    **options: Any,
) -> list[Tensor]:
    """Outputs and every gradient, in the order of `NAMES`."""

    def op(*inputs: Tensor | None) -> tuple[Tensor, ...]:
        outputs = gated(cell, *inputs, lengths, backend=backend, **options)  # type: ignore[arg-type]
        return outputs if GATED[cell].carries_c else outputs[:2]

    return outputs_and_gradients(op, inputs, cotangents)


def rounding_floor(backend: str, dtype: torch.dtype) -> float:
    """The relative error that passes whatever stock PyTorch reaches: persistent kernels multiply float32 as TF32."""
    return 2e-3 if backend == "persistent" and dtype == torch.float32 else 2e-7


def in_float64(tensors: Sequence[Tensor | None]) -> list[Any]:
    return [None if t is None else t.double() for t in tensors]


def assert_as_good_as_stock(
    cell: str,
    ours: Callable[[], Sequence[Tensor]],
    inputs: Sequence[Tensor | None],
    cotangents: Sequence[Tensor],
    lengths: Tensor | None,
    floor: float = 0.0,
) -> None:
    """Relative error against float64 is at most twice that of plain autograd in the same dtype, or floor."""
    truth = run(cell, in_float64(inputs), in_float64(cotangents), lengths, backend="reference")
    stock = run(cell, inputs, cotangents, lengths, backend="reference")
    for name, our, other, true in zip(NAMES[cell], ours(), stock, truth, strict=True):
        assert our.dtype == other.dtype and our.shape == true.shape, name
        allowed = max(2 * relative_error(other, true), floor)
        assert relative_error(our, true) <= allowed, f"{name} of {cell} {tuple(true.shape)} {our.dtype}"


def check_each_tile(
    monkeypatch: pytest.MonkeyPatch,
    tiles: Callable[[Problem], list[Choice]],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    cell: str,
    floor: float,
) -> None:
    """Run each tile in memory of NaN, on arrays with NaN at padding: as good as stock, and the same bits twice."""
    lengths = ragged_lengths(*shape[:2]).to(CUDA)
    (x, *others), (grad_y, *last) = problem(cell, shape, CUDA, dtype)
    poisoned = [poison_padding(x, lengths), *others], [poison_padding(grad_y, lengths), *last]  # type: ignore[arg-type]

    def ours() -> list[Tensor]:
        with nan_filled_memory():
            return run(cell, *poisoned, lengths, backend="persistent")

    for _ in each_tile(monkeypatch, tiles, shape, dtype, cell):
        assert_as_good_as_stock(cell, ours, [x, *others], [grad_y, *last], lengths, floor)
        assert_same_bits(ours(), ours())
