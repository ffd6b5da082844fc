"""Normalised log power spectra of windows of samples, which the kernel reads where they were written.

Shape letters: R rows of samples, B streams, F = W / 2 + 1 bins, T frames, W samples of a window.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from ds2_ops.jit import runtime
from ds2_ops.jit.launch import Launch, device_index, run
from ds2_ops.jit.source import names, parameters, translation_unit

_FRAMES = 10  # of a block
_MOST_WINDOW = 1024
_LOG_POWER = parameters(
    """const float* samples, const long long* rows, const long long* lengths, const float* window, const float* turns,
    const float* mean, const float* std, float* out, int row, int frames, int step, float floor"""
)


@torch.no_grad()
def log_power(
    samples: Tensor,
    rows: Tensor,
    lengths: Tensor,
    window: Tensor,
    step: int,
    mean: Tensor,
    std: Tensor,
    floor: float,
) -> Tensor:
    """Compute (ln(|DFT of window x samples|^2 + floor) - mean) / std of windows a step apart, 0 past lengths.

    Args:
        samples: (R, N) float32 contiguous on the GPU, or pinned and seen from it; N is at least W.
        rows: (B,) int64 which of them.
        lengths: (B,) int64 frames of each that count.
        window: (W,) float32, for which `why_not` finds no reason.
        step: samples between windows.
        mean, std: (F,) float32.
        floor: what is added to the power.

    Returns:
        (B, F, T) float32 with T = (N - W) // step + 1. Its bits do not depend on the batch.
    """
    batch, size, row = len(rows), len(window), samples.shape[1]
    frames = (row - size) // step + 1
    out = samples.new_empty(batch, size // 2 + 1, frames)
    given: list[Any] = [
        samples,
        rows,
        lengths,
        window,
        _turns(size, window.device),
        mean,
        std,
        out,
        row,
        frames,
        step,
        floor,
    ]
    launch = log_power_launch(size, step, batch * -(-frames // _FRAMES))
    run(launch, given, lambda: f"spectra of {frames} windows of {size} samples, {batch} streams", window.device)
    return out


def why_not(window: Tensor) -> str | None:
    """Say why the kernel does not take windows of this one's length and place; None if it does."""
    if not window.is_cuda or window.dtype != torch.float32:
        return f"the window is {window.dtype} on {window.device}"
    if len(window) % 4 or len(window) > _MOST_WINDOW:
        return f"{len(window)} samples a window are no multiple of 4, or more than {_MOST_WINDOW}"
    hopper = runtime.capability(device_index(window.device)) >= (9, 0)
    return None if hopper else "a kernel that starts early needs Hopper"


@functools.cache
@torch.inference_mode(False)  # whoever asks first is not the only one
def _turns(size: int, device: torch.device) -> Tensor:
    """(W, 2) cos and sin of 2 pi m / W."""
    angles = 2 * math.pi / size * torch.arange(size, dtype=torch.float64)
    return torch.stack([angles.cos(), angles.sin()], 1).float().to(device)


@functools.lru_cache(maxsize=256)
def log_power_launch(size: int, step: int, blocks: int) -> Launch:
    """The launch for windows of so many samples, so many apart."""
    half = (size // 4 + 32) // 32 * 32
    smem_bytes = 4 * (2 * (size // 4 + 1) * 4 * -(-2 * _FRAMES // 4) + 2 * size)
    source = translation_unit(
        "spectrum/log_power.cuh",
        _LOG_POWER,
        f"""    extern __shared__ __align__(16) unsigned char shared[];
    ds2::log_power<{size}, {_FRAMES}>({{{names(_LOG_POWER)}}}, shared);
""",
        ahead=f"using Shape = ds2::LogPowerShape<{size}, {_FRAMES}>;\n"
        f"static_assert(Shape::THREADS == {2 * half} && Shape::SMEM_BYTES == {smem_bytes},"
        ' "op.py and log_power.cuh disagree");\n',
        launch_bounds=str(2 * half),
    )
    samples_bytes = 4 * ((_FRAMES - 1) * step + size)
    return Launch(source, 2 * half, grid=blocks, smem_bytes=smem_bytes + samples_bytes, early=True)
