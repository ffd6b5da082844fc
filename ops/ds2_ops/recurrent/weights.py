"""The gradient of a recurrent matrix: one product over all frames.

Shape letters: T frames, B batch, H hidden.
"""

import torch
from torch import Tensor


def backward_weights(grad: Tensor, y: Tensor, h0: Tensor | None) -> Tensor:
    """dW = sum_t grad_t h_(t-1)^T.

    Args:
        grad: (T, B, R) gradient of the matrix' R rows of products; 0 at padding, so padding adds nothing.
        y: (T, B, H) states.
        h0: (B, H) first state, or None for zeros.

    Returns:
        (R, H)
    """
    if h0 is None:
        return frame_products(grad[1:], y[:-1])
    return frame_products(grad, torch.cat([h0[None], y])[:-1])


def frame_products(grad: Tensor, previous: Tensor) -> Tensor:
    """Sum of outer products (R, H) of (T, B, R) and (T, B, H), in float32 where tensors are 16-bit on a GPU."""
    left, right = grad.flatten(0, 1).t(), previous.flatten(0, 1)
    if left.is_cuda and left.dtype in (torch.bfloat16, torch.float16):
        # cuBLAS may cut a sum over so many frames in parts and add these in the type of the output: ask for float32.
        return torch.mm(left, right, out_dtype=torch.float32).to(left.dtype)
    return left @ right
