"""The recurrence under autograd, of every cell and in one or two directions: eagerly, and as a custom op.

The gradient of the recurrent matrix is one product over all frames. It goes to autograd, or to a sink, which makes the
product where it keeps the gradient and may defer it.
Shape letters: T frames, B batch, H hidden, G gates, S saved values.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ds2_ops.checks import contiguous, lengths_on, refuse_second_derivative
from ds2_ops.recurrent.backends import gemm, persistent
from ds2_ops.recurrent.backends.choose import resolve
from ds2_ops.recurrent.backends.gemm import wide_dtype
from ds2_ops.recurrent.backends.persistent import transpose_of
from ds2_ops.recurrent.backends.reference import BackwardInputs, Gradients, Inputs, Outputs
from ds2_ops.recurrent.cells import CELLS, Cell, Options
from ds2_ops.recurrent.deferred import Factors, GradientSink, is_recording, product

Sinks = Sequence[GradientSink]


@functools.cache
def options_of(cell: str, clip: float, max_sms: int | None, dtype: torch.dtype, *, early: bool = False) -> Options:
    """Round clip as outputs are rounded: a clipped output must compare equal to it, or its gradient would be 1."""
    return Options(cell, float(torch.tensor(clip, dtype=dtype, device="cpu")), max_sms, early)


def forward_on(backend: str, options: Options, tensors: Inputs, *, save: bool) -> Outputs:
    """Run the forward pass on a backend that `resolve` returned.

    Args:
        backend: its name.
        options: the cell, its clip, the most multiprocessors to use.
        tensors: x, weight_hh, bias_hn, h0, c0 and lengths, these int32 on the device of x.
        save: whether a backward pass will follow.
    """
    x, weight_hh, bias_hn, h0, c0, lengths = tensors
    run = persistent.forward if backend == "persistent" else gemm.forward
    states = contiguous(bias_hn), contiguous(h0), contiguous(c0)
    return run((x.contiguous(), weight_hh.contiguous(), *states, lengths), options, save)


def backward_data_on(
    backend: str, options: Options, tensors: BackwardInputs, weight_t: Tensor | None = None
) -> Gradients:
    """Run the backward pass on a backend that `resolve` returned.

    Args:
        backend, options: as `forward_on`.
        tensors: gradients of y, h_n and c_n, then y, saved, weight_hh and lengths.
        weight_t: the transpose of weight_hh, if it exists already.
    """
    grad_y, grad_h_n, grad_c_n, y, saved, weight_hh, lengths = tensors
    grads = grad_y.contiguous(), contiguous(grad_h_n), contiguous(grad_c_n)
    inputs = (*grads, y, saved, weight_hh.contiguous(), lengths)
    if backend == "persistent":
        return persistent.backward_data(inputs, options, weight_t)
    return gemm.backward_data(inputs, options)


class _Recurrence(torch.autograd.Function):
    """The custom op below without its wrappers, which cost the host more than launching a persistent kernel does."""

    @staticmethod
    def forward(
        ctx: Any, backend: str, options: Options, weight_sinks: Sinks | None, bias_sinks: Sinks | None, *tensors: Any
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        y, h_n, c_n, saved = forward_on(backend, options, tensors, save=True)
        _, weight_hh, _, h0, _, lengths = tensors
        ctx.save_for_backward(y, saved, weight_hh, h0, lengths)
        ctx.set_materialize_grads(False)  # most callers drop h_n and c_n: no zeros are made for them
        ctx.backend, ctx.options, ctx.sinks, ctx.transpose = backend, options, (weight_sinks, bias_sinks), None
        deferred = None if weight_sinks is None else weight_sinks[0].deferred
        if deferred is not None and backend == "persistent" and is_recording():
            ctx.transpose = deferred.expect_backward(transpose_of(weight_hh.contiguous()))
        return y, h_n, c_n

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("the recurrence")
        weight_t, running = None, contextlib.nullcontext()
        if ctx.transpose is not None:
            weight_t = ctx.transpose.take()
            running = ctx.sinks[0][0].deferred.during_recurrence(ctx.transpose)

        def backward_data(inputs: BackwardInputs) -> Gradients:
            with running:
                return backward_data_on(ctx.backend, ctx.options, inputs, weight_t)

        needed = ctx.needs_input_grad[4:9]
        return *[None] * 4, *_gradients(backward_data, ctx.options.cell, ctx.saved_tensors, needed, grads, ctx.sinks)


eager: Callable[..., tuple[Tensor, Tensor, Tensor | None]] = _Recurrence.apply


def _gradients(
    backward_data: Callable[[BackwardInputs], Gradients],
    name: str,
    tensors: tuple[Tensor | None, ...],
    needed: Sequence[bool],
    grads: Sequence[Tensor | None],
    sinks: tuple[Sinks | None, Sinks | None] = (None, None),
) -> tuple[Tensor | None, ...]:
    """Return gradients of x, weight_hh, bias_hn, h0 and c0, and None for lengths.

    Args:
        name: of the cell.
        tensors: y, saved, weight_hh, h0 and lengths.
        needed: which of these gradients are needed, x to c0.
        grads: of y, h_n and c_n.
        sinks: of weight_hh and bias_hn.
    """
    y, saved, weight_hh, h0, lengths = tensors
    grad_y, grad_h_n, grad_c_n = grads
    assert y is not None and weight_hh is not None
    cell = CELLS[name]
    grad_y = torch.zeros_like(y) if grad_y is None else grad_y
    grad_c_n = grad_c_n if cell.carries_c else None
    grad_x, grad_last, grad_h0, grad_c0 = backward_data((grad_y, grad_h_n, grad_c_n, y, saved, weight_hh, lengths))
    if not cell.last_apart:
        grad_last = grad_x[..., -y.shape[-1] :]
    assert grad_last is not None
    grad_weight, grad_bias = None, None
    weight_sinks, bias_sinks = sinks
    if needed[1]:
        factors = _factors(cell, grad_x, grad_last, y, saved, h0, lengths)
        if weight_sinks is None:
            matrices = [[_product(pairs) for pairs in rows] for rows in factors]
            whole = [rows[0] if len(rows) == 1 else torch.cat(rows) for rows in matrices]
            grad_weight = whole[0] if y.dim() == 3 else torch.stack(whole)
        else:
            for sink, rows in zip(weight_sinks, factors, strict=True):
                _add_products(sink, rows)
    if needed[2]:
        if bias_sinks is None:
            grad_bias = grad_last.sum((0, 1))
        else:
            for sink, grad in zip(bias_sinks, _by_direction(grad_last), strict=True):
                sink.add(functools.partial(grad.sum, (0, 1), dtype=wide_dtype(grad)))
    return grad_x, grad_weight, grad_bias, grad_h0 if needed[3] else None, grad_c0 if needed[4] else None, None


def _factors(
    cell: Cell,
    grad_x: Tensor,
    grad_last: Tensor,
    y: Tensor,
    saved: Tensor | None,
    h0: Tensor | None,
    lengths: Tensor | None,
) -> list[list[Factors]]:
    """Of which products the gradient of each direction's matrix consists, by rows from the first to the last.

    dW = sum_t grad_t h_(t-1)^T: gradients are 0 at padding, so padding adds nothing.
    """
    hidden, directions = y.shape[-1], list[list[Factors]]()
    apart = cell.last_apart or cell.phases > 1
    for way, (grad, last, states) in enumerate(zip(*map(_by_direction, (grad_x, grad_last, y)), strict=True)):
        first = h0 if h0 is None or y.dim() == 3 else h0[:, way]
        before = _states_before(states, first, lengths, backwards=way == 1)
        rows: list[Factors] = [
            [_flat(grad[at][..., : -hidden if apart else None], previous) for at, previous in before]
        ]
        if cell.phases > 1:  # the product of the last gate takes r h
            assert saved is not None
            rows.append([_flat(last, saved[:, :, 0] * saved[:, :, 4])])
        elif apart:
            rows.append([_flat(last[at], previous) for at, previous in before])
        directions.append(rows)
    return directions


def _flat(grad: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
    """(T, B, R) and (T, B, H) as the factors (R, T B) and (T B, H) of a product over all frames."""
    return grad.flatten(0, 1).t(), previous.flatten(0, 1)


def _by_direction(tensor: Tensor) -> tuple[Tensor, ...]:
    """(T, B, N) of each direction of (T, B, N) or (T, B, 2, N)."""
    return (tensor,) if tensor.dim() == 3 else tensor.unbind(2)


def _states_before(
    y: Tensor, h0: Tensor | None, lengths: Tensor | None, *, backwards: bool
) -> list[tuple[slice, Tensor]]:
    """Frames, and the states (T, B, H) that their steps began with, in parts.

    Frames that began with zeros are left out. Where time runs backwards the step before is that of the next frame.
    """
    if h0 is None:
        return [(slice(None, -1), y[1:]) if backwards else (slice(1, None), y[:-1])]
    if not backwards:
        return [(slice(0, 1), h0[None][: len(y)]), (slice(1, None), y[:-1])]
    following = torch.cat([y, h0[None]])[1:]
    if lengths is not None:
        last = torch.arange(len(y), device=y.device)[:, None, None] == lengths[:, None] - 1
        following = torch.where(last, h0, following)
    return [(slice(None), following)]


def _product(factors: Factors) -> Tensor:
    """The sum (R, H) of products, in float32 where tensors are 16-bit on a GPU."""
    left, right = product(factors)
    if left.is_cuda and left.dtype in (torch.bfloat16, torch.float16):
        # cuBLAS may cut a sum over so many frames in parts and add these in the type of the output: ask for float32.
        return torch.mm(left, right, out_dtype=torch.float32).to(left.dtype)
    return left @ right


def _add_products(sink: GradientSink, rows: Sequence[Factors]) -> None:
    start = 0
    for factors in rows:
        stop = start + len(factors[0][0])
        (sink if len(rows) == 1 else sink.rows(start, stop)).add_products(factors)
        start = stop


def _run_forward(
    x: Tensor,
    weight_hh: Tensor,
    bias_hn: Tensor | None,
    h0: Tensor | None,
    c0: Tensor | None,
    lengths: Tensor | None,
    cell: str,
    clip: float,
    backend: str,
    max_sms: int | None,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lengths = lengths_on(lengths, x.shape[0], x.device)
    backend, options = resolve(backend, x, cell, max_sms), options_of(cell, clip, max_sms, x.dtype)
    y, h_n, c_n, saved = forward_on(backend, options, (x, weight_hh, bias_hn, h0, c0, lengths), save=save)
    return y, h_n, _or_empty(c_n, x), _or_empty(saved, x)


def _run_backward_data(
    grad_y: Tensor,
    grad_h_n: Tensor | None,
    grad_c_n: Tensor | None,
    y: Tensor,
    saved: Tensor,
    weight_hh: Tensor,
    lengths: Tensor | None,
    cell: str,
    clip: float,
    backend: str,
    max_sms: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lengths = lengths_on(lengths, y.shape[0], y.device)
    like_x = y.new_empty(()).expand(*y.shape[:2], weight_hh.shape[0])
    backend, options = resolve(backend, like_x, cell, max_sms), options_of(cell, clip, max_sms, y.dtype)
    tensors = (grad_y, grad_h_n, grad_c_n, y, saved if CELLS[cell].saved else None, weight_hh, lengths)
    grad_x, grad_last, grad_h0, grad_c0 = backward_data_on(backend, options, tensors)
    return grad_x, _or_empty(grad_last, y), grad_h0, _or_empty(grad_c0, y)


def _or_empty(tensor: Tensor | None, like: Tensor) -> Tensor:
    """A custom op returns tensors only."""
    return like.new_empty(0) if tensor is None else tensor


forward = torch.library.custom_op("ds2::recurrence_forward", _run_forward, mutates_args=())
backward_data = torch.library.custom_op("ds2::recurrence_backward_data", _run_backward_data, mutates_args=())


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    _, weight_hh, _, h0, _, lengths, *options, _ = inputs
    y, _, _, saved = output
    ctx.options = tuple(options)
    ctx.save_for_backward(y, saved, weight_hh, h0, lengths)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(saved)


def _compiled_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    def run(inputs: BackwardInputs) -> Gradients:
        results: Gradients = backward_data(*inputs, *ctx.options)
        return results

    results = _gradients(run, ctx.options[0], ctx.saved_tensors, ctx.needs_input_grad[:5], grads[:3])
    return *results, *[None] * 5


forward.register_autograd(_compiled_backward, setup_context=_set_up)


@forward.register_fake
def _(
    x: Tensor, weight_hh: Tensor, bias_hn: Any, h0: Any, c0: Any, lengths: Any, cell: str, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (frames, batch, _), hidden, row = x.shape, weight_hh.shape[1], CELLS[cell]
    return (
        x.new_empty(frames, batch, hidden),
        x.new_empty(batch, hidden),
        x.new_empty(batch, hidden, dtype=wide_dtype(x)) if row.carries_c else x.new_empty(0),
        x.new_empty((frames, batch, row.saved, hidden) if args[-1] and row.saved else 0),
    )


@backward_data.register_fake
def _(
    grad_y: Tensor, grad_h_n: Any, grad_c_n: Any, y: Any, saved: Any, weight_hh: Tensor, lengths: Any, cell: str,
    *args: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    (frames, batch, hidden), row = grad_y.shape, CELLS[cell]
    return (
        grad_y.new_empty(frames, batch, row.gates * hidden),
        grad_y.new_empty((frames, batch, hidden) if row.last_apart else 0),
        grad_y.new_empty(batch, hidden),
        grad_y.new_empty(batch, hidden, dtype=wide_dtype(grad_y)) if row.carries_c else grad_y.new_empty(0),
    )
