"""The recurrence as torch functions of pre-activations: arguments, checks, and which implementation runs.

Shape letters: T frames, B batch, H hidden, G gates.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ds2_ops.checks import (
    check_choice,
    check_device,
    check_lengths,
    check_like,
    check_shape,
    choose_backend,
    lengths_on,
    needs_grad,
    reverse_time,
    under_autocast,
)
from ds2_ops.jit.launch import device_index
from ds2_ops.recurrent.autograd import Sinks, eager, forward, forward_on, options_of
from ds2_ops.recurrent.backends.choose import BACKENDS, check_call, resolve, why_not_unasked
from ds2_ops.recurrent.backends.gemm import wide_dtype
from ds2_ops.recurrent.backends.persistent import problem_of, why_not
from ds2_ops.recurrent.backends.reference import Inputs, recurrence_reference
from ds2_ops.recurrent.calibrate import choose_tile
from ds2_ops.recurrent.cells import CELLS
from ds2_ops.recurrent.deferred import GradientSink

DIRECTIONS = 2
Results = tuple[Tensor, Tensor, Tensor | None]  # y, h_n, c_n


def recurrence(
    x: Tensor,
    weight_hh: Tensor,
    h0: Tensor | None = None,
    lengths: Tensor | None = None,
    *,
    cell: str = "clipped_relu",
    nonlinearity: str | None = None,
    bias_hn: Tensor | None = None,
    c0: Tensor | None = None,
    clip: float = 20.0,
    backend: str = "auto",
    max_sms: int | None = None,
    weight_sink: GradientSink | Sinks | None = None,
    bias_sink: GradientSink | Sinks | None = None,
) -> tuple[Tensor, ...]:
    """Run a recurrent cell over all frames, the recurrent weights staying on chip where the GPU allows it.

        relu, clipped_relu, tanh    h_t = f(x_t + W h_(t-1))
        lstm, gru_after, gru_before    see :func:`lstm` and :func:`gru`

    Persistent RNNs (2016), section 3, equation 2. No output, state or gradient depends on padding or on other
    utterances of the batch, and a sequence split anywhere in T, its state carried by ``h0`` (and ``c0``), gives the
    same bits as the whole one on the same backend. Differentiable in ``x``, ``weight_hh``, ``bias_hn``, ``h0`` and
    ``c0``; works under torch.autocast, torch.compile and CUDA-graph capture.

    Args:
        x: (T, B, G H) pre-activations: the input projection, normalised, with any bias, for the G gates of the cell.
            bfloat16, float16 or float32; float64 on the "cpu", "gemm" and "reference" backends. Any strides; a copy is
            made unless contiguous. (T, B, 2, G H) runs both directions over whole utterances (Deep Speech 2, section
            3.2): the second one begins at each utterance's last frame.
        weight_hh: (G H, H) in the layout of torch.nn: row i makes hidden unit i. Same dtype and device as ``x``.
            (2, G H, H) for both directions.
        h0: (B, H) state before the first frame; zeros when None. (2, B, H) for both directions.
        lengths: (B,) int32 or int64, valid frames per utterance, 0 to T, on the CPU or the device of ``x``; all T when
            None. Fastest as int32 on the device. Values on a GPU are not checked.
        cell: "relu", "clipped_relu" (min(max(z, 0), clip)), "tanh", "lstm", "gru_after" or "gru_before".
        nonlinearity: another name for ``cell``.
        bias_hn: (H,) or (2, H), bias of a GRU's last recurrent product.
        c0: first c of an LSTM, as ``h0`` but float32 (float64 where ``x`` is).
        clip: upper bound of "clipped_relu", rounded to the dtype of ``x``.
        backend: "persistent" (Hopper kernels), "gemm" (one matrix product a step), "reference" (plain autograd loop),
            "cpu", or "auto": "cpu" on a CPU, else "persistent" if it can run and "gemm" if not, logged once. "auto"
            takes no TF32 products unless they are allowed.
        max_sms: most streaming multiprocessors that the persistent kernels may occupy; all when None.
        weight_sink: receives the gradient of ``weight_hh`` in eager mode, as products to add to it; autograd then gets
            no gradient. For both directions a pair.
        bias_sink: receives the gradient of ``bias_hn`` in the same way.

    Returns:
        y (T, B, H), 0 where t >= length, and h_n (B, H), the state after each utterance's last frame (h0 for length 0);
        of an LSTM also c_n. For both directions (T, B, 2, H) and (2, B, H).

    Raises:
        ValueError: a shape, device, length, name or number that is not allowed.
        TypeError: a dtype that is not allowed.
        RuntimeError: the named backend cannot run this, with the reason.
    """
    settings = _Settings(nonlinearity or cell, clip, backend, max_sms, _all(weight_sink), _all(bias_sink))
    run = _both_directions if x.dim() == 4 else _one_direction
    y, h_n, c_n = run(settings, x, weight_hh, bias_hn, h0, c0, lengths)
    return (y, h_n) if c_n is None else (y, h_n, c_n)


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
    """Run an LSTM over all frames: :func:`recurrence` with ``cell="lstm"``.

        i, f, g, o = x_t + W_hh h_(t-1);  c_t = s(f) c_(t-1) + s(i) tanh(g);  h_t = s(o) tanh(c_t)

    with the logistic function s (GRNN, Holmes et al. 2019, section 2).

    Args:
        x: (T, B, 4 H) pre-activations, ``x W_ih^T + b_ih + b_hh`` of torch.nn, gates in its order i, f, g, o.
        weight_hh: (4 H, H), torch.nn's ``weight_hh_l0``. Same dtype and device as ``x``.
        h0: (B, H) state before frame 0, as ``x``; zeros when None.
        c0: (B, H) cell state before frame 0, float32 (float64 where ``x`` is); zeros when None.
        lengths, backend, max_sms, weight_sink: as in :func:`recurrence`.

    Returns:
        y (T, B, H), 0 where t >= length; h_n (B, H) and c_n (B, H), the states after each utterance's last frame, c_n
        in float32 (float64 where ``x`` is), so that a split in T loses nothing.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`recurrence`.
    """
    settings = _Settings("lstm", backend=backend, max_sms=max_sms, weight_sinks=_all(weight_sink))
    y, h_n, c_n = _one_direction(settings, x, weight_hh, None, h0, c0, lengths)
    assert c_n is not None
    return y, h_n, c_n


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
    """Run a GRU over all frames: :func:`recurrence` with ``cell="gru_after"`` or "gru_before".

        r = s(x_r + W_r h);  z = s(x_z + W_z h);  h' = (1 - z) n + z h
        n = tanh(x_n + r (W_n h + b))    reset_after: torch.nn, cuDNN
        n = tanh(x_n + W_n (r h) + b)    else: Cho et al. 2014, Keras' reset_after=False, ONNX' default

    Args:
        x: (T, B, 3 H) pre-activations, gates in torch.nn's order r, z, n: ``x W_ih^T + b_ih``, and the first two thirds
            of b_hh.
        weight_hh: (3 H, H), torch.nn's ``weight_hh_l0``.
        bias_hn: (H,) of the recurrent product of n, the last third of torch.nn's ``bias_hh_l0``, or None.
        h0, lengths, backend, max_sms, weight_sink, bias_sink: as in :func:`recurrence`.
        reset_after: whether the reset gate acts after the recurrent product. Before it the persistent kernels are
            for small layers: H up to 256 in 16-bit types, 96 in float32.

    Returns:
        y (T, B, H), 0 where t >= length, and h_n (B, H), the state after each utterance's last frame.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`recurrence`.
    """
    sinks = _all(weight_sink), _all(bias_sink)
    settings = _Settings("gru_after" if reset_after else "gru_before", 20.0, backend, max_sms, *sinks)
    return _one_direction(settings, x, weight_hh, bias_hn, h0, None, lengths)[:2]


def bidirectional(
    cell: str,
    x: Tensor,
    weight_hh: Tensor,
    bias_hn: Tensor | None = None,
    lengths: Tensor | None = None,
    *,
    clip: float = 20.0,
    backend: str = "auto",
    max_sms: int | None = None,
    weight_sink: Sinks | None = None,
    bias_sink: Sinks | None = None,
) -> Tensor:
    """Run a cell over whole utterances in both directions: y of :func:`recurrence`, whose arguments these are.

    Both directions run in one launch where the chip holds them together and that is faster.

    Args:
        cell: its name.
        x: (T, B, 2, G H); weight_hh: (2, G H, H); bias_hn: (2, H) or None.
        lengths, clip, backend, max_sms, weight_sink, bias_sink: as there.

    Returns:
        y (T, B, 2, H), 0 where t >= length: flattened, the output of torch.nn's bidirectional modules.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`recurrence`.
    """
    settings = _Settings(cell, clip, backend, max_sms, weight_sink, bias_sink)
    return _both_directions(settings, x, weight_hh, bias_hn, None, None, lengths)[0]


def check_tensors(
    cell: str, x: Tensor, weight_hh: Tensor, bias_hn: Tensor | None, h0: Tensor | None, c0: Tensor | None
) -> None:
    """Raise ValueError or TypeError unless the others belong to x, which is right; all as `recurrence`."""
    gates, batch, width = CELLS[cell].gates, x.shape[1], x.shape[-1]
    ways, legend = ((), "") if x.dim() == 3 else ((DIRECTIONS,), "2, ")
    hidden = width // gates
    own = weight_hh.shape[-1] if weight_hh.dim() == x.dim() - 1 == 2 else 0
    if own and weight_hh.shape == (gates * own, own) and own != hidden:
        raise ValueError(
            f"x has shape {tuple(x.shape)} and weight_hh {tuple(weight_hh.shape)}: x must be pre-activations "
            f"(T, B, {gates * own}), inputs W_ih^T + b_ih; the modules ds2_ops.RNN, LSTM and GRU take inputs"
        )
    rows = "H" if gates == 1 else f"{gates} H"
    check_shape("weight_hh", weight_hh, (*ways, width, hidden), f"({legend}{rows}, H)")
    check_like("weight_hh", weight_hh, x)
    if h0 is not None:
        check_shape("h0", h0, (*ways, batch, hidden), f"({legend}B, H)")
        check_like("h0", h0, x)
    if bias_hn is not None:
        if not cell.startswith("gru"):
            raise ValueError(f"cell {cell!r} has no bias_hn, only a GRU has: add the bias to x")
        check_shape("bias_hn", bias_hn, (*ways, hidden), "(2, H)" if ways else "(H,)")
        check_like("bias_hn", bias_hn, x)
    if c0 is not None:
        if not CELLS[cell].carries_c:
            raise ValueError(f"cell {cell!r} has no c0, only an LSTM has: leave it out")
        check_shape("c0", c0, (*ways, batch, hidden), f"({legend}B, H)")
        if c0.dtype != wide_dtype(x):
            raise TypeError(f"c0 is {c0.dtype}, expected {wide_dtype(x)}: the cell state is never rounded to {x.dtype}")
        check_device("c0", c0, x)


class _Settings(NamedTuple):
    """The arguments of :func:`recurrence` that are no tensors, and the sinks of each direction."""

    cell: str
    clip: float = 20.0
    backend: str = "auto"
    max_sms: int | None = None
    weight_sinks: Sinks | None = None
    bias_sinks: Sinks | None = None


def _all(sink: GradientSink | Sinks | None) -> Sinks | None:
    return sink if sink is None or isinstance(sink, Sequence) else (sink,)


def _one_direction(
    settings: _Settings, x: Tensor, weight_hh: Tensor, bias_hn: Tensor | None, h0: Tensor | None, c0: Tensor | None,
    lengths: Tensor | None,
) -> Results:  # fmt: skip
    cell, clip, backend, max_sms = settings[:4]
    x, weight_hh, bias_hn, h0 = under_autocast(x, weight_hh, bias_hn, h0)  # type: ignore[assignment]
    compiling = torch.compiler.is_compiling()
    if compiling:
        check_call(backend, x.shape, x.dtype, cell, max_sms)
    else:
        chosen = resolve(backend, x, cell, max_sms)
    if not 0.0 < clip < math.inf and CELLS[cell].takes_clip:
        raise ValueError(f"clip is {clip}, allowed is a positive finite number; for no bound use cell='relu'")
    check_tensors(cell, x, weight_hh, bias_hn, h0, c0)
    if lengths is not None:
        check_lengths(lengths, x.shape[1])
        if not compiling or backend == "reference":
            lengths = lengths_on(lengths, x.shape[0], x.device)
    if backend == "reference":
        narrow = None if c0 is None else c0.to(x.dtype)
        y, h_n, *last = recurrence_reference(
            x, weight_hh, h0, lengths, cell=cell, bias_hn=bias_hn, c0=narrow, clip=clip
        )
        return y, h_n, last[0].to(wide_dtype(x)) if last else None
    tensors = (x, weight_hh, bias_hn, h0, c0, lengths)
    if not compiling:
        return _run(chosen, settings, tensors)
    y, h_n, c_n, _ = forward(*tensors, *settings[:4], needs_grad(*tensors[:5]))
    return y, h_n, c_n if CELLS[cell].carries_c else None


def _run(backend: str, settings: _Settings, tensors: Inputs) -> Results:
    """Run eagerly on a backend that `resolve` returned."""
    options = options_of(settings.cell, settings.clip, settings.max_sms, tensors[0].dtype)
    if needs_grad(*tensors[:5]):
        return eager(backend, options, settings.weight_sinks, settings.bias_sinks, *tensors)
    return forward_on(backend, options, tensors, save=False)[:3]


def _both_directions(
    settings: _Settings, x: Tensor, weight_hh: Tensor, bias_hn: Tensor | None, h0: Tensor | None, c0: Tensor | None,
    lengths: Tensor | None,
) -> Results:  # fmt: skip
    cell, _, backend, max_sms, *_ = settings
    check_choice("cell", cell, tuple(CELLS))
    check_choice("backend", backend, BACKENDS)
    x, weight_hh, bias_hn, h0 = under_autocast(x, weight_hh, bias_hn, h0)  # type: ignore[assignment]
    gates = CELLS[cell].gates
    if x.dim() != 4 or x.shape[2] != DIRECTIONS or x.shape[3] % gates:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected (T, B, 2, {gates} H): a row a frame and direction")
    check_tensors(cell, x, weight_hh, bias_hn, h0, c0)
    hidden = x.shape[3] // gates
    check_lengths(lengths, x.shape[1])
    if not torch.compiler.is_compiling() and in_one_launch(cell, x, hidden, backend, max_sms):
        facts = (hidden, cell, x.dtype, x.device)
        choose_backend(backend, "persistent", "gemm", None, "both directions of H %d %s %s on %s", *facts)
        lengths = lengths_on(lengths, x.shape[0], x.device)
        h, c = (None if state is None else state.transpose(0, 1) for state in (h0, c0))
        y, h_n, c_n = _run("persistent", settings, (x, weight_hh, bias_hn, h, c, lengths))
        return y, h_n.transpose(0, 1), None if c_n is None else c_n.transpose(0, 1)

    def run(z: Tensor, way: int) -> Results:
        bias, h, c = (None if t is None else t[way] for t in (bias_hn, h0, c0))
        weight_sinks, bias_sinks = (None if pair is None else pair[way : way + 1] for pair in settings[4:])
        own = settings._replace(weight_sinks=weight_sinks, bias_sinks=bias_sinks)
        return _one_direction(own, z, weight_hh[way], bias, h, c, lengths)

    reverse, h_reverse, c_reverse = run(reverse_time(x[:, :, 1], lengths), 1)
    y, h_n, c_n = run(x[:, :, 0], 0)
    both = torch.stack([y, reverse_time(reverse, lengths)], dim=2)
    c = None if c_n is None or c_reverse is None else torch.stack([c_n, c_reverse])
    return both, torch.stack([h_n, h_reverse]), c


def in_one_launch(cell: str, x: Tensor, hidden: int, backend: str, max_sms: int | None) -> bool:
    """Whether one launch runs both directions."""
    if x.device.type != "cuda" or x.numel() == 0 or backend not in ("auto", "persistent") or cell == "gru_before":
        return False
    if backend == "auto" and why_not_unasked(x.dtype, torch.get_float32_matmul_precision()):
        return False
    if why_not(*x.shape[:2], hidden, x.dtype, x.device, cell, max_sms, DIRECTIONS):
        return False
    return _pays(x.shape[1], hidden, x.dtype, cell, device_index(x.device), max_sms)


@functools.lru_cache(maxsize=1024)
def _pays(batch: int, hidden: int, dtype: torch.dtype, cell: str, index: int, max_sms: int | None) -> bool:
    """Whether the planner expects both passes to be faster than those of one direction after the other."""

    def step_us(directions: int) -> float:
        problems = (problem_of(batch, hidden, dtype, cell, backward, directions) for backward in (False, True))
        return sum(choose_tile(problem, index, max_sms).step_us for problem in problems)

    return step_us(DIRECTIONS) <= DIRECTIONS * step_us(1)
