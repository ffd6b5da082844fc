"""What a backward pass makes of a recurrent matrix: its transpose, and its gradient, one product over all frames.

Shape letters: T frames, B batch, H hidden.
"""

import functools

import torch
from torch import Tensor

from ds2_ops.jit.launch import Launch, run
from ds2_ops.jit.source import Source, names, parameters, translation_unit
from ds2_ops.recurrent.deferred import GradientSink, Work

_THREADS, _TILE = 256, 64
_STORED = {2: "unsigned short", 4: "unsigned"}  # numbers by their bytes


@functools.cache
def transposition(item_bytes: int) -> Source:
    """The kernel for numbers of 2 or 4 bytes."""
    given = parameters("const void* from, void* to, int rows, int columns")
    return translation_unit(
        "recurrent/transpose.cuh",
        given,
        "    extern __shared__ __align__(16) unsigned char shared[];\n"
        f"    ds2::transpose<{_STORED[item_bytes]}>({names(given)}, shared);\n",
        ahead=f"static_assert(ds2::TRANSPOSE_THREADS == {_THREADS} && ds2::TRANSPOSE_TILE == {_TILE}, "
        '"weights.py and transpose.cuh disagree");\n',
        launch_bounds=str(_THREADS),
    )


def transposed(matrix: Tensor) -> Tensor:
    """The transpose (C, R), contiguous, of a contiguous matrix (R, C) on a GPU."""
    rows, columns = matrix.shape
    result = matrix.new_empty(columns, rows)
    transpose_into(result, matrix)
    return result


def transpose_into(result: Tensor, matrix: Tensor) -> None:
    """Write the transpose of a contiguous matrix (R, C) on a GPU into a contiguous tensor (C, R)."""
    rows, columns = matrix.shape
    launch = _transposing(rows, columns, matrix.element_size())
    run(launch, [matrix, result, rows, columns], lambda: f"the transpose of {(rows, columns)}", matrix.device)


@functools.lru_cache(maxsize=256)
def _transposing(rows: int, columns: int, item_bytes: int) -> Launch:
    grid = -(-rows // _TILE) * -(-columns // _TILE)
    return Launch(transposition(item_bytes), _THREADS, grid=grid, smem_bytes=_TILE * (_TILE + 2) * item_bytes)


class Transpose:
    """The transpose of a recurrent matrix that a backward pass will load.

    Args:
        matrix: (R, C), contiguous, on a GPU.
    """

    def __init__(self, matrix: Tensor) -> None:
        self._matrix = matrix
        self._made: Tensor | None = None

    def allocate(self) -> Work:
        """Allocate its memory on the current stream; the function that is returned launches what fills it."""
        made = self._made = self._matrix.new_empty(self._matrix.shape[::-1])
        return lambda: transpose_into(made, self._matrix)

    def take(self) -> Tensor:
        """The transpose (C, R), made now unless it was made ahead."""
        return transposed(self._matrix) if self._made is None else self._made


def backward_weights(grad: Tensor, y: Tensor, h0: Tensor | None) -> Tensor:
    """dW = sum_t grad_t h_(t-1)^T.

    Args:
        grad: (T, B, R) gradient of the matrix' R rows of products; 0 at padding, so padding adds nothing.
        y: (T, B, H) states.
        h0: (B, H) first state, or None for zeros.

    Returns:
        (R, H)
    """
    return frame_products(*_with_previous(grad, y, h0))


def add_backward_weights(sink: GradientSink, grad: Tensor, y: Tensor, h0: Tensor | None) -> None:
    """Add the product that `backward_weights` returns to a sink; grad, y, h0 as there."""
    add_frame_products(sink, *_with_previous(grad, y, h0))


def add_frame_products(sink: GradientSink, grad: Tensor, previous: Tensor) -> None:
    """Add the product that `frame_products` returns to a sink; grad, previous as there."""
    sink.add_product(grad.flatten(0, 1).t(), previous.flatten(0, 1))


def add_frame_sums(sink: GradientSink, grad: Tensor) -> None:
    """Add the sum of grad (T, B, R) over all frames, in float32 where it is 16-bit, to a sink (R,)."""
    dtype = torch.promote_types(grad.dtype, torch.float32)
    sink.add(lambda: grad.sum((0, 1), dtype=dtype))


def _with_previous(grad: Tensor, y: Tensor, h0: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gradients beside the states before them."""
    if h0 is None:
        return grad[1:], y[:-1]
    return grad, torch.cat([h0[None], y])[:-1]


def frame_products(grad: Tensor, previous: Tensor) -> Tensor:
    """Sum of outer products (R, H) of (T, B, R) and (T, B, H), in float32 where tensors are 16-bit on a GPU."""
    left, right = grad.flatten(0, 1).t(), previous.flatten(0, 1)
    if left.is_cuda and left.dtype in (torch.bfloat16, torch.float16):
        # cuBLAS may cut a sum over so many frames in parts and add these in the type of the output: ask for float32.
        return torch.mm(left, right, out_dtype=torch.float32).to(left.dtype)
    return left @ right
