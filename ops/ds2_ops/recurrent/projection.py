"""The projection before a recurrence in blocks: a launch that overlaps with the recurrences before and behind it.

Shape letters: R = T B rows, K width of the input, H hidden.
"""

import functools

import torch
from torch import Tensor

from ds2_ops.jit.launch import Launch, run
from ds2_ops.jit.source import names, parameters, translation_unit
from ds2_ops.recurrent.plan.problem import MMA_ROWS, MMA_WORDS, NUMBERS, THREADS, WARPS

MOST_ROWS = 4096  # beyond, a library's product is several times as fast
_SHARE_ROWS = 64  # that a block takes at least
_SMS = 132  # multiprocessors of an H200
_WIDE_ROWS = 256  # of x; from so many on a block has two tiles of W
_WIDE_PAIRS = 6  # along K for which two tiles' registers suffice, and _NARROW_PAIRS those of two such blocks
_NARROW_PAIRS = 3
_CLUSTER = 16  # blocks of one launch fill few GPCs, so that the recurrence behind finds a whole one
_MOST_PAIRS = 10  # of matrix instructions along a warp's share of K: two rows of x are in registers beside the weights
_PROJECTION = parameters(
    """const void* x, const void* matrix, const void* bias, const int* begin, void* z,
    int rows, int batch, int width, int hidden, int shares"""
)


def why_not(x: Tensor, weight: Tensor, bias: Tensor) -> str | None:
    """Say why the kernel does not run this product; None if it does.

    Args:
        x: (T, B, K).
        weight: (H, K); bias: (H,).
    """
    rows, width = x.shape[0] * x.shape[1], x.shape[2]
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"x is {x.dtype}, the kernel multiplies 16-bit numbers"
    if not 1 <= rows <= MOST_ROWS:
        return f"x has {rows} rows, the kernel takes 1 to {MOST_ROWS}"
    if _pairs(width) > _MOST_PAIRS or width % 8 or x.data_ptr() % 16 or weight.data_ptr() % 16:
        return f"rows of {width} numbers are too long, or do not start at multiples of 16 bytes"
    if not (weight.is_contiguous() and bias.is_contiguous()):  # they are read before what would copy them has ended
        return "weight or bias is not contiguous"
    return None


def project(x: Tensor, weight: Tensor, bias: Tensor, begin: Tensor | None, *, beside: bool = False) -> Tensor:
    """Compute z = x W^T + b, 0 before each utterance's first frame.

    Args:
        x: (T, B, K) contiguous, bfloat16 or float16, on a CUDA device.
        weight: (H, K) and bias: (H,), contiguous.
        begin: (B,) int32 first frames, or None for 0.
        beside: start in turn, in blocks of their own: clusters would wait for those of recurrences on other streams.

    Returns:
        (T, B, H). Its bits do not depend on T, B or the other rows.
    """
    frames, batch, width = x.shape
    hidden = weight.shape[0]
    z = x.new_empty(frames, batch, hidden)
    dtype = str(x.dtype).removeprefix("torch.")

    def what() -> str:
        return f"projection of (T, B, K) = {tuple(x.shape)} to H {hidden}, {x.dtype}"

    rows = frames * batch
    launch, shares = projection_launch(width, hidden, dtype, beside, rows)
    run(launch, [x, weight, bias, begin, z, rows, batch, width, hidden, shares], what, x.device)
    return z


@functools.lru_cache(maxsize=256)
def projection_launch(width: int, hidden: int, dtype: str, beside: bool = False, rows: int = 1) -> tuple[Launch, int]:
    """The launch for a width, a hidden size and a dtype as `Problem` names it, and the shares of the rows."""
    pairs = _pairs(width)
    tiles = 2 if rows >= _WIDE_ROWS and pairs <= _WIDE_PAIRS else 1
    blocks = _SMS if tiles == 2 and pairs > _NARROW_PAIRS else 2 * _SMS  # that run at once
    across = -(-hidden // (tiles * MMA_ROWS))
    shares = max(1, min(-(-rows // _SHARE_ROWS), blocks // across))
    cluster = 1 if beside or shares > 1 else _CLUSTER
    smem_bytes = tiles * WARPS * THREADS * 4
    source = translation_unit(
        "recurrent/projection.cuh",
        _PROJECTION,
        f"    ds2::project<Shape>({{{names(_PROJECTION)}}});\n",
        ahead=f"using Shape = ds2::ProjectionShape<ds2::{NUMBERS[dtype][0]}, {pairs}, {tiles}, {cluster}>;\n"
        f'static_assert(Shape::SMEM_BYTES == {smem_bytes}, "projection.py and projection.cuh disagree");\n',
        launch_bounds="Shape::ALL_THREADS, 1",
    )
    grid = -(-across // cluster) * cluster * shares
    return Launch(source, THREADS, grid=grid, cluster=cluster, smem_bytes=smem_bytes, early=not beside), shares


def _pairs(width: int) -> int:
    return -(-width // (2 * 2 * MMA_WORDS * WARPS))
