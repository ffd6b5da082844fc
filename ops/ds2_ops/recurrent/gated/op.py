"""LSTM and GRU as torch ops: checks and autograd.

Shape letters: T frames, B batch, H hidden, G gates.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ds2_ops.checks import check_choice, check_like, check_shape, check_x, refuse_second_derivative, under_autocast
from ds2_ops.lengths import check_lengths, lengths_on
from ds2_ops.recurrent.backends import BACKENDS, resolve
from ds2_ops.recurrent.cells import GATED
from ds2_ops.recurrent.gated import gemm, persistent
from ds2_ops.recurrent.gated.gemm import wide_dtype
from ds2_ops.recurrent.gated.reference import gated_reference
from ds2_ops.recurrent.weights import backward_weights, frame_products

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
Outputs = tuple[Tensor, Tensor, Tensor, Tensor]


def lstm(
    x: Tensor,
    weight_hh: Tensor,
    h0: Tensor | None = None,
    c0: Tensor | None = None,
    lengths: Tensor | None = None,
    *,
    backend: str = "auto",
    max_sms: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run an LSTM over all frames, the recurrent weights staying on chip where the GPU allows it.

        i, f, g, o = x_t + W_hh h_(t-1);  c_t = s(f) c_(t-1) + s(i) tanh(g);  h_t = s(o) tanh(c_t)

    with the logistic function s (GRNN, Holmes et al. 2019, section 2). No output, state or gradient depends on padding
    or on other utterances of the batch, and a sequence split anywhere in T, its states carried by ``h0`` and ``c0``,
    gives the same bits as the whole one on the same backend. Differentiable in ``x``, ``weight_hh``, ``h0`` and ``c0``;
    works under torch.autocast, torch.compile and CUDA-graph capture.

    Args:
        x: (T, B, 4 H) pre-activations, ``x W_ih^T + b_ih + b_hh`` of torch.nn, gates in its order i, f, g, o. bfloat16,
            float16 or float32; float64 on the "cpu", "gemm" and "reference" backends.
        weight_hh: (4 H, H), torch.nn's ``weight_hh_l0``. Same dtype and device as ``x``.
        h0: (B, H) state before frame 0, as ``x``; zeros when None.
        c0: (B, H) cell state before frame 0, float32 (float64 where ``x`` is); zeros when None.
        lengths, backend, max_sms: as in :func:`ds2_ops.recurrence`.

    Returns:
        y (T, B, H), 0 where t >= length; h_n (B, H) and c_n (B, H), the states after each utterance's last frame, c_n
        in float32 (float64 where ``x`` is), so that a split in T loses nothing.

    Raises:
        ValueError: a shape, device, length, name or number that is not allowed.
        TypeError: a dtype that is not allowed.
        RuntimeError: a backend asked for by name cannot run this, with the reason.
    """
    return gated("lstm", x, weight_hh, None, h0, c0, lengths, backend=backend, max_sms=max_sms)


def gru(
    x: Tensor,
    weight_hh: Tensor,
    bias_hn: Tensor | None = None,
    h0: Tensor | None = None,
    lengths: Tensor | None = None,
    *,
    reset_after: bool = True,
    backend: str = "auto",
    max_sms: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Run a GRU over all frames, the recurrent weights staying on chip where the GPU allows it.

        r = s(x_r + W_r h);  z = s(x_z + W_z h);  h' = (1 - z) n + z h
        n = tanh(x_n + r (W_n h + b))    reset_after: torch.nn, cuDNN
        n = tanh(x_n + W_n (r h) + b)    else: Cho et al. 2014, Keras' reset_after=False, ONNX' default

    Promises and arguments are those of :func:`lstm` but for these.

    Args:
        x: (T, B, 3 H) pre-activations, gates in torch.nn's order r, z, n: ``x W_ih^T + b_ih``, and the first two thirds
            of b_hh.
        weight_hh: (3 H, H), torch.nn's ``weight_hh_l0``.
        bias_hn: (H,) of the recurrent product of n, the last third of torch.nn's ``bias_hh_l0``, or None.
        h0, lengths, backend, max_sms: as in :func:`lstm`.
        reset_after: whether the reset gate acts after the recurrent product. Before it the persistent kernels are
            for small layers: H up to 256 in 16-bit types, 96 in float32.

    Returns:
        y (T, B, H), 0 where t >= length, and h_n (B, H), the state after each utterance's last frame.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`lstm`.
    """
    cell = "gru_after" if reset_after else "gru_before"
    return gated(cell, x, weight_hh, bias_hn, h0, None, lengths, backend=backend, max_sms=max_sms)[:2]


def gated(
    cell: str,
    x: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None,
    h0: Tensor | None,
    c0: Tensor | None,
    lengths: Tensor | None,
    *,
    backend: str = "auto",
    max_sms: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a cell of ``cells.GATED``: what :func:`lstm` and :func:`gru` are made of. Returns and raises as :func:`lstm`.

    Args:
        cell: its name; G is its number of gates.
        x: (T, B, G H); weight_hh: (G H, H); bias: (H,) of the last gate's recurrent product, or None.
        h0, c0, lengths, backend, max_sms: as in :func:`lstm`; c0 is None, and c_n empty (0), where the cell has no c.
    """
    check_choice("cell", cell, tuple(GATED))
    check_choice("backend", backend, BACKENDS)
    if max_sms is not None and max_sms < 1:
        raise ValueError(f"max_sms is {max_sms}, allowed are 1 or more, or None for all")
    x, weight_hh, bias, h0 = under_autocast(x, weight_hh, bias, h0)  # type: ignore[assignment]
    check_x(x, _DTYPES)
    _check(cell, x, weight_hh, bias, h0, c0)
    if lengths is not None:
        check_lengths(lengths, x.shape[1])
    if backend == "reference":
        lengths = lengths_on(lengths, x.shape[0], x.device)
        narrow = None if c0 is None else c0.to(x.dtype)
        y, h_n, c_n = gated_reference(cell, x, weight_hh, bias, h0, narrow, lengths)
        return y, h_n, c_n.to(wide_dtype(x))
    inputs = (x, weight_hh, bias, h0, c0)
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    op: Callable[..., Outputs] = _forward if torch.compiler.is_compiling() else _run_forward
    if save and not torch.compiler.is_compiling():
        op = _Eager.apply
    return op(*inputs, lengths, cell, backend, max_sms, save)[:3]


def _check(cell: str, x: Tensor, weight_hh: Tensor, bias: Tensor | None, h0: Tensor | None, c0: Tensor | None) -> None:
    gates, (_, batch, width) = GATED[cell].gates, x.shape
    if width % gates:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected (T, B, {gates} H): {gates} gates a hidden unit")
    hidden = width // gates
    check_shape("weight_hh", weight_hh, (width, hidden), f"({gates} H, H)")
    check_like("weight_hh", weight_hh, x)
    for name, tensor, shape, legend in (("bias_hn", bias, (hidden,), "(H,)"), ("h0", h0, (batch, hidden), "(B, H)")):
        if tensor is not None:
            check_shape(name, tensor, shape, legend)
            check_like(name, tensor, x)
    if c0 is not None:
        check_shape("c0", c0, (batch, hidden), "(B, H)")
        if c0.dtype != wide_dtype(x):
            raise TypeError(f"c0 is {c0.dtype}, expected {wide_dtype(x)}: the cell state is never rounded to {x.dtype}")
        if c0.device != x.device:
            raise ValueError(f"c0 is on {c0.device} but x is on {x.device}: move one with .to(device)")


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
    bias, h0, c0 = map(_contiguous, (bias, h0, c0))
    given = (cell, x.contiguous(), weight_hh.contiguous(), bias, h0, c0, lengths, save)
    if resolve(backend, x, cell, max_sms) == "persistent":
        return persistent.forward(*given, max_sms)
    return gemm.forward(*given)


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
    grads = (grad_y.contiguous(), _contiguous(grad_h_n), _contiguous(grad_c_n))
    like_x = grad_y.new_empty(()).expand(*grad_y.shape[:2], weight_hh.shape[0])
    given = (cell, *grads, saved, weight_hh.contiguous(), lengths)
    if resolve(backend, like_x, cell, max_sms) == "persistent":
        return persistent.backward_data(*given, max_sms)
    return gemm.backward_data(*given)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    _, weight_hh, bias, h0, c0, lengths, *options = inputs
    y, _, _, saved = output
    ctx.options, ctx.has_bias, ctx.has_c0 = tuple(options[:3]), bias is not None, c0 is not None
    ctx.save_for_backward(y, saved, weight_hh, h0, lengths)
    ctx.mark_non_differentiable(saved)
    ctx.set_materialize_grads(False)  # most callers drop h_n and c_n: no zeros are made for them


def _gradients(
    backward_data: Callable[..., Outputs],
    ctx: Any,
    grad_y: Tensor | None,
    grad_h_n: Tensor | None,
    grad_c_n: Tensor | None,
    _grad_saved: Tensor | None,
) -> tuple[Tensor | None, ...]:
    y, saved, weight_hh, h0, lengths = ctx.saved_tensors
    cell = ctx.options[0]
    row, hidden = GATED[cell], y.shape[2]
    grad_y = torch.zeros_like(y) if grad_y is None else grad_y
    grad_c_n = grad_c_n if row.carries_c else None
    grad_x, grad_last, grad_h0, grad_c0 = backward_data(
        grad_y, grad_h_n, grad_c_n, saved, weight_hh, lengths, *ctx.options
    )
    if not row.last_apart:
        grad_last = grad_x[:, :, -hidden:]
    grad_weight, grad_bias = None, None
    if ctx.needs_input_grad[1]:
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
        grad_bias = grad_last.sum((0, 1))
    return (
        grad_x,
        grad_weight,
        grad_bias,
        None if h0 is None else grad_h0,
        grad_c0 if ctx.has_c0 else None,
        *[None] * 5,
    )


class _Eager(torch.autograd.Function):
    """The custom op below without its wrappers, which cost the host more than launching a persistent kernel does."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Outputs:
        output = _run_forward(*inputs)
        _save_for_backward(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("this cell")
        return _gradients(_run_backward_data, ctx, *grads)


_forward = torch.library.custom_op("ds2::gated_forward", _run_forward, mutates_args=())
_backward_data = torch.library.custom_op("ds2::gated_backward_data", _run_backward_data, mutates_args=())
_forward.register_autograd(functools.partial(_gradients, _backward_data), setup_context=_save_for_backward)


@_forward.register_fake
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


@_backward_data.register_fake
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


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()
