"""A chain of row convolutions on a block of streams, and the skip connection around them, for inference.

Shape letters: T frames, B batch, H hidden, N convolutions of K = tau + 1 taps, R rows of a stream's state, P slots.
"""

import functools

import torch
from torch import Tensor

from ds2_ops.checks import check_like, check_shape
from ds2_ops.jit.launch import Launch, names, parameters, run, translation_unit, why_not_early
from ds2_ops.row_convolution.op import lookahead

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
    if why_not(y, taps) is None:
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


def why_not(y: Tensor, taps: Tensor) -> str | None:
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

    def what() -> str:
        return f"{taps.shape[0]} row convolutions of (T, B, H) = {tuple(y.shape)}, {y.dtype}"

    launch = chain_launch(number, taps.shape[0], taps.shape[1] - 1, skip is not None, -(-words // _THREADS))
    sizes = (frames, words, row_words, state.shape[1] * row_words)
    run(launch, [y, taps, state, slots, skip, out, *sizes], what, y.device)
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
