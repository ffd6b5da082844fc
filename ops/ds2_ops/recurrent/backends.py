"""Which implementation of the recurrence runs: the one that was asked for, or the fastest that can."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ds2_ops.checks import take_fastest
from ds2_ops.recurrent.cells import ALL
from ds2_ops.recurrent.persistent import why_not

BACKENDS = ("auto", "persistent", "gemm", "reference", "cpu")


def resolve(backend: str, x: Tensor, cell: str, max_sms: int | None) -> str:
    """Turn "auto" into a backend that runs; raise RuntimeError where a named one cannot.

    Args:
        backend: one of `BACKENDS`.
        x: (T, B, G H), pre-activations, with the G gates of the cell.
        cell: a name in ``cells.ALL``.
        max_sms: the most multiprocessors to use, or None.
    """
    if backend == "gemm" or (x.numel() == 0 and x.device.type != "cpu"):  # nothing to run: any backend does the same
        return "gemm"
    if backend == "cpu" or (backend == "auto" and x.device.type == "cpu"):
        if x.device.type != "cpu":
            raise RuntimeError(f"backend 'cpu' cannot run tensors on {x.device}: move them, or use backend='auto'")
        return "cpu"
    frames, batch, width = x.shape
    hidden = width // ALL[cell].gates
    reason = why_not(frames, batch, hidden, x.dtype, x.device, cell, max_sms)
    if getattr(forward_ad, "_current_level", -1) >= 0:  # a tangent would be lost without a word
        reason = "its kernels have no forward-mode derivative: use backend='gemm'"
    if backend == "auto":
        reason = reason or why_not_unasked(x.dtype, torch.get_float32_matmul_precision())
    facts = (hidden, cell, x.dtype, x.device)
    return take_fastest(backend, "persistent", "gemm", reason, "recurrence H %d %s %s on %s", *facts)


def why_not_unasked(dtype: torch.dtype, float32_precision: str) -> str | None:
    """Why "auto" leaves a persistent kernel that could run to those who ask for it by name; None if it takes it."""
    if dtype == torch.float32 and float32_precision == "highest":
        return (
            "its products are TF32, and torch.get_float32_matmul_precision() is 'highest': "
            "torch.set_float32_matmul_precision('high') or backend='persistent' allows them"
        )
    return None
