"""The row convolution r_t = sum_j w_j h_(t+j): the operator, shifted multiply-adds on any device, the equation, chains.

A chain is several row convolutions on a block of streams in one launch, for inference. `kernels` has the Triton kernels
of the operator, which read each input once.

Shape letters: T frames, B batch, H hidden, K = tau + 1 taps; of a chain N convolutions, R rows of a stream's state, P
slots.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ds2_ops.checks import (
    check_choice,
    check_lengths,
    check_like,
    check_shape,
    check_x,
    choose_backend,
    lengths_on,
    refuse_second_derivative,
    under_autocast,
    without_padding,
)
from ds2_ops.jit.launch import Launch, names, parameters, run, translation_unit, why_not_early

BACKENDS = ("auto", "triton", "shift", "reference")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
Sink = Callable[[Callable[[], Tensor]], None]  # takes a function that makes a gradient

# A block of frames, its sum and its taps stay in a CPU's last-level cache; a GPU needs few and large launches.
_BLOCK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 22}


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
            None. Fastest as int32 on the device. Values on a GPU are not checked.
        backend: "triton" (CUDA), "shift" (K shifted multiply-adds, any device), "reference" (plain autograd), or
            "auto": "triton" where it can run, else "shift"; logged once on a GPU.
        sink: receives, in eager mode, a function that makes the gradient of ``weight``, (H, K), in float32 from the
            Triton kernels. It may be called later. Autograd then gets no gradient of ``weight``.

    Returns:
        y (T, B, H), 0 where t >= length.

    Raises:
        ValueError: a shape, device, length or name that is not allowed.
        TypeError: a dtype that is not allowed.
        RuntimeError: the named backend cannot run this, with the reason.
    """
    check_choice("backend", backend, BACKENDS)
    x, weight = under_autocast(x, weight)  # type: ignore[assignment]
    check_x(x.shape, x.dtype, _DTYPES)
    if weight.dim() != 2 or weight.shape[0] != x.shape[2] or weight.shape[1] < 1:
        raise ValueError(f"weight has shape {tuple(weight.shape)}, expected (H, tau + 1) with H = {x.shape[2]}")
    check_like("weight", weight, x)
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
        from ds2_ops.row_convolution import kernels

        return kernels.forward(x, weight, lengths)
    return _shift_forward(x, weight, lengths)


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
        from ds2_ops.row_convolution import kernels

        return kernels.backward(grad_y, x, weight, lengths)
    grad_x, grad_weight = _shift_backward(grad_y, x, weight, lengths)
    return grad_x, lambda: grad_weight


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, lengths, ctx.backend = inputs
    ctx.save_for_backward(x, weight, lengths)


def _compiled_backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(grad_y, *ctx.saved_tensors, ctx.backend), None, None


class _EagerLookahead(torch.autograd.Function):
    """The custom op below without its wrappers, which take longer than the launch of the kernel."""

    @staticmethod
    def forward(ctx: Any, sink: Sink | None, *inputs: Any) -> Tensor:
        y = _run_forward(*inputs)
        _save_for_backward(ctx, inputs, y)
        ctx.sink = sink
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("lookahead")
        inputs = (grad_y, *ctx.saved_tensors, ctx.backend)
        if ctx.sink is None or not ctx.needs_input_grad[2]:
            return None, *_run_backward(*inputs), None, None
        grad_x, make = _backward_in_parts(*inputs)
        ctx.sink(make)
        return None, grad_x, None, None, None


_forward = torch.library.custom_op("ds2::lookahead_forward", _run_forward, mutates_args=())
_backward = torch.library.custom_op("ds2::lookahead_backward", _run_backward, mutates_args=())
_forward.register_autograd(_compiled_backward, setup_context=_save_for_backward)


@_forward.register_fake
def _(x: Tensor, *args: Any) -> Tensor:
    return x.new_empty(x.shape)


@_backward.register_fake
def _(grad_y: Tensor, x: Tensor, weight: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _shift_forward(x: Tensor, weight: Tensor, lengths: Tensor | None) -> Tensor:
    """Sum w_j * x_(t+j) over the taps j, as shifted multiply-adds over blocks of time.

    Products are summed in float32 (float64 for float64) in the order of the taps, whatever block a frame lies in, so a
    stream has the bits of the whole utterance.

    Args:
        x: (T, B, H), contiguous.
        weight: (H, K) of the same dtype and device.
        lengths: (B,) int32 on the device of ``x``, or None.

    Returns:
        y (T, B, H), 0 at padding.
    """
    x = without_padding(x, lengths)
    y = torch.empty_like(x)
    taps = _accumulated(weight.t().contiguous())
    for start, stop in _blocks(x):
        source = _accumulated(x[start : stop + len(taps) - 1])
        total = source[: stop - start] * taps[0]
        for j in range(1, min(len(taps), len(source))):
            ahead = source[j : j + stop - start]
            total[: len(ahead)].addcmul_(ahead, taps[j])
        y[start:stop] = total
    return y


def _shift_backward(grad_y: Tensor, x: Tensor, weight: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute grad_x_t = sum_j w_j * grad_y_(t-j) and grad_w_j = sum_(t,b) grad_y_t * x_(t+j).

    Args:
        grad_y: (T, B, H); values at padding are ignored.
        x, weight, lengths: as for `_shift_forward`.

    Returns:
        grad_x (T, B, H), 0 at padding, and grad_weight (H, K).
    """
    grad_y, x = without_padding(grad_y, lengths), without_padding(x, lengths)
    grad_x = torch.empty_like(x)
    taps = _accumulated(weight.t().contiguous())
    grad_taps = torch.zeros_like(taps)
    for start, stop in _blocks(x):
        first = max(0, start - len(taps) + 1)
        gradient, source = _accumulated(grad_y[first:stop]), _accumulated(x[start:stop])
        total = torch.zeros_like(source)
        for j in range(min(len(taps), stop)):
            missing = max(0, j - start)  # frames of this block without a frame t - j
            delayed = gradient[start - first - j + missing : stop - first - j]
            total[missing:].addcmul_(delayed, taps[j])
            grad_taps[j] += (delayed * source[missing:]).sum((0, 1))
        grad_x[start:stop] = total
    return without_padding(grad_x, lengths), grad_taps.t().contiguous().to(weight.dtype)


def _blocks(x: Tensor) -> list[tuple[int, int]]:
    frames, batch, hidden = x.shape
    block = max(1, _BLOCK_ELEMENTS.get(x.device.type, 1 << 22) // max(1, batch * hidden))
    return [(start, min(start + block, frames)) for start in range(0, frames, block)]


def _accumulated(x: Tensor) -> Tensor:
    """Convert x to the dtype in which products are summed."""
    return x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)


def _resolve(backend: str, x: Tensor, weight: Tensor) -> str:
    """Turn "auto" into a backend that can run; raise RuntimeError where a named one cannot."""
    if backend == "shift" or (backend == "auto" and x.device.type == "cpu"):
        return "shift"
    reason = why_not_triton(x, weight)
    way_out = "; use backend='shift' or 'auto'"
    return choose_backend(backend, "triton", "shift", reason, "lookahead %s on %s", x.dtype, x.device, way_out=way_out)


def why_not_triton(x: Tensor, weight: Tensor) -> str | None:
    """Say why the Triton kernels cannot run `lookahead` of x (T, B, H) and weight (H, tau + 1); None if they can."""
    if x.device.type != "cuda":
        return f"x is on {x.device}, the Triton kernels need a CUDA GPU"
    if x.dtype == torch.float64:
        return "x is torch.float64, the Triton kernels sum in float32"
    try:
        from ds2_ops.row_convolution import kernels
    except ImportError as error:
        return f"{error}; pip install triton"
    if weight.shape[1] > kernels.MAX_TAPS:
        return f"weight has {weight.shape[1]} taps, the Triton kernels hold at most {kernels.MAX_TAPS}"
    return None


def lookahead_reference(x: Tensor, weight: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Sum each feature over the current and the next tau frames: r_t = sum_j w_j * h_(t+j).

    Deep Speech 2 (2015), row convolution. Arguments, shapes and returns are those of :func:`ds2_ops.lookahead`.
    """
    own = None if lengths is None else lengths.to(x.device)
    frames, taps = len(x), weight.shape[1]
    padded = torch.cat([without_padding(x, own), x.new_zeros(taps - 1, *x.shape[1:])])
    y = torch.stack([padded[j : j + frames] * weight[:, j] for j in range(taps)]).sum(0)
    return without_padding(y, own)


_NUMBERS = {torch.bfloat16: ("Bf16", 2), torch.float16: ("Fp16", 2), torch.float32: ("Fp32", 1)}
_THREADS = 64
_MAX_REGISTERS = 96  # of a thread, for taps and state
_CHAIN = parameters(
    """const unsigned* y, const unsigned* taps, unsigned* held, const long long* places, const unsigned* skip,
    unsigned* out, int frames, int words, int row_words, int places_words"""
)


@torch.no_grad()
def lookahead_chain(
    y: Tensor, taps: Tensor, state: Tensor, skip: Tensor | None = None, slots: Tensor | None = None
) -> Tensor:
    """Run N row convolutions (Deep Speech 2, 2015) on the next block of streams, N tau frames late, and add a skip.

    Output t of the block belongs to its frame t - N tau, so the first N tau outputs of a stream lie before its start.

    Args:
        y: (T, B, H) bfloat16, float16, float32 or float64.
        taps: (N, K, H), ``taps[n, j]`` for the frame j ahead. The kernel reads them while the previous kernels of the
            stream still run, so these must not write them.
        state: (R, P, H) contiguous, updated in place: the last tau inputs of each convolution and, with a skip, the
            last N tau frames of it. R is N tau, or 2 N tau with a skip.
        skip: (T, B, H), added to the outputs of its frames, or None.
        slots: (B,) int64 on the device, all different: the slot of each stream; None: P is B, in order.

    Returns:
        (T, B, H). Its bits do not depend on the lengths of blocks.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not match.
    """
    frames, batch, hidden = y.shape
    count, width, _ = taps.shape
    delay = count * (width - 1)
    check_shape("taps", taps, (count, width, hidden), "(N, K, H)")
    slot_count = batch if slots is None else state.shape[1]
    check_shape("state", state, (delay * (1 if skip is None else 2), slot_count, hidden), "(R, P, H)")
    if slots is not None:
        check_shape("slots", slots, (batch,), "(B,)")
    if not state.is_contiguous() or (slots is not None and slots.dtype != torch.int64):
        raise ValueError("state is not contiguous, or slots are not torch.int64: the state is updated in place")
    for name, tensor in (("taps", taps), ("state", state), *((("skip", skip),) if skip is not None else ())):
        check_like(name, tensor, y)
    if skip is not None:
        check_shape("skip", skip, (frames, batch, hidden), "(T, B, H)")
    if why_not_chain(y, taps) is None:
        return _launched(y.contiguous(), taps.contiguous(), state, skip, slots)
    rows, new_rows = state if slots is None else state.index_select(1, slots), []
    for weight, tail in zip(taps, torch.split(rows[:delay], width - 1) if delay else [rows] * count, strict=True):
        whole = torch.cat([tail, y])
        y = lookahead(whole, weight.t())[:frames]
        new_rows.append(whole[frames:])
    if skip is not None:
        whole = torch.cat([rows[delay:], skip])
        y = y + whole[:frames]
        new_rows.append(whole[frames:])
    if slots is None:
        state.copy_(torch.cat(new_rows))
    else:
        state.index_copy_(1, slots, torch.cat(new_rows))
    return y


def why_not_chain(y: Tensor, taps: Tensor) -> str | None:
    """Say why the kernel cannot run convolutions of y (T, B, H) with taps (N, tau + 1, H); None if it can."""
    if not y.is_cuda or y.dtype not in _NUMBERS or y.numel() == 0:
        return f"y is {y.dtype} on {y.device}, the kernel takes 16-bit types and float32 on a CUDA GPU"
    count, width, hidden = taps.shape
    if reason := why_not_early(y.device):
        return reason
    if hidden % _NUMBERS[y.dtype][1] or count * (2 * width - 1) > _MAX_REGISTERS:
        return f"{count} convolutions of {width} taps on H {hidden} need too many registers, or an even H"
    return None


def _launched(y: Tensor, taps: Tensor, state: Tensor, skip: Tensor | None, slots: Tensor | None) -> Tensor:
    number, per_word = _NUMBERS[y.dtype]
    frames, batch, hidden = y.shape
    words = batch * hidden // per_word
    out, row_words = torch.empty_like(y), hidden // per_word
    skip = None if skip is None else skip.contiguous()
    count = len(taps)
    launch = chain_launch(number, count, taps.shape[1] - 1, skip is not None, -(-words // _THREADS))
    arguments = [y, taps, state, slots, skip, out, frames, words, row_words, state.shape[1] * row_words]
    run(launch, arguments, lambda: f"{count} row convolutions of (T, B, H) = {tuple(y.shape)}, {y.dtype}", y.device)
    return out


@functools.lru_cache(maxsize=256)
def chain_launch(number: str, count: int, tau: int, skip: bool, blocks: int) -> Launch:
    """Make the launch of N convolutions for a number type of csrc/ptx/number.cuh."""
    source = translation_unit(
        "row_convolution/chain.cuh",
        _CHAIN,
        f"    ds2::chain<ds2::{number}, {count}, {tau}, {str(skip).lower()}, {_THREADS}>({{{names(_CHAIN)}}});\n",
        launch_bounds=str(_THREADS),
    )
    return Launch(source, _THREADS, grid=blocks, early=True)
