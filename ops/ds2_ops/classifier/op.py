"""Logits of few labels: a product that a library gives to one multiprocessor, or to a kernel of 13 us.

Shape letters: T frames, B batch, H width, V labels.
"""

import functools

import torch
from torch import Tensor
from torch.nn import functional

from ds2_ops.checks import check_like, check_shape
from ds2_ops.jit import runtime
from ds2_ops.jit.launch import Launch, device_index, run
from ds2_ops.jit.source import names, parameters, translation_unit

_NUMBERS = {torch.bfloat16: "Bf16", torch.float16: "Fp16"}
_ROWS, _WARPS = 4, 8  # of a block
_MOST_WIDTH = 1536  # whose words fit the registers of a warp
_MOST_WORK = 1 << 20  # rows x labels: beyond, a library's product is faster
_CLASSIFY = parameters(
    "const uint2* x, const float4* weight, const float* bias, float* logits, int rows, int labels",
)


@torch.no_grad()
def classify(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute x W^T + b, all sums and products in the type of the weight.

    Args:
        x: (T, B, H), of this type or a narrower one.
        weight: (V, H); bias: (V,); float32 or float64.

    Returns:
        (T, B, V) of the type of the weight.

    Raises:
        ValueError, TypeError: shapes, types or devices that do not go together.
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

    def what() -> str:
        return f"classifier of (T, B, H) = {tuple(x.shape)}, {x.dtype}, V {labels}"

    run(launch, [x, weight, bias, logits, rows, labels], what, x.device)
    return logits


def why_not(x: Tensor, weight: Tensor) -> str | None:
    """Say why the kernel does not run x (T, B, H) and weight (V, H) of `classify`; None if it does."""
    if not x.is_cuda or x.dtype not in _NUMBERS or weight.dtype != torch.float32 or x.numel() == 0:
        return f"x is {x.dtype} on {x.device}, the weight {weight.dtype}"
    if runtime.capability(device_index(x.device)) < (9, 0):
        return "a kernel that starts early needs Hopper"
    width = x.shape[2]
    if width % 4 or width > _MOST_WIDTH or x.data_ptr() % 8 or weight.data_ptr() % 16:
        return f"rows of {width} numbers do not fit a warp, or do not start at a multiple of 8 bytes"
    work = x.shape[0] * x.shape[1] * weight.shape[0]
    return f"{work} logits are many" if work > _MOST_WORK else None


@functools.lru_cache(maxsize=256)
def classify_launch(number: str, width: int, blocks: int) -> Launch:
    """The launch for rows of `width` numbers of a type of csrc/ptx/number.cuh."""
    source = translation_unit(
        "classifier/rows.cuh",
        _CLASSIFY,
        f"    ds2::classify<ds2::{number}, {_ROWS}, {width}, {_WARPS}>({names(_CLASSIFY)});\n",
        launch_bounds=str(32 * _WARPS),
    )
    return Launch(source, 32 * _WARPS, grid=blocks, early=True)
