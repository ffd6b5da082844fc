"""LSTM and GRU under autograd: eagerly, and as a custom op for torch.compile.

Shape letters: T frames, B batch, H hidden, G gates.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ds2_ops.checks import contiguous, refuse_second_derivative
from ds2_ops.lengths import lengths_on
from ds2_ops.recurrent.backends import resolve
from ds2_ops.recurrent.cells import GATED
from ds2_ops.recurrent.deferred import GradientSink
from ds2_ops.recurrent.gated import gemm, persistent
from ds2_ops.recurrent.gated.gemm import wide_dtype
from ds2_ops.recurrent.weights import (
    Transpose,
    add_backward_weights,
    add_frame_products,
    add_frame_sums,
    backward_weights,
    frame_products,
)

Outputs = tuple[Tensor, Tensor, Tensor, Tensor]


def _run_forward(
    x: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None,
    h0: Tensor | None,
    c0: Tensor | None,
    lengths: Tensor | None,
    cell: str,
    backend: str,
    max_sms: int | None,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lengths = lengths_on(lengths, x.shape[0], x.device)
    chosen = resolve(backend, x, cell, max_sms)
    y, h_n, c_n, saved = forward_on(save, x, weight_hh, bias, h0, c0, lengths, cell, chosen, max_sms)
    return y, h_n, c_n, x.new_empty(0) if saved is None else saved


def forward_on(
    save: bool,
    x: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None,
    h0: Tensor | None,
    c0: Tensor | None,
    lengths: Tensor | None,
    cell: str,
    chosen: str,
    max_sms: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Run on a backend that `resolve` has chosen; `lengths` are int32 on the device."""
    given = (x.contiguous(), weight_hh.contiguous(), contiguous(bias), contiguous(h0), contiguous(c0), lengths, save)
    return persistent.forward(cell, *given, max_sms) if chosen == "persistent" else gemm.forward(cell, *given)


def _run_backward_data(
    grad_y: Tensor,
    grad_h_n: Tensor | None,
    grad_c_n: Tensor | None,
    saved: Tensor,
    weight_hh: Tensor,
    lengths: Tensor | None,
    cell: str,
    backend: str,
    max_sms: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lengths = lengths_on(lengths, grad_y.shape[0], grad_y.device)
    like_x = grad_y.new_empty(()).expand(*grad_y.shape[:2], weight_hh.shape[0])
    chosen = resolve(backend, like_x, cell, max_sms)
    return _backward_data_on(grad_y, grad_h_n, grad_c_n, saved, weight_hh, lengths, cell, chosen, max_sms)


def _backward_data_on(
    grad_y: Tensor,
    grad_h_n: Tensor | None,
    grad_c_n: Tensor | None,
    saved: Tensor,
    weight_hh: Tensor,
    lengths: Tensor | None,
    cell: str,
    chosen: str,
    max_sms: int | None,
    weight_t: Tensor | None = None,
) -> Outputs:
    grads = (grad_y.contiguous(), contiguous(grad_h_n), contiguous(grad_c_n))
    given = (cell, *grads, saved, weight_hh.contiguous(), lengths)
    return persistent.backward_data(*given, max_sms, weight_t) if chosen == "persistent" else gemm.backward_data(*given)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
    _, weight_hh, bias, h0, c0, lengths, *options = inputs
    y, _, _, saved = output
    ctx.options, ctx.has_bias, ctx.has_c0 = tuple(options[:3]), bias is not None, c0 is not None
    ctx.save_for_backward(y, saved, weight_hh, h0, lengths)
    ctx.set_materialize_grads(False)  # most callers drop h_n and c_n: no zeros are made for them


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    _save_for_backward(ctx, inputs, output)
    ctx.mark_non_differentiable(output[3])


def _gradients(  # noqa: PLR0912
    run: Callable[..., Outputs],
    ctx: Any,
    grad_y: Tensor | None,
    grad_h_n: Tensor | None,
    grad_c_n: Tensor | None,
    _grad_saved: Tensor | None = None,
    weight_sink: GradientSink | None = None,
    bias_sink: GradientSink | None = None,
) -> tuple[Tensor | None, ...]:
    """Return gradients of x, weight_hh, bias, h0 and c0, and None for lengths and each of `ctx.options`."""
    y, saved, weight_hh, h0, lengths = ctx.saved_tensors
    cell = ctx.options[0]
    row, hidden = GATED[cell], y.shape[2]
    grad_y = torch.zeros_like(y) if grad_y is None else grad_y
    grad_c_n = grad_c_n if row.carries_c else None
    grad_x, grad_last, grad_h0, grad_c0 = run(grad_y, grad_h_n, grad_c_n, saved, weight_hh, lengths, *ctx.options)
    if not row.last_apart and cell != "lstm":
        grad_last = grad_x[:, :, -hidden:]
    grad_weight, grad_bias = None, None
    if ctx.needs_input_grad[1] and weight_sink is not None:
        if cell == "lstm":
            add_backward_weights(weight_sink, grad_x, y, h0)
        else:
            add_backward_weights(weight_sink.rows(0, 2 * hidden), grad_x[:, :, : 2 * hidden], y, h0)
            last_rows = weight_sink.rows(2 * hidden, 3 * hidden)
            if cell == "gru_before":  # its product takes r h
                add_frame_products(last_rows, grad_last, saved[:, :, 0] * saved[:, :, 4])
            else:
                add_backward_weights(last_rows, grad_last, y, h0)
    elif ctx.needs_input_grad[1]:
        if cell == "lstm":
            grad_weight = backward_weights(grad_x, y, h0)
        else:
            gates = backward_weights(grad_x[:, :, : 2 * hidden], y, h0)
            if cell == "gru_before":  # its product takes r h
                last = frame_products(grad_last, saved[:, :, 0] * saved[:, :, 4])
            else:
                last = backward_weights(grad_last, y, h0)
            grad_weight = torch.cat([gates, last])
    if ctx.has_bias and ctx.needs_input_grad[2]:
        if bias_sink is not None:
            add_frame_sums(bias_sink, grad_last)
        else:
            grad_bias = grad_last.sum((0, 1))
    return (
        grad_x,
        grad_weight,
        grad_bias,
        None if h0 is None else grad_h0,
        grad_c0 if ctx.has_c0 else None,
        *[None] * 4,
    )


class _Eager(torch.autograd.Function):
    """The custom op below without its wrappers, which cost the host more than launching a persistent kernel does."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        *inputs, weight_sink, bias_sink = inputs  # type: ignore[assignment]
        output = forward_on(True, *inputs)
        _save_for_backward(ctx, inputs, output)
        ctx.sinks, ctx.transpose = (weight_sink, bias_sink), None
        deferred = None if weight_sink is None else weight_sink.deferred
        if deferred is not None and inputs[7] == "persistent" and deferred.recording():
            ctx.transpose = Transpose(inputs[1].contiguous())
            deferred.expect_backward(ctx.transpose)
        return output[:3]

    @staticmethod
    def backward(
        ctx: Any, grad_y: Tensor | None, grad_h_n: Tensor | None, grad_c_n: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("this cell")
        if ctx.transpose is None:
            return *_gradients(_backward_data_on, ctx, grad_y, grad_h_n, grad_c_n, None, *ctx.sinks), None, None
        run: Callable[..., Outputs] = functools.partial(_backward_data_on, weight_t=ctx.transpose.take())

        def backward_data(*inputs: Any) -> Outputs:
            with ctx.sinks[0].deferred.during_recurrence(ctx.transpose):
                return run(*inputs)

        return *_gradients(backward_data, ctx, grad_y, grad_h_n, grad_c_n, None, *ctx.sinks), None, None


eager: Callable[..., tuple[Tensor, Tensor, Tensor]] = _Eager.apply
forward = torch.library.custom_op("ds2::gated_forward", _run_forward, mutates_args=())
backward_data = torch.library.custom_op("ds2::gated_backward_data", _run_backward_data, mutates_args=())
forward.register_autograd(lambda ctx, *grads: (*_gradients(backward_data, ctx, *grads), None), setup_context=_set_up)


@forward.register_fake
def _(
    x: Tensor, weight_hh: Tensor, bias: Any, h0: Any, c0: Any, lengths: Any, cell: str, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (frames, batch, _), hidden, row = x.shape, weight_hh.shape[1], GATED[cell]
    return (
        x.new_empty(frames, batch, hidden),
        x.new_empty(batch, hidden),
        x.new_empty((batch, hidden) if row.carries_c else (0,), dtype=wide_dtype(x)),
        x.new_empty((frames, batch, row.saved, hidden) if args[-1] else (0,)),
    )


@backward_data.register_fake
def _(
    grad_y: Tensor, grad_h_n: Any, grad_c_n: Any, saved: Any, weight_hh: Tensor, lengths: Any, cell: str, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (frames, batch, hidden), row = grad_y.shape, GATED[cell]
    return (
        grad_y.new_empty(frames, batch, row.gates * hidden),
        grad_y.new_empty((frames, batch, hidden) if row.last_apart else (0,)),
        grad_y.new_empty(batch, hidden),
        grad_y.new_empty((batch, hidden) if row.carries_c else (0,), dtype=wide_dtype(grad_y)),
    )
