"""A recurrent layer for inference, projection and recurrence, whose kernels overlap where they can.

Shape letters: T frames, B batch, K width of the input, H hidden.
"""

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn import functional

from ds2_ops.checks import check_like, check_shape, check_x
from ds2_ops.jit.launch import device_index
from ds2_ops.jit.runtime import capability
from ds2_ops.lengths import lengths_on
from ds2_ops.recurrent import persistent, projection
from ds2_ops.recurrent.backends import resolve
from ds2_ops.recurrent.gated.op import lstm
from ds2_ops.recurrent.plan.problem import Problem
from ds2_ops.recurrent.planned import plan_for
from ds2_ops.recurrent.rnn import options_of, recurrence


@torch.no_grad()
def recurrent_layer(
    x: Tensor,
    weight_ih: Tensor,
    bias: Tensor,
    weight_hh: Tensor,
    h0: Tensor | None = None,
    lengths: Tensor | None = None,
    begin: Tensor | None = None,
    *,
    nonlinearity: str = "clipped_relu",
    clip: float = 20.0,
    backend: str = "auto",
    max_sms: int | None = None,
    aside: torch.cuda.Stream | None = None,
) -> tuple[Tensor, Tensor]:
    """Run h_t = f(W_ih x_t + b + W_hh h_(t-1)) (Persistent RNNs, 2016, section 3, equation 2) without gradients.

    On the persistent kernels and up to `projection.MOST_ROWS` rows T B, both kernels load their weights while those
    before them on the stream still run (programmatic dependent launch), launched plainly or recorded in a CUDA graph.
    So the weights must be older than the kernels of this function that are still under way. The bits of an utterance
    then depend neither on its batch nor on how its frames are cut (`ds2_ops.recurrent.planned.plan_for`).

    Args:
        x: (T, B, K).
        weight_ih: (H, K); bias: (H,); weight_hh: (H, H). Same dtype and device as ``x``.
        h0, lengths, nonlinearity, clip, backend, max_sms: as :func:`ds2_ops.recurrence`.
        begin: (B,) int32 on the device, the frame before which W_ih x_t + b counts as 0; all 0 when None.
        aside: where layers on other streams share the GPU, a stream for the projection, on which ``x`` is there; the
            current one need not have it. The projection leaves the other layers their multiprocessors.

    Returns:
        y (T, B, H) and h_n (B, H), as :func:`ds2_ops.recurrence`.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`ds2_ops.recurrence`.
    """
    _check_projection(x, weight_ih, bias, "H")
    hidden = len(weight_ih)
    check_shape("weight_hh", weight_hh, (hidden, hidden), "(H, H)")
    overlaps = _overlaps(x, weight_ih, backend, nonlinearity, max_sms)
    with nullcontext() if aside is None else torch.cuda.stream(aside):
        x = x.contiguous()
        if overlaps:
            z = projection.project(x, weight_ih, bias, begin, beside=aside is not None)
        else:
            z = projected(x, weight_ih, bias, begin)
    if aside is not None:
        here = torch.cuda.current_stream(x.device)
        here.wait_stream(aside)
        z.record_stream(here)
    if overlaps:
        options = options_of(nonlinearity, clip, max_sms, x.dtype, early=True)
        h0 = None if h0 is None else h0.contiguous()
        return persistent.forward(z, weight_hh.contiguous(), h0, lengths_on(lengths, len(x), x.device), options)
    return recurrence(z, weight_hh, h0, lengths, nonlinearity=nonlinearity, clip=clip, backend=backend, max_sms=max_sms)


@torch.no_grad()
def lstm_layer(
    x: Tensor,
    weight_ih: Tensor,
    bias: Tensor,
    weight_hh: Tensor,
    h0: Tensor | None = None,
    c0: Tensor | None = None,
    lengths: Tensor | None = None,
    begin: Tensor | None = None,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Run :func:`ds2_ops.lstm` on W_ih x_t + b without gradients.

    Args:
        x: (T, B, K).
        weight_ih: (4 H, K); bias: (4 H,); weight_hh: (4 H, H). Same dtype and device as ``x``; older than the kernels
            of this function that are still under way, as for :func:`recurrent_layer`.
        h0, c0, lengths, backend: as :func:`ds2_ops.lstm`.
        begin: (B,) int32 on the device, the frame before which W_ih x_t + b counts as 0, which leaves states that are 0
            so; all 0 when None.

    Returns:
        y (T, B, H), h_n and c_n (B, H), as :func:`ds2_ops.lstm`.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`ds2_ops.lstm`.
    """
    _check_projection(x, weight_ih, bias, "4 H")
    z = projected(x.contiguous(), weight_ih, bias, begin)
    return lstm(z, weight_hh, h0, c0, lengths, backend=backend)


def _check_projection(x: Tensor, weight_ih: Tensor, bias: Tensor, rows: str) -> None:
    """Check x (T, B, K), weight_ih (rows, K) and bias (rows,); `rows` is what messages call them."""
    check_x(x, (torch.bfloat16, torch.float16, torch.float32, torch.float64))
    check_shape("weight_ih", weight_ih, (weight_ih.shape[0], x.shape[2]), f"({rows}, K)")
    check_shape("bias", bias, (weight_ih.shape[0],), f"({rows},)")
    for name, tensor in (("weight_ih", weight_ih), ("bias", bias)):
        check_like(name, tensor, x)


@torch.no_grad()
def projected(x: Tensor, weight: Tensor, bias: Tensor, begin: Tensor | None) -> Tensor:
    """Compute W x + b without gradients, 0 before each utterance's first frame.

    On a Hopper GPU in 16-bit types, up to `projection.MOST_ROWS` rows T B, its bits do not depend on T and B.

    Args:
        x: (T, B, K) contiguous.
        weight: (H, K); bias: (H,); older than the kernels that are still under way.
        begin: (B,) int32 first frames on the device, or None for 0.

    Returns:
        (T, B, H).
    """
    hopper = x.is_cuda and capability(device_index(x.device)) >= (9, 0)
    if hopper and projection.why_not(x, weight) is None:
        return projection.project(x, weight, bias, begin)
    z = functional.linear(x, weight, bias)
    return z if begin is None else z * (torch.arange(len(x), device=x.device)[:, None] >= begin)[:, :, None]


def why_not_beside(
    batch: int, hidden: int, dtype: torch.dtype, device: torch.device, nonlinearity: str, max_sms: int
) -> str | None:
    """Say why recurrences do not run beside each other, on so many multiprocessors each; None if they do."""
    reason = persistent.why_not(1, batch, hidden, dtype, device, nonlinearity, max_sms)
    if reason is None:
        problem = Problem(batch, hidden, str(dtype).removeprefix("torch."), nonlinearity, backward=False)
        if plan_for(problem, device_index(device), max_sms, True).launch.cooperative:
            reason = f"recurrences of {hidden} units and {batch} utterances wait for a whole chip"
    return reason


def _overlaps(x: Tensor, weight_ih: Tensor, backend: str, nonlinearity: str, max_sms: int | None) -> bool:
    if not x.is_cuda or projection.why_not(x, weight_ih) is not None:
        return False
    hidden = weight_ih.shape[0]
    problem = Problem(x.shape[1], hidden, persistent.dtype_name(x), nonlinearity, backward=False)
    pre_activations = x[..., :1].expand(-1, -1, hidden)
    if resolve(backend, pre_activations, nonlinearity, max_sms) != "persistent":
        return False
    return plan_for(problem, device_index(x.device), max_sms, True).design == "cluster"
