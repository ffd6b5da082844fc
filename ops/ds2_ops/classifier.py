"""The classifier of few labels, for inference: one launch, where libraries use one multiprocessor or take 13 us.

Shape letters: T frames, B batch, H width, V labels.
"""

import functools

import torch
from torch import Tensor
from torch.nn import functional

from ds2_ops.checks import check_like, check_shape
from ds2_ops.jit.launch import Launch, names, parameters, run, translation_unit, why_not_early

_NUMBERS = {torch.bfloat16: "Bf16", torch.float16: "Fp16"}
_ROWS, _WARPS = 4, 8  # of a block
_MAX_WIDTH = 1536  # a row must fit into the registers of a warp
_MAX_LOGITS = 1 << 20  # a library's product is faster for more
_CLASSIFY = parameters(
    "const uint2* x, const float4* weight, const float* bias, float* logits, int rows, int labels",
)


@torch.no_grad()
def classify(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute x W^T + b, with sums and products in the dtype of the weight.

    Args:
        x: (T, B, H), of this dtype or a narrower one.
        weight: (V, H); bias: (V,); float32 or float64.

    Returns:
        (T, B, V) of the dtype of the weight.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not match.
    """
    frames, batch, width = x.shape
    labels = weight.shape[0]
    check_shape("weight", weight, (labels, width), "(V, H)")
    check_shape("bias", bias, (labels,), "(V,)")
    check_like("bias", bias, weight)
    if why_not(x, weight) is not None:
        return functional.linear(x.to(weight.dtype), weight, bias)
    x, rows = x.contiguous(), frames * batch
    logits = weight.new_empty(frames, batch, labels)
    launch = classify_launch(_NUMBERS[x.dtype], width, -(-rows // _ROWS))
    shape, arguments = tuple(x.shape), (x, weight, bias, logits, rows, labels)
    run(launch, arguments, lambda: f"classifier of (T, B, H) = {shape}, {x.dtype}, V {labels}", x.device)
    return logits


def why_not(x: Tensor, weight: Tensor) -> str | None:
    """Say why the kernel cannot run `classify` of x (T, B, H) and weight (V, H); None if it can."""
    if not x.is_cuda or x.dtype not in _NUMBERS or weight.dtype != torch.float32 or x.numel() == 0:
        return (
            f"x is {x.dtype} on {x.device}, the weight {weight.dtype}: the kernel takes 16-bit x and a float32 weight "
            "on a CUDA GPU"
        )
    if reason := why_not_early(x.device):
        return reason
    width = x.shape[2]
    if width % 4 or width > _MAX_WIDTH or x.data_ptr() % 8 or weight.data_ptr() % 16:
        return f"rows of {width} numbers do not fit into a warp, or are not aligned to 8 bytes"
    logits = x.shape[0] * x.shape[1] * weight.shape[0]
    return f"a library's product is faster for {logits} logits" if logits > _MAX_LOGITS else None


@functools.lru_cache(maxsize=256)
def classify_launch(number: str, width: int, blocks: int) -> Launch:
    """Make the launch for rows of `width` numbers of a type of csrc/ptx/number.cuh."""
    source = translation_unit(
        "classifier/rows.cuh",
        _CLASSIFY,
        f"    ds2::classify<ds2::{number}, {_ROWS}, {width}, {_WARPS}>({names(_CLASSIFY)});\n",
        launch_bounds=str(32 * _WARPS),
    )
    return Launch(source, 32 * _WARPS, grid=blocks, early=True)
