"""Which backend runs: the one that was named, or the fastest that can."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ds2_ops.checks import check_choice, check_x, choose_backend
from ds2_ops.recurrent.backends.persistent import why_not
from ds2_ops.recurrent.cells import CELLS

BACKENDS = ("auto", "persistent", "gemm", "reference", "cpu")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def resolve(backend: str, x: Tensor, cell: str, max_sms: int | None) -> str:
    """Check a call, and turn "auto" into a backend that runs it.

    This depends on the shape, dtype and device of ``x`` only, and is looked up for those seen before.

    Args:
        backend: one of `BACKENDS`.
        x: (T, B, G H), pre-activations, with the G gates of the cell.
        cell: a name in ``cells.CELLS``.
        max_sms: the most multiprocessors to use, or None.

    Raises:
        ValueError, TypeError: as `check_call`.
        RuntimeError: the named backend cannot run it.
    """
    # Tensors may have tangents; float32's products may be TF32.
    dual = getattr(forward_ad, "_current_level", -1) >= 0
    precision = torch.get_float32_matmul_precision() if x.dtype == torch.float32 else ""
    arguments = (backend, x.shape, x.dtype, x.device, cell, max_sms, dual, precision)
    try:
        return _resolve(*arguments)
    except TypeError:
        if not any(isinstance(size, torch.SymInt) for size in x.shape):  # sizes that are traced have no hash
            raise
        return _resolve.__wrapped__(*arguments)


def check_call(backend: str, shape: Sequence[int], dtype: torch.dtype, cell: str, max_sms: int | None) -> None:
    """Raise ValueError or TypeError unless these are allowed; arguments as of `resolve`, with the shape of x."""
    check_choice("cell", cell, tuple(CELLS))
    check_choice("backend", backend, BACKENDS)
    if max_sms is not None and max_sms < 1:
        raise ValueError(f"max_sms is {max_sms}, allowed are 1 or more, or None for all")
    check_x(shape, dtype, _DTYPES)
    gates = CELLS[cell].gates
    if shape[2] % gates:
        raise ValueError(
            f"x has shape {tuple(shape)}, expected (T, B, {gates} H): {gates} gates a hidden unit. "
            "These are pre-activations, inputs W_ih^T + b_ih; the modules ds2_ops.RNN, LSTM and GRU take inputs"
        )


@functools.lru_cache(maxsize=1024)
def _resolve(
    backend: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    cell: str,
    max_sms: int | None,
    dual: bool,
    float32_precision: str,
) -> str:
    check_call(backend, shape, dtype, cell, max_sms)
    frames, batch, width = shape
    if backend in ("gemm", "reference") or (0 in shape and device.type != "cpu"):  # nothing to run: all do the same
        return backend if backend == "reference" else "gemm"
    if backend == "cpu" or (backend == "auto" and device.type == "cpu"):
        if device.type != "cpu":
            raise RuntimeError(f"backend 'cpu' cannot run tensors on {device}: move them, or use backend='auto'")
        return "cpu"
    hidden = width // CELLS[cell].gates
    reason = why_not(frames, batch, hidden, dtype, device, cell, max_sms)
    if dual:  # a tangent would be lost silently
        reason = "its kernels have no forward-mode derivative: use backend='gemm'"
    if backend == "auto":
        reason = reason or why_not_unasked(dtype, float32_precision)
    facts = (hidden, cell, dtype, device)
    return choose_backend(backend, "persistent", "gemm", reason, "recurrence H %d %s %s on %s", *facts)


def why_not_unasked(dtype: torch.dtype, float32_precision: str) -> str | None:
    """Why "auto" does not take a persistent kernel that could run; None if it does."""
    if dtype == torch.float32 and float32_precision == "highest":
        return (
            "its products are TF32, and torch.get_float32_matmul_precision() is 'highest': "
            "torch.set_float32_matmul_precision('high') or backend='persistent' allows them"
        )
    return None
