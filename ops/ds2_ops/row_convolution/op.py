"""Row convolution: each feature sees itself and the next tau frames, so a one-directional network can look ahead.

Shape letters: T frames, B batch, H hidden, K = tau + 1 taps.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ds2_ops.checks import check_choice, check_like, check_x, refuse_second_derivative, take_fastest, under_autocast
from ds2_ops.lengths import check_lengths, lengths_on
from ds2_ops.row_convolution import shift
from ds2_ops.row_convolution.reference import lookahead_reference

BACKENDS = ("auto", "triton", "shift", "reference")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


Sink = Callable[[Callable[[], Tensor]], None]


def lookahead(
    x: Tensor,
    weight: Tensor,
    lengths: Tensor | None = None,
    *,
    backend: str = "auto",
    sink: Sink | None = None,
) -> Tensor:
    """Compute the row convolution r_t = sum over j = 0..tau of w_j * h_(t+j), for each feature on its own.

    Deep Speech 2 (2015), row convolution. Frames past an utterance's length count as 0, so no output or gradient
    depends on padding or on other utterances of the batch. Differentiable in ``x`` and ``weight``.

    Args:
        x: (T, B, H) features; bfloat16, float16, float32 or float64. Any strides; a copy is made unless contiguous.
        weight: (H, K), K = tau + 1 taps, ``weight[:, j]`` for the frame j ahead. Same dtype and device as ``x``.
        lengths: (B,) int32 or int64, valid frames per utterance, 0 to T, on the CPU or the device of ``x``; all T when
            None. Best int32 on the device: never read back, so values there are the caller's promise.
        backend: "triton" (CUDA), "shift" (K shifted multiply-adds, any device), "reference" (plain autograd), or
            "auto": "triton" where it can run, else "shift"; logged once on a GPU.
        sink: takes the gradient of ``weight`` in eager mode: is given what makes it, (H, K) in float32 where the Triton
            kernels ran, to be called when it suits; autograd then gets none.

    Returns:
        y (T, B, H), 0 where t >= length.

    Raises:
        ValueError: a shape, device, length or name that is not allowed.
        TypeError: a dtype that is not allowed.
        RuntimeError: a backend asked for by name cannot run this, with the reason.
    """
    check_choice("backend", backend, BACKENDS)
    x, weight = under_autocast(x, weight)  # type: ignore[assignment]
    check_x(x, _DTYPES)
    if weight.dim() != 2 or weight.shape[0] != x.shape[2] or weight.shape[1] < 1:
        raise ValueError(f"weight has shape {tuple(weight.shape)}, expected (H, tau + 1) with H = {x.shape[2]}")
    check_like("weight", weight, x)
    if lengths is not None:
        check_lengths(lengths, x.shape[1])
    if backend == "reference":
        return lookahead_reference(x, weight, lengths_on(lengths, x.shape[0], x.device))
    op: Callable[..., Tensor] = _forward
    if not torch.compiler.is_compiling():
        op = functools.partial(_EagerLookahead.apply, sink)
    return op(x, weight, lengths, backend)


def _run_forward(x: Tensor, weight: Tensor, lengths: Tensor | None, backend: str) -> Tensor:
    lengths = lengths_on(lengths, x.shape[0], x.device)
    x, weight = x.contiguous(), weight.contiguous()
    if _resolve(backend, x, weight) == "triton":
        from ds2_ops.row_convolution import triton_kernels

        return triton_kernels.forward(x, weight, lengths)
    return shift.forward(x, weight, lengths)


def _run_backward(
    grad_y: Tensor, x: Tensor, weight: Tensor, lengths: Tensor | None, backend: str
) -> tuple[Tensor, Tensor]:
    grad_x, make = _backward_in_parts(grad_y, x, weight, lengths, backend)
    return grad_x, make().contiguous().to(weight.dtype)


def _backward_in_parts(
    grad_y: Tensor, x: Tensor, weight: Tensor, lengths: Tensor | None, backend: str
) -> tuple[Tensor, Callable[[], Tensor]]:
    lengths = lengths_on(lengths, x.shape[0], x.device)
    grad_y, x, weight = grad_y.contiguous(), x.contiguous(), weight.contiguous()
    if _resolve(backend, x, weight) == "triton":
        from ds2_ops.row_convolution import triton_kernels

        return triton_kernels.backward(grad_y, x, weight, lengths)
    grad_x, grad_weight = shift.backward(grad_y, x, weight, lengths)
    return grad_x, lambda: grad_weight


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, lengths, ctx.backend = inputs
    ctx.save_for_backward(x, weight, lengths)


def _gradients(
    backward: Callable[..., tuple[Tensor, Tensor]], ctx: Any, grad_y: Tensor
) -> tuple[Tensor, Tensor, None, None]:
    x, weight, lengths = ctx.saved_tensors
    grad_x, grad_weight = backward(grad_y, x, weight, lengths, ctx.backend)
    return grad_x, grad_weight, None, None


class _EagerLookahead(torch.autograd.Function):
    """The custom op below without its wrappers, which cost the host more than launching the kernel does."""

    @staticmethod
    def forward(ctx: Any, sink: Sink | None, *inputs: Any) -> Tensor:
        y = _run_forward(*inputs)
        _save_for_backward(ctx, inputs, y)
        ctx.sink = sink
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("lookahead")
        if ctx.sink is None or not ctx.needs_input_grad[2]:
            return None, *_gradients(_run_backward, ctx, grad_y)
        x, weight, lengths = ctx.saved_tensors
        grad_x, make = _backward_in_parts(grad_y, x, weight, lengths, ctx.backend)
        ctx.sink(make)
        return None, grad_x, None, None, None


_forward = torch.library.custom_op("ds2::lookahead_forward", _run_forward, mutates_args=())
_backward = torch.library.custom_op("ds2::lookahead_backward", _run_backward, mutates_args=())
_forward.register_autograd(functools.partial(_gradients, _backward), setup_context=_save_for_backward)


@_forward.register_fake
def _(x: Tensor, *args: Any) -> Tensor:
    return x.new_empty(x.shape)


@_backward.register_fake
def _(grad_y: Tensor, x: Tensor, weight: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _resolve(backend: str, x: Tensor, weight: Tensor) -> str:
    """Turn "auto" into a backend that runs; raise RuntimeError where a named one cannot."""
    if backend == "shift" or (backend == "auto" and x.device.type == "cpu"):
        return "shift"
    reason = _why_not_triton(x, weight)
    way_out = "; use backend='shift' or 'auto'"
    return take_fastest(backend, "triton", "shift", reason, "lookahead %s on %s", x.dtype, x.device, way_out=way_out)


def _why_not_triton(x: Tensor, weight: Tensor) -> str | None:
    if x.device.type != "cuda":
        return f"x is on {x.device}, the Triton kernels need a CUDA GPU"
    if x.dtype == torch.float64:
        return "x is torch.float64, the Triton kernels sum in float32"
    try:
        from ds2_ops.row_convolution import triton_kernels
    except ImportError as error:
        return f"{error}; pip install triton"
    if weight.shape[1] > triton_kernels.MAX_TAPS:
        return f"weight has {weight.shape[1]} taps, the Triton kernels hold at most {triton_kernels.MAX_TAPS}"
    return None
