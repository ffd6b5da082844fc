"""Both directions of a recurrent layer over whole utterances, in one launch where the chip holds them together.

The backward direction hears every utterance from its own last frame on. On chip the rows of both directions alternate
in every array, so that a projection by both matrices is one product, and y is that of torch.nn.
Shape letters: T frames, B batch, H hidden, G gates.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ds2_ops.checks import check_choice, check_like, check_shape, refuse_second_derivative, take_fastest, under_autocast
from ds2_ops.jit.launch import device_index
from ds2_ops.lengths import check_lengths, lengths_on, turned
from ds2_ops.recurrent.backends import BACKENDS, why_not_unasked
from ds2_ops.recurrent.cells import ALL, GATED
from ds2_ops.recurrent.deferred import GradientSink
from ds2_ops.recurrent.gated.op import gated
from ds2_ops.recurrent.persistent import dtype_name, launch_pass, problem_of, why_not
from ds2_ops.recurrent.plan.problem import Problem
from ds2_ops.recurrent.planned import plan_for
from ds2_ops.recurrent.rnn import options_of, recurrence
from ds2_ops.recurrent.weights import add_frame_products, add_frame_sums, frame_products

WAYS = 2


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
    weight_sink: Sequence[GradientSink] | None = None,
    bias_sink: Sequence[GradientSink] | None = None,
) -> Tensor:
    """Run a cell over whole utterances in both directions, both at once where that pays.

    The equations are those of :func:`ds2_ops.recurrence`, :func:`ds2_ops.lstm` and :func:`ds2_ops.gru` (Deep Speech 2,
    section 3.2), the second direction on frames in reverse order, utterance by utterance. Each direction begins at
    zeros. No result depends on padding or on batch-mates. Differentiable in ``x``, ``weight_hh`` and ``bias_hn``.

    Args:
        cell: a name in ``cells.ALL``: "relu", "clipped_relu", "tanh", "lstm", "gru_after", "gru_before".
        x: (T, B, 2, G H) pre-activations of the forward and the backward direction, frame by frame as they were heard;
            dtypes as of those ops.
        weight_hh: (2, G H, H).
        bias_hn: (2, H) of a GRU's last recurrent product, or None.
        lengths: (B,) int32 or int64 frames of each utterance, or None for T.
        clip: of "clipped_relu".
        backend, max_sms: as in :func:`ds2_ops.recurrence`. "persistent" runs both directions in one launch, or one
            after the other.
        weight_sink, bias_sink: as in :func:`ds2_ops.recurrence`, one for each direction.

    Returns:
        y (T, B, 2, H), 0 where t >= length: flattened, what torch.nn's bidirectional modules give.

    Raises:
        ValueError, TypeError, RuntimeError: as those ops.
    """
    check_choice("cell", cell, tuple(ALL))
    check_choice("backend", backend, BACKENDS)
    x, weight_hh, bias_hn = under_autocast(x, weight_hh, bias_hn)  # type: ignore[assignment]
    gates = ALL[cell].gates
    if x.dim() != 4 or x.shape[2] != WAYS or x.shape[3] % gates:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected (T, B, 2, {gates} H): a row a frame and direction")
    hidden = x.shape[3] // gates
    check_shape("weight_hh", weight_hh, (WAYS, gates * hidden, hidden), f"(2, {gates} H, H)")
    check_like("weight_hh", weight_hh, x)
    if bias_hn is not None:
        check_shape("bias_hn", bias_hn, (WAYS, hidden), "(2, H)")
        check_like("bias_hn", bias_hn, x)
    if lengths is not None:
        check_lengths(lengths, x.shape[1])
    if not torch.compiler.is_compiling() and _together(cell, x, hidden, backend, max_sms):
        facts = (hidden, cell, x.dtype, x.device)
        take_fastest(backend, "persistent", "gemm", None, "both directions of H %d %s %s on %s", *facts)
        lengths = lengths_on(lengths, x.shape[0], x.device)
        save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight_hh, bias_hn))
        run = _Together.apply if save else forward
        sinks = (weight_sink, bias_sink) if save else ()
        y: Tensor = run(x, weight_hh, bias_hn, lengths, cell, clip, max_sms, save, *sinks)[0]
        return y
    return _one_after_the_other(cell, x, weight_hh, bias_hn, lengths, clip, backend, max_sms, weight_sink, bias_sink)


def _together(cell: str, x: Tensor, hidden: int, backend: str, max_sms: int | None) -> bool:
    """Whether one launch runs both directions."""
    if x.device.type != "cuda" or x.numel() == 0 or backend not in ("auto", "persistent") or cell == "gru_before":
        return False
    if backend == "auto" and why_not_unasked(x.dtype, torch.get_float32_matmul_precision()):
        return False
    if why_not(*x.shape[:2], hidden, x.dtype, x.device, cell, max_sms, WAYS):
        return False
    return _pays(x.shape[1], hidden, dtype_name(x), cell, device_index(x.device), max_sms)


@functools.lru_cache(maxsize=1024)
def _pays(batch: int, hidden: int, dtype: str, cell: str, index: int, max_sms: int | None) -> bool:
    """Whether the planner expects both passes to be faster than those of one direction after the other."""
    passes = [Problem(batch, hidden, dtype, cell, backward) for backward in (False, True)]
    apart = sum(plan_for(one, index, max_sms).step_us for one in passes)
    both = sum(plan_for(one._replace(directions=WAYS), index, max_sms).step_us for one in passes)
    return both <= WAYS * apart


def _one_after_the_other(
    cell: str,
    x: Tensor,
    weight_hh: Tensor,
    bias_hn: Tensor | None,
    lengths: Tensor | None,
    clip: float,
    backend: str,
    max_sms: int | None,
    weight_sink: Sequence[GradientSink] | None,
    bias_sink: Sequence[GradientSink] | None,
) -> Tensor:
    def run(z: Tensor, way: int) -> Tensor:
        options: dict[str, Any] = {"backend": backend, "max_sms": max_sms}
        options["weight_sink"] = None if weight_sink is None else weight_sink[way]
        if cell in GATED:
            bias = None if bias_hn is None else bias_hn[way]
            options["bias_sink"] = None if bias_sink is None else bias_sink[way]
            return gated(cell, z, weight_hh[way], bias, None, None, lengths, **options)[0]
        options |= {"nonlinearity": cell, "clip": clip}
        return recurrence(z, weight_hh[way], None, lengths, **options)[0]

    backward = turned(run(turned(x[:, :, 1], lengths), 1), lengths)
    return torch.stack([run(x[:, :, 0], 0), backward], dim=2)


def forward(
    x: Tensor,
    weight_hh: Tensor,
    bias_hn: Tensor | None,
    lengths: Tensor | None,
    cell: str,
    clip: float,
    max_sms: int | None,
    save: bool,
) -> tuple[Tensor, Tensor | None]:
    """Run both directions forward in one launch.

    Args:
        x, weight_hh, bias_hn, lengths, clip, max_sms: as :func:`bidirectional`, on one GPU.
        cell: a name in ``cells.ALL``.
        save: whether a backward pass will follow.

    Returns:
        y (T, B, 2, H), and what backward needs of a cell with gates, (T, B, 2, S, H), empty unless asked for.
    """
    x, weight_hh = x.contiguous(), weight_hh.contiguous()
    frames, batch, _, _ = x.shape
    hidden, row = weight_hh.shape[2], ALL[cell]
    y, last = x.new_empty(frames, batch, WAYS, hidden), x.new_empty(batch, WAYS, hidden)
    saved: Tensor | None = None
    of_gates: tuple[Tensor | None, ...] = ()
    if cell in GATED:
        saved = x.new_empty((frames, batch, WAYS, row.saved, hidden) if save else 0)
        c_n = last.new_empty(last.shape if row.carries_c else 0, dtype=torch.float32)
        bias = None if bias_hn is None else bias_hn.contiguous()
        of_gates = (saved if save else None, bias, None, c_n, None)
    problem = problem_of(batch, hidden, x.dtype, cell, False, WAYS)
    options = options_of(cell, clip, max_sms, x.dtype)
    tensors = (x, None, weight_hh, None, lengths, y, last)
    launch_pass(f"{cell} forward in both directions", problem, frames, tensors, options, of_gates)
    return y, saved


def backward_data(
    grad_y: Tensor,
    y: Tensor,
    saved: Tensor | None,
    weight_hh: Tensor,
    lengths: Tensor | None,
    cell: str,
    clip: float,
    max_sms: int | None,
) -> tuple[Tensor, Tensor]:
    """Run both directions backwards in one launch.

    Args:
        grad_y: (T, B, 2, H).
        y, saved: as ``forward`` returned them.
        weight_hh, lengths, cell, clip, max_sms: as ``forward``.

    Returns:
        Gradients of x, (T, B, 2, G H), and of the last gate's recurrent product, (T, B, 2, H), which is the same
        tensor's end where it is x's.
    """
    grad_y = grad_y.contiguous()
    frames, batch, _, hidden = grad_y.shape
    row = ALL[cell]
    grad_x = grad_y.new_empty(frames, batch, WAYS, row.gates * hidden)
    grad_last = grad_y.new_empty(grad_y.shape) if row.last_apart else grad_x[..., -hidden:]
    grad_h0 = grad_y.new_empty(batch, WAYS, hidden)
    of_gates: tuple[Tensor | None, ...] = ()
    if cell in GATED:
        grad_c0 = grad_h0.new_empty(grad_h0.shape if row.carries_c else 0, dtype=torch.float32)
        of_gates = (saved, None, None, grad_c0, grad_last if row.last_apart else None)
    problem = problem_of(batch, hidden, grad_y.dtype, cell, True, WAYS)
    options = options_of(cell, clip, max_sms, grad_y.dtype)
    output_y = None if cell in GATED else y
    tensors = (grad_y, output_y, weight_hh.transpose(1, 2).contiguous(), None, lengths, grad_x, grad_h0)
    launch_pass(f"{cell} backward_data in both directions", problem, frames, tensors, options, of_gates)
    return grad_x, grad_last


def _factors(cell: str, grad_x: Tensor, grad_last: Tensor, y: Tensor) -> list[list[tuple[Tensor, Tensor]]]:
    """What dW is the product of, by direction and part of its rows.

    The frame before is the next one where time runs backwards, and 0 past the end.
    """
    parts = [grad_x[..., : -y.shape[3]], grad_last] if ALL[cell].last_apart else [grad_x]
    before, after = slice(None, -1), slice(1, None)
    ways = ((0, after, before), (1, before, after))
    return [[(g[at, :, way], y[previous, :, way]) for g in parts] for way, at, previous in ways]


def _add_backward_weights(sinks: Sequence[GradientSink], factors: list[list[tuple[Tensor, Tensor]]]) -> None:
    for sink, parts in zip(sinks, factors, strict=True):
        start = 0
        for grad, previous in parts:
            stop = start + grad.shape[2]
            add_frame_products(sink.rows(start, stop), grad, previous)
            start = stop


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor]:
        *inputs, weight_sink, bias_sink = inputs  # type: ignore[assignment]
        _, weight_hh, bias_hn, lengths, *options, _ = inputs
        y, saved = forward(*inputs)
        ctx.sinks = weight_sink, bias_sink
        ctx.options, ctx.has_bias = options, bias_hn is not None
        ctx.save_for_backward(y, saved, weight_hh, lengths)
        return (y,)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("bidirectional")
        y, saved, weight_hh, lengths = ctx.saved_tensors
        grad_x, grad_last = backward_data(grad_y, y, saved, weight_hh, lengths, *ctx.options)
        weight_sink, bias_sink = ctx.sinks
        grad_weight, grad_bias = None, None
        if ctx.needs_input_grad[1]:
            factors = _factors(ctx.options[0], grad_x, grad_last, y)
            if weight_sink is not None:
                _add_backward_weights(weight_sink, factors)
            else:
                ways = [torch.cat([frame_products(*part) for part in parts]) for parts in factors]
                grad_weight = torch.stack(ways)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            if bias_sink is not None:
                for way, sink in enumerate(bias_sink):
                    add_frame_sums(sink, grad_last[:, :, way])
            else:
                grad_bias = grad_last.sum((0, 1))
        return grad_x, grad_weight, grad_bias, *[None] * 7
