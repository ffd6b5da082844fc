# Triton's language looks like Python, but its tuples and decorators are its own:
# mypy: disable-error-code="untyped-decorator, assignment, misc, var-annotated"
# ruff: noqa: RUF005
"""The row convolution on a GPU: each input read once, each output written once.

A program owns a block of feature columns and walks along a chunk of time, a few frames a turn, with the frames that the
next turn needs again in registers; all loads of a turn are in flight together. No atomics: the same bits on every run.
Shape letters: T frames, B batch, H hidden, K = tau + 1 taps; a column is one (batch, feature) pair.
"""

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_TAPS = 32  # the window and the taps live in registers
# The best values on an H200, measured over B 4 to 64 and K 6 and 20.
_MAX_REGISTERS = 80  # of a thread, for taps, window and sums, without addresses and loads in flight
_FORWARD_WARPS = 8192
_BACKWARD_WARPS = 4096  # fewer, because each chunk of time also writes its part of grad_weight
_MIN_CHUNK_FRAMES = 24  # each chunk reads K - 1 frames of its neighbour again


def forward(x: Tensor, weight: Tensor, lengths: Tensor | None) -> Tensor:
    """Sum w_j * x_(t+j) over the taps j.

    Args:
        x: (T, B, H), contiguous, on a CUDA GPU.
        weight: (H, K) of the same dtype and device.
        lengths: (B,) int32 on the device of ``x``, or None.

    Returns:
        y (T, B, H), 0 at padding.
    """
    y = torch.empty_like(x)
    if x.numel():
        taps, turn = weight.shape[1], 8
        grid, chunk, columns = _cut(*x.shape, x.element_size(), turn, 2 * taps, _FORWARD_WARPS)
        shape = (*x.shape, chunk, taps, turn, columns, lengths is not None)
        with torch.cuda.device(x.device):
            _forward_kernel[grid](x, weight, lengths, y, *shape, num_warps=1)
    return y


def backward(grad_y: Tensor, x: Tensor, weight: Tensor, lengths: Tensor | None) -> tuple[Tensor, Callable[[], Tensor]]:
    """Compute both gradients; that of the weight in partial sums, which are added up later.

    Args:
        grad_y: (T, B, H); values at padding are ignored.
        x, weight, lengths: as for :func:`forward`.

    Returns:
        grad_x (T, B, H), 0 at padding, and a function that returns grad_weight: (H, K) float32 of any strides.
    """
    grad_x = torch.empty_like(x)
    if not x.numel():
        return grad_x, lambda: torch.zeros_like(weight, dtype=torch.float32)
    taps, turn = weight.shape[1], 4
    grid, chunk, columns = _cut(*x.shape, x.element_size(), turn, 4 * taps, _BACKWARD_WARPS)
    shape = (*x.shape, chunk, taps, turn, columns, lengths is not None)
    partial = torch.empty(grid[1], taps, *x.shape[1:], dtype=torch.float32, device=x.device)
    with torch.cuda.device(x.device):
        _backward_kernel[grid](grad_y, x, weight, lengths, grad_x, partial, *shape, num_warps=1)
    return grad_x, lambda: partial.sum((0, 2)).t()


@functools.lru_cache(maxsize=1024)
def _cut(
    frames: int, batch: int, hidden: int, element_bytes: int, turn: int, registers_per_column: int, warps: int
) -> tuple[tuple[int, int], int, int]:
    """Divide columns and time: loads as wide as registers allow, then chunks of time until the GPU is full.

    Returns:
        The grid (column blocks, chunks), the frames of a chunk and the columns of a block.
    """
    per_thread = 16 // element_bytes
    while per_thread > 1 and registers_per_column * per_thread > _MAX_REGISTERS:
        per_thread //= 2
    columns = 32 * per_thread
    column_blocks = triton.cdiv(batch * hidden, columns)
    chunks = max(1, min(warps // column_blocks, frames // _MIN_CHUNK_FRAMES))
    chunk = triton.cdiv(triton.cdiv(frames, chunks), turn) * turn
    return (column_blocks, triton.cdiv(frames, chunk)), chunk, columns


# What a program owns: columns out of how many, which of them exist and for how many frames, and its chunk of time.
@triton.jit
def _place(lengths_ptr, frames, batch, hidden, chunk, COLUMNS: tl.constexpr, RAGGED: tl.constexpr):  # type: ignore[no-untyped-def]
    total = batch * hidden
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < total
    valid = tl.where(inside, frames, 0)
    if RAGGED:
        valid = tl.load(lengths_ptr + columns // hidden, mask=inside, other=0)
    start = tl.program_id(1) * chunk
    stop = tl.minimum(start + chunk, frames)
    return total, columns, inside, valid, start, stop


@triton.jit
def _row(pointer, t, total, columns, mask):  # type: ignore[no-untyped-def]
    return tl.load(pointer + t.to(tl.int64) * total + columns, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _tap(pointer, unit, j, mask, K: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.load(pointer + unit * K + j, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["frames", "batch", "chunk"])  # a new batch or length does not rebuild
def _forward_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    lengths_ptr,
    y_ptr,
    frames,
    batch,
    hidden,
    chunk,
    K: tl.constexpr,
    TURN: tl.constexpr,
    COLUMNS: tl.constexpr,
    RAGGED: tl.constexpr,
):
    total, columns, inside, valid, start, stop = _place(lengths_ptr, frames, batch, hidden, chunk, COLUMNS, RAGGED)
    taps = ()
    for j in tl.static_range(K):
        taps = taps + (_tap(weight_ptr, columns % hidden, j, inside, K),)
    window = ()
    for j in tl.static_range(K - 1):
        window = window + (_row(x_ptr, start + j, total, columns, start + j < valid),)
    for first in range(start, stop, TURN):
        for i in tl.static_range(TURN):
            ahead = first + i + K - 1
            window = window + (_row(x_ptr, ahead, total, columns, ahead < valid),)
        for i in tl.static_range(TURN):
            t = first + i
            y = taps[0] * window[i]
            for j in tl.static_range(1, K):
                y += taps[j] * window[i + j]
            y = tl.where(t < valid, y, 0.0)
            tl.store(y_ptr + t.to(tl.int64) * total + columns, y.to(y_ptr.dtype.element_ty), mask=inside & (t < stop))
        window = window[TURN:]


@triton.jit(do_not_specialize=["frames", "batch", "chunk"])
def _backward_kernel(  # type: ignore[no-untyped-def]
    grad_y_ptr,
    x_ptr,
    weight_ptr,
    lengths_ptr,
    grad_x_ptr,
    partial_ptr,
    frames,
    batch,
    hidden,
    chunk,
    K: tl.constexpr,
    TURN: tl.constexpr,
    COLUMNS: tl.constexpr,
    RAGGED: tl.constexpr,
):
    total, columns, inside, valid, start, stop = _place(lengths_ptr, frames, batch, hidden, chunk, COLUMNS, RAGGED)
    taps = ()
    sums = ()
    for j in tl.static_range(K):
        taps = taps + (_tap(weight_ptr, columns % hidden, j, inside, K),)
        sums = sums + (tl.zeros((COLUMNS,), tl.float32),)
    window = ()  # grad_y
    for j in tl.static_range(K - 1):
        t = start - K + 1 + j
        window = window + (_row(grad_y_ptr, t, total, columns, (t >= 0) & (t < valid)),)
    for first in range(start, stop, TURN):
        xs = ()
        for i in tl.static_range(TURN):
            t = first + i
            live = t < tl.minimum(valid, stop)
            window = window + (_row(grad_y_ptr, t, total, columns, live),)
            xs = xs + (_row(x_ptr, t, total, columns, live),)
        for i in tl.static_range(TURN):
            t = first + i
            grad_x = tl.zeros((COLUMNS,), tl.float32)
            new_sums = ()
            for j in tl.static_range(K):
                grad_x += taps[j] * window[K - 1 + i - j]
                new_sums = new_sums + (sums[j] + window[K - 1 + i - j] * xs[i],)
            sums = new_sums
            grad_x = tl.where(t < valid, grad_x, 0.0)
            offset = t.to(tl.int64) * total + columns
            tl.store(grad_x_ptr + offset, grad_x.to(grad_x_ptr.dtype.element_ty), mask=inside & (t < stop))
        window = window[TURN:]
    rows = tl.program_id(1).to(tl.int64) * K
    for j in tl.static_range(K):
        tl.store(partial_ptr + (rows + j) * total + columns, sums[j], mask=inside)
