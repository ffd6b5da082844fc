"""LSTM and GRU as torch ops: what is given, and how it is checked; ``autograd`` runs it.

Shape letters: T frames, B batch, H hidden, G gates.
"""

from typing import Any

import torch
from torch import Tensor

from ds2_ops.checks import check_like, check_shape, needs_grad, under_autocast
from ds2_ops.lengths import check_lengths, lengths_on
from ds2_ops.recurrent.backends import check_call, settle
from ds2_ops.recurrent.cells import GATED
from ds2_ops.recurrent.deferred import GradientSink
from ds2_ops.recurrent.gated.autograd import eager, forward, forward_on
from ds2_ops.recurrent.gated.gemm import wide_dtype
from ds2_ops.recurrent.gated.reference import gated_reference


def lstm(
    x: Tensor,
    weight_hh: Tensor,
    h0: Tensor | None = None,
    c0: Tensor | None = None,
    lengths: Tensor | None = None,
    *,
    backend: str = "auto",
    max_sms: int | None = None,
    weight_sink: GradientSink | None = None,
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
        lengths, backend, max_sms, weight_sink: as in :func:`ds2_ops.recurrence`.

    Returns:
        y (T, B, H), 0 where t >= length; h_n (B, H) and c_n (B, H), the states after each utterance's last frame, c_n
        in float32 (float64 where ``x`` is), so that a split in T loses nothing.

    Raises:
        ValueError: a shape, device, length, name or number that is not allowed.
        TypeError: a dtype that is not allowed.
        RuntimeError: a backend asked for by name cannot run this, with the reason.
    """
    sinks: dict[str, Any] = {"weight_sink": weight_sink}
    return gated("lstm", x, weight_hh, None, h0, c0, lengths, backend=backend, max_sms=max_sms, **sinks)


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
    weight_sink: GradientSink | None = None,
    bias_sink: GradientSink | None = None,
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
        weight_sink, bias_sink: take the gradients of ``weight_hh`` and ``bias_hn``, as in :func:`ds2_ops.recurrence`.

    Returns:
        y (T, B, H), 0 where t >= length, and h_n (B, H), the state after each utterance's last frame.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`lstm`.
    """
    cell = "gru_after" if reset_after else "gru_before"
    sinks: dict[str, Any] = {"weight_sink": weight_sink, "bias_sink": bias_sink}
    return gated(cell, x, weight_hh, bias_hn, h0, None, lengths, backend=backend, max_sms=max_sms, **sinks)[:2]


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
    weight_sink: GradientSink | None = None,
    bias_sink: GradientSink | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a cell of ``cells.GATED``: what :func:`lstm` and :func:`gru` are made of. Returns and raises as :func:`lstm`.

    Args:
        cell: its name; G is its number of gates.
        x: (T, B, G H); weight_hh: (G H, H); bias: (H,) of the last gate's recurrent product, or None.
        h0, c0, lengths, backend, max_sms: as in :func:`lstm`; c0 is None, and c_n empty (0), where the cell has no c.
    """
    x, weight_hh, bias, h0 = under_autocast(x, weight_hh, bias, h0)  # type: ignore[assignment]
    compiling = torch.compiler.is_compiling()
    if compiling:
        check_call("cell", cell, x.shape, x.dtype, backend, max_sms)
    else:
        chosen = settle("cell", cell, x, backend, max_sms)
    check_tensors(cell, x, weight_hh, bias, h0, c0)
    if lengths is not None:
        check_lengths(lengths, x.shape[1])
        if not compiling or backend == "reference":
            lengths = lengths_on(lengths, x.shape[0], x.device)
    if backend == "reference":
        narrow = None if c0 is None else c0.to(x.dtype)
        y, h_n, c_n = gated_reference(cell, x, weight_hh, bias, h0, narrow, lengths)
        return y, h_n, c_n.to(wide_dtype(x))
    save = needs_grad(x, weight_hh, bias, h0, c0)
    if compiling:
        y, h_n, c_n, _ = forward(x, weight_hh, bias, h0, c0, lengths, cell, backend, max_sms, save)
    elif save:
        y, h_n, c_n = eager(x, weight_hh, bias, h0, c0, lengths, cell, chosen, max_sms, weight_sink, bias_sink)
    else:
        y, h_n, c_n, _ = forward_on(False, x, weight_hh, bias, h0, c0, lengths, cell, chosen, max_sms)
    return y, h_n, c_n


def check_tensors(
    cell: str, x: Tensor, weight_hh: Tensor, bias: Tensor | None, h0: Tensor | None, c0: Tensor | None
) -> None:
    """Raise ValueError or TypeError unless the others belong to x, which is right; all as of `gated`."""
    gates, (_, batch, width) = GATED[cell].gates, x.shape
    hidden = width // gates
    check_shape("weight_hh", weight_hh, (width, hidden), f"({gates} H, H)")
    check_like("weight_hh", weight_hh, x)
    if bias is not None:
        check_shape("bias_hn", bias, (hidden,), "(H,)")
        check_like("bias_hn", bias, x)
    if h0 is not None:
        check_shape("h0", h0, (batch, hidden), "(B, H)")
        check_like("h0", h0, x)
    if c0 is not None:
        check_shape("c0", c0, (batch, hidden), "(B, H)")
        if c0.dtype != wide_dtype(x):
            raise TypeError(f"c0 is {c0.dtype}, expected {wide_dtype(x)}: the cell state is never rounded to {x.dtype}")
        if c0.device != x.device:
            raise ValueError(f"c0 is on {c0.device} but x is on {x.device}: move one with .to(device)")
