"""Row convolutions one behind the other on a block of streams, and the skip around them, without gradients.

Shape letters: T frames, B batch, H hidden, N convolutions of K = tau + 1 taps, R rows that a stream carries.
"""

import functools

import torch
from torch import Tensor

from ds2_ops.checks import check_like, check_shape
from ds2_ops.jit import runtime
from ds2_ops.jit.launch import Launch, device_index, run
from ds2_ops.jit.source import names, parameters, translation_unit
from ds2_ops.row_convolution.op import lookahead

_NUMBERS = {torch.bfloat16: ("Bf16", 2), torch.float16: ("Fp16", 2), torch.float32: ("Fp32", 1)}
_THREADS = 64
_MOST_REGISTERS = 96  # of a thread, for taps and what is carried
_CHAIN = parameters(
    """const unsigned* y, const unsigned* taps, unsigned* held, const long long* places, const unsigned* skip,
    unsigned* out, int frames, int words, int row_words, int places_words"""
)


@torch.no_grad()
def lookahead_chain(
    y: Tensor, taps: Tensor, held: Tensor, skip: Tensor | None = None, places: Tensor | None = None
) -> Tensor:
    """Run N row convolutions (Deep Speech 2, 2015) on the next block of streams, N tau frames late, and add a skip.

    Output t of the block belongs to its frame t - N tau, so the first N tau frames of a stream are not its own.

    Args:
        y: (T, B, H) bfloat16, float16, float32 or float64.
        taps: (N, K, H), ``taps[n, j]`` for the frame j ahead. The kernel reads them while those before it on the stream
            still run: they must be older than these.
        held: (R, P, H) contiguous, of the block before, and then of this one: each convolution's last tau inputs and,
            with a skip, its last N tau frames. R is N tau, or 2 N tau with a skip.
        skip: (T, B, H) what is added to the frames' outputs, or None.
        places: (B,) int64 on the device, all different: whose of P places each stream's are; None: P is B, in order.

    Returns:
        (T, B, H). Its bits do not depend on how frames are cut into blocks.

    Raises:
        ValueError, TypeError: shapes, types or devices that do not go together.
    """
    frames, batch, hidden = y.shape
    count, width, _ = taps.shape
    waiting = count * (width - 1)
    check_shape("taps", taps, (count, width, hidden), "(N, K, H)")
    stations = batch if places is None else held.shape[1]
    check_shape("held", held, (waiting * (1 if skip is None else 2), stations, hidden), "(R, P, H)")
    if places is not None:
        check_shape("places", places, (batch,), "(B,)")
    if not held.is_contiguous() or (places is not None and places.dtype != torch.int64):
        raise ValueError("held is not contiguous, or places are not torch.int64: what is carried is updated in place")
    for name, tensor in (("taps", taps), ("held", held), *((("skip", skip),) if skip is not None else ())):
        check_like(name, tensor, y)
    if skip is not None:
        check_shape("skip", skip, (frames, batch, hidden), "(T, B, H)")
    if why_not(y, taps) is None:
        return _launched(y.contiguous(), taps.contiguous(), held, skip, places)
    table, kept = held, []
    held = table if places is None else table.index_select(1, places)
    for weight, tail in zip(taps, torch.split(held[:waiting], width - 1) if waiting else [held] * count, strict=True):
        whole = torch.cat([tail, y])
        y, rest = lookahead(whole, weight.t())[:frames], whole[frames:]
        kept.append(rest)
    if skip is not None:
        whole = torch.cat([held[waiting:], skip])
        y = y + whole[:frames]
        kept.append(whole[frames:])
    if places is None:
        table.copy_(torch.cat(kept))
    else:
        table.index_copy_(1, places, torch.cat(kept))
    return y


def why_not(y: Tensor, taps: Tensor) -> str | None:
    """Say why convolutions of y (T, B, H) with taps (N, tau + 1, H) are not one launch; None if they are."""
    if not y.is_cuda or y.dtype not in _NUMBERS or y.numel() == 0:
        return f"y is {y.dtype} on {y.device}"
    count, width, hidden = taps.shape
    if runtime.capability(device_index(y.device)) < (9, 0):
        return "a kernel that starts early needs Hopper"
    if hidden % _NUMBERS[y.dtype][1] or count * (2 * width - 1) > _MOST_REGISTERS:
        return f"{count} convolutions of {width} taps on rows of {hidden} do not fit a thread, or share words"
    return None


def _launched(y: Tensor, taps: Tensor, held: Tensor, skip: Tensor | None, places: Tensor | None) -> Tensor:
    number, per_word = _NUMBERS[y.dtype]
    frames, batch, hidden = y.shape
    words = batch * hidden // per_word
    out, row_words = torch.empty_like(y), hidden // per_word
    skip = None if skip is None else skip.contiguous()

    def what() -> str:
        return f"{taps.shape[0]} row convolutions of (T, B, H) = {tuple(y.shape)}, {y.dtype}"

    launch = chain_launch(number, taps.shape[0], taps.shape[1] - 1, skip is not None, -(-words // _THREADS))
    sizes = (frames, words, row_words, held.shape[1] * row_words)
    run(launch, [y, taps, held, places, skip, out, *sizes], what, y.device)
    return out


@functools.lru_cache(maxsize=256)
def chain_launch(number: str, count: int, tau: int, skip: bool, blocks: int) -> Launch:
    """The launch of N convolutions for a number type of csrc/ptx/number.cuh."""
    source = translation_unit(
        "row_convolution/chain.cuh",
        _CHAIN,
        f"    ds2::chain<ds2::{number}, {count}, {tau}, {str(skip).lower()}, {_THREADS}>({{{names(_CHAIN)}}});\n",
        launch_bounds=str(_THREADS),
    )
    return Launch(source, _THREADS, grid=blocks, early=True)
