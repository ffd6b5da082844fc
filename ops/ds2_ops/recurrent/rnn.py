"""The recurrence h_t = f(x_t + W_hh h_(t-1)) as a torch op: checks and autograd.

Shape letters: T frames, B batch, H hidden.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ds2_ops.checks import (
    check_choice,
    check_like,
    check_shape,
    contiguous,
    needs_grad,
    refuse_second_derivative,
    under_autocast,
)
from ds2_ops.lengths import check_lengths, lengths_on
from ds2_ops.recurrent import gemm, persistent
from ds2_ops.recurrent.backends import BACKENDS, check_call, resolve, settle
from ds2_ops.recurrent.cells import CELLS
from ds2_ops.recurrent.deferred import GradientSink
from ds2_ops.recurrent.options import Options
from ds2_ops.recurrent.reference import recurrence_reference
from ds2_ops.recurrent.weights import Transpose, add_backward_weights, backward_weights

NONLINEARITIES = tuple(CELLS)


def recurrence(
    x: Tensor,
    weight_hh: Tensor,
    h0: Tensor | None = None,
    lengths: Tensor | None = None,
    *,
    nonlinearity: str = "clipped_relu",
    clip: float = 20.0,
    backend: str = "auto",
    max_sms: int | None = None,
    weight_sink: GradientSink | None = None,
) -> tuple[Tensor, Tensor]:
    """Run h_t = f(x_t + W_hh h_(t-1)) over all frames, the recurrent weights staying on chip where the GPU allows it.

    Persistent RNNs (2016), section 3, equation 2. No output, state or gradient depends on padding or on other
    utterances of the batch, and a sequence split anywhere in T, its state carried by ``h0``, gives the same bits as
    the whole one on the same backend. Differentiable in ``x``, ``weight_hh`` and ``h0``; works under torch.autocast,
    torch.compile and CUDA-graph capture.

    Args:
        x: (T, B, H) pre-activations: the input projection, normalised, with any bias. bfloat16, float16 or float32;
            float64 on the "cpu", "gemm" and "reference" backends. Any strides; a copy is made unless contiguous.
        weight_hh: (H, H) in the layout of torch.nn: row i makes hidden unit i. Same dtype and device as ``x``.
        h0: (B, H) state before frame 0; zeros when None.
        lengths: (B,) int32 or int64, valid frames per utterance, 0 to T, on the CPU or the device of ``x``; all T when
            None. Best int32 on the device: never read back, so values there are the caller's promise.
        nonlinearity: "relu", "clipped_relu" (min(max(z, 0), clip)) or "tanh".
        clip: upper bound of "clipped_relu", rounded to the dtype of ``x``.
        backend: "persistent" (Hopper kernels), "gemm" (one matrix product a step), "reference" (plain autograd loop),
            "cpu", or "auto": "cpu" on a CPU, else "persistent" if it can run and "gemm" if not, logged once. "auto"
            leaves TF32 products to those who allow them.
        max_sms: most streaming multiprocessors that the persistent kernels may occupy; all when None.
        weight_sink: takes the gradient of ``weight_hh`` in eager mode, as a product to be made where it is kept;
            autograd then gets none.

    Returns:
        y (T, B, H), 0 where t >= length, and h_n (B, H), the state after each utterance's last frame (h0 for length 0).

    Raises:
        ValueError: a shape, device, length, name or number that is not allowed.
        TypeError: a dtype that is not allowed.
        RuntimeError: a backend asked for by name cannot run this, with the reason.
    """
    x, weight_hh, h0 = under_autocast(x, weight_hh, h0)  # type: ignore[assignment]
    compiling = torch.compiler.is_compiling()
    if compiling:
        check_call("nonlinearity", nonlinearity, x.shape, x.dtype, backend, max_sms)
    else:
        chosen = settle("nonlinearity", nonlinearity, x, backend, max_sms)
    if CELLS[nonlinearity].takes_clip and not 0.0 < clip < math.inf:
        raise ValueError(f"clip is {clip}, allowed is a positive finite number; for no bound use nonlinearity='relu'")
    frames, batch, hidden = x.shape
    check_shape("weight_hh", weight_hh, (hidden, hidden), "(H, H)")
    check_like("weight_hh", weight_hh, x)
    if h0 is not None:
        check_shape("h0", h0, (batch, hidden), "(B, H)")
        check_like("h0", h0, x)
    if lengths is not None:
        check_lengths(lengths, batch)
        if not compiling or backend == "reference":
            lengths = lengths_on(lengths, frames, x.device)
    if backend == "reference":
        return recurrence_reference(x, weight_hh, h0, lengths, nonlinearity=nonlinearity, clip=clip)
    if compiling:
        y, h_n = _forward(x, weight_hh, h0, lengths, nonlinearity, clip, backend, max_sms)
        return y, h_n
    options = options_of(nonlinearity, clip, max_sms, x.dtype)
    if needs_grad(x, weight_hh, h0):
        return _eager(x, weight_hh, h0, lengths, chosen, options, weight_sink)
    return _forward_on(x, weight_hh, h0, lengths, chosen, options)


class Recurrence(nn.Module):
    """The recurrent half of a layer: holds weight_hh and calls :func:`recurrence`.

    Args:
        hidden_size: H.
        nonlinearity, clip, backend, max_sms: as in :func:`recurrence`.
        device, dtype: of the weight.
    """

    def __init__(
        self,
        hidden_size: int,
        nonlinearity: str = "clipped_relu",
        *,
        clip: float = 20.0,
        backend: str = "auto",
        max_sms: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_choice("nonlinearity", nonlinearity, NONLINEARITIES)
        check_choice("backend", backend, BACKENDS)
        self.nonlinearity, self.clip, self.backend, self.max_sms = nonlinearity, clip, backend, max_sms
        self.weight_hh = nn.Parameter(torch.empty(hidden_size, hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weight_hh as torch.nn.RNN does: uniform within 1 / sqrt(H)."""
        bound = self.weight_hh.shape[0] ** -0.5
        nn.init.uniform_(self.weight_hh, -bound, bound)

    def forward(self, x: Tensor, h0: Tensor | None = None, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Call :func:`recurrence` with the module's weight; same shapes and returns."""
        return recurrence(
            x,
            self.weight_hh,
            h0,
            lengths,
            nonlinearity=self.nonlinearity,
            clip=self.clip,
            backend=self.backend,
            max_sms=self.max_sms,
        )

    def extra_repr(self) -> str:
        """Show what the module was made with."""
        bound = f", clip={self.clip}" if CELLS[self.nonlinearity].takes_clip else ""
        return f"{self.weight_hh.shape[0]}, {self.nonlinearity!r}{bound}, backend={self.backend!r}"


def _run_forward(
    x: Tensor,
    weight_hh: Tensor,
    h0: Tensor | None,
    lengths: Tensor | None,
    nonlinearity: str,
    clip: float,
    backend: str,
    max_sms: int | None,
) -> tuple[Tensor, Tensor]:
    lengths = lengths_on(lengths, x.shape[0], x.device)
    chosen, options = resolve(backend, x, nonlinearity, max_sms), options_of(nonlinearity, clip, max_sms, x.dtype)
    return _forward_on(x, weight_hh, h0, lengths, chosen, options)


def _forward_on(
    x: Tensor, weight_hh: Tensor, h0: Tensor | None, lengths: Tensor | None, chosen: str, options: Options
) -> tuple[Tensor, Tensor]:
    """Run on a backend that `resolve` has chosen; `lengths` are int32 on the device."""
    forward = persistent.forward if chosen == "persistent" else gemm.forward
    return forward(x.contiguous(), weight_hh.contiguous(), contiguous(h0), lengths, options)


def _run_backward_data(
    grad_y: Tensor,
    grad_h_n: Tensor | None,
    y: Tensor,
    weight_hh: Tensor,
    lengths: Tensor | None,
    nonlinearity: str,
    clip: float,
    backend: str,
    max_sms: int | None,
) -> tuple[Tensor, Tensor]:
    lengths = lengths_on(lengths, y.shape[0], y.device)
    chosen, options = resolve(backend, y, nonlinearity, max_sms), options_of(nonlinearity, clip, max_sms, y.dtype)
    return _backward_data_on(grad_y, grad_h_n, y, weight_hh, lengths, chosen, options)


def _backward_data_on(
    grad_y: Tensor,
    grad_h_n: Tensor | None,
    y: Tensor,
    weight_hh: Tensor,
    lengths: Tensor | None,
    chosen: str,
    options: Options,
    weight_t: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    given = (grad_y.contiguous(), contiguous(grad_h_n), y, weight_hh.contiguous(), lengths, options)
    return persistent.backward_data(*given, weight_t) if chosen == "persistent" else gemm.backward_data(*given)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, weight_hh, h0, lengths, *ctx.options = inputs
    ctx.save_for_backward(output[0], weight_hh, h0, lengths)
    ctx.set_materialize_grads(False)  # most callers drop h_n: no zeros are made for it


def _gradients(
    backward_data: Callable[..., tuple[Tensor, Tensor]],
    ctx: Any,
    grad_y: Tensor | None,
    grad_h_n: Tensor | None,
    sink: GradientSink | None = None,
) -> tuple[Tensor | None, ...]:
    """Return gradients of x, weight_hh and h0, and None for each of `ctx.options` and lengths."""
    y, weight_hh, h0, lengths = ctx.saved_tensors
    grad_y = torch.zeros_like(y) if grad_y is None else grad_y
    grad_x, grad_h0 = backward_data(grad_y, grad_h_n, y, weight_hh, lengths, *ctx.options)
    grad_weight_hh = None
    if ctx.needs_input_grad[1]:
        if sink is not None:
            add_backward_weights(sink, grad_x, y, h0)
        else:
            grad_weight_hh = backward_weights(grad_x, y, h0)
    return grad_x, grad_weight_hh, None if h0 is None else grad_h0, None, *[None] * len(ctx.options)


class _EagerRecurrence(torch.autograd.Function):
    """The custom op below without its wrappers, which cost the host more than launching a persistent kernel does."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        _, weight_hh, _, _, chosen, _, sink = inputs
        output = _forward_on(*inputs[:-1])
        _save_for_backward(ctx, inputs[:-1], output)
        ctx.sink, ctx.transpose = sink, None
        deferred = None if sink is None else sink.deferred
        if deferred is not None and chosen == "persistent" and deferred.recording():
            ctx.transpose = Transpose(weight_hh.contiguous())
            deferred.expect_backward(ctx.transpose)
        return output

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None, grad_h_n: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("recurrence")
        if ctx.transpose is None:
            return *_gradients(_backward_data_on, ctx, grad_y, grad_h_n, ctx.sink), None
        run: Callable[..., tuple[Tensor, Tensor]] = functools.partial(_backward_data_on, weight_t=ctx.transpose.take())

        def backward_data(*inputs: Any) -> tuple[Tensor, Tensor]:
            with ctx.sink.deferred.during_recurrence(ctx.transpose):
                return run(*inputs)

        return *_gradients(backward_data, ctx, grad_y, grad_h_n, ctx.sink), None


_eager: Callable[..., tuple[Tensor, Tensor]] = _EagerRecurrence.apply
_forward = torch.library.custom_op("ds2::recurrence_forward", _run_forward, mutates_args=())
_backward_data = torch.library.custom_op("ds2::recurrence_backward_data", _run_backward_data, mutates_args=())
_forward.register_autograd(functools.partial(_gradients, _backward_data), setup_context=_save_for_backward)


@_forward.register_fake
def _(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[1:])


@_backward_data.register_fake
def _(grad_y: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return grad_y.new_empty(grad_y.shape), grad_y.new_empty(grad_y.shape[1:])


@functools.cache
def options_of(
    nonlinearity: str, clip: float, max_sms: int | None, dtype: torch.dtype, *, early: bool = False
) -> Options:
    """Round clip as outputs are rounded: a clipped output must compare equal to it, or its gradient would be 1."""
    return Options(nonlinearity, float(torch.tensor(clip, dtype=dtype)), max_sms, early)
