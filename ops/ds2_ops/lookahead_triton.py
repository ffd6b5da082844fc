# Triton's language looks like Python, but its tuples and decorators are its own:
# mypy: disable-error-code="untyped-decorator, assignment, misc, var-annotated"
# ruff: noqa: RUF005
"""The row convolution on a GPU: each input read once, each output written once.

A program owns a block of feature columns and walks along a chunk of time with the last K frames in a ring of
registers; the loop is unrolled K-fold so that the ring turns by renaming, not by moving. No atomics: the same bits on
every run. Shape letters: T frames, B batch, H hidden, K = tau + 1 taps; a column is one (batch, feature) pair.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_TAPS = 32  # the ring and the taps live in registers
_WARPS_WANTED = 2048  # about 16 a multiprocessor on the largest GPUs: enough loads in flight to fill the memory bus
_REGISTERS_WANTED = 160


def forward(x: Tensor, weight: Tensor, lengths: Tensor | None) -> Tensor:
    """Sum w_j * x_(t+j) over the taps j. Arguments and returns as in :func:`ds2_ops.lookahead_shift.forward`."""
    y = torch.empty_like(x)
    if x.numel():
        launch = _Launch(x, weight, values_per_column=2)
        with torch.cuda.device(x.device):
            _forward_kernel[launch.grid](
                x,
                weight,
                lengths,
                y,
                *x.shape,
                launch.chunk,
                launch.taps,
                launch.columns,
                lengths is not None,
                num_warps=1,
            )
    return y


def backward(grad_y: Tensor, x: Tensor, weight: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute both gradients. Arguments and returns as in :func:`ds2_ops.lookahead_shift.backward`."""
    grad_x = torch.empty_like(x)
    if not x.numel():
        return grad_x, torch.zeros_like(weight)
    launch = _Launch(x, weight, values_per_column=3)
    partial = torch.empty(launch.grid[1], launch.taps, *x.shape[1:], dtype=torch.float32, device=x.device)
    with torch.cuda.device(x.device):
        _backward_kernel[launch.grid](
            grad_y,
            x,
            weight,
            lengths,
            grad_x,
            partial,
            *x.shape,
            launch.chunk,
            launch.taps,
            launch.columns,
            lengths is not None,
            num_warps=1,
        )
    return grad_x, partial.sum((0, 2)).t().contiguous().to(weight.dtype)


class _Launch:
    """How columns and time are cut: wide loads while registers last, then chunks of time until the GPU is full."""

    def __init__(self, x: Tensor, weight: Tensor, values_per_column: int) -> None:
        frames, batch, hidden = x.shape
        self.taps = weight.shape[1]
        per_thread = 16 // x.element_size()
        while per_thread > 1 and values_per_column * self.taps * per_thread > _REGISTERS_WANTED:
            per_thread //= 2
        self.columns = 32 * per_thread
        column_blocks = triton.cdiv(batch * hidden, self.columns)
        # Each chunk reads K - 1 frames of its neighbour again, so chunks are long beside K.
        chunks = max(1, min(_WARPS_WANTED // column_blocks, frames // (8 * self.taps)))
        self.chunk = triton.cdiv(triton.cdiv(frames, chunks), self.taps) * self.taps
        self.grid = (column_blocks, triton.cdiv(frames, self.chunk))


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
    COLUMNS: tl.constexpr,
    RAGGED: tl.constexpr,
):
    total = batch * hidden
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < total
    valid = tl.where(inside, frames, 0)
    if RAGGED:
        valid = tl.load(lengths_ptr + columns // hidden, mask=inside, other=0)
    start = tl.program_id(1) * chunk
    stop = tl.minimum(start + chunk, frames)
    taps = ()
    for j in tl.static_range(K):
        taps = taps + (_tap(weight_ptr, columns % hidden, j, inside, K),)
    ring = ()
    for j in tl.static_range(K - 1):
        ring = ring + (_row(x_ptr, start + j, total, columns, start + j < valid),)
    ring = ring + (tl.zeros((COLUMNS,), tl.float32),)
    for first in range(start, stop, K):
        for i in tl.static_range(K):
            t = first + i
            newest = _row(x_ptr, t + K - 1, total, columns, t + K - 1 < valid)
            ring = ring[: (i + K - 1) % K] + (newest,) + ring[(i + K - 1) % K + 1 :]
            y = taps[0] * ring[i % K]
            for j in tl.static_range(1, K):
                y += taps[j] * ring[(i + j) % K]
            y = tl.where(t < valid, y, 0.0)
            tl.store(y_ptr + t.to(tl.int64) * total + columns, y.to(y_ptr.dtype.element_ty), mask=inside & (t < stop))


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
    COLUMNS: tl.constexpr,
    RAGGED: tl.constexpr,
):
    total = batch * hidden
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < total
    valid = tl.where(inside, frames, 0)
    if RAGGED:
        valid = tl.load(lengths_ptr + columns // hidden, mask=inside, other=0)
    start = tl.program_id(1) * chunk
    stop = tl.minimum(start + chunk, frames)
    taps = ()
    sums = ()
    for j in tl.static_range(K):
        taps = taps + (_tap(weight_ptr, columns % hidden, j, inside, K),)
        sums = sums + (tl.zeros((COLUMNS,), tl.float32),)
    ring = ()  # grad_y of the last K frames; before the chunk, of the frames that look into it
    for j in tl.static_range(K):
        t = start - K + j
        ring = ring + (_row(grad_y_ptr, t, total, columns, (t >= 0) & (t < valid)),)
    for first in range(start, stop, K):
        for i in tl.static_range(K):
            t = first + i
            live = t < tl.minimum(valid, stop)
            ring = ring[:i] + (_row(grad_y_ptr, t, total, columns, live),) + ring[i + 1 :]
            x = _row(x_ptr, t, total, columns, live)
            grad_x = tl.zeros((COLUMNS,), tl.float32)
            new_sums = ()
            for j in tl.static_range(K):
                behind = ring[(i - j + K) % K]
                grad_x += taps[j] * behind
                new_sums = new_sums + (sums[j] + behind * x,)
            sums = new_sums
            grad_x = tl.where(live, grad_x, 0.0)
            offset = t.to(tl.int64) * total + columns
            tl.store(grad_x_ptr + offset, grad_x.to(grad_x_ptr.dtype.element_ty), mask=inside & (t < stop))
    rows = tl.program_id(1).to(tl.int64) * K
    for j in tl.static_range(K):
        tl.store(partial_ptr + (rows + j) * total + columns, sums[j], mask=inside)
