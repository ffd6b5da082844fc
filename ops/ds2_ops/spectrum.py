"""Normalised log power spectra of windows of samples, for recognition of streams: one launch.

Shape letters: R rows of samples, B streams, F = W / 2 + 1 bins, T frames, W samples of a window.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from ds2_ops.jit.launch import Launch, names, parameters, run, translation_unit, why_not_early

_FRAMES = 10  # of a block
_MAX_WINDOW = 1024
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
        samples: (R, N) float32 contiguous on the GPU, or in pinned memory that the GPU reads; N is at least W.
        rows: (B,) int64 row of each stream.
        lengths: (B,) int64 valid frames of each stream.
        window: (W,) float32, for which `why_not` returns None.
        step: samples from one window to the next.
        mean, std: (F,) float32.
        floor: added to the power.

    Returns:
        (B, F, T) float32 with T = (N - W) // step + 1. Its bits do not depend on the batch.
    """
    batch, size, row = len(rows), len(window), samples.shape[1]
    frames = (row - size) // step + 1
    out = samples.new_empty(batch, size // 2 + 1, frames)
    arguments: list[Any] = [samples, rows, lengths, window, _turns(size, window.device), mean, std, out]
    arguments += [row, frames, step, floor]
    launch = log_power_launch(size, step, batch * -(-frames // _FRAMES))
    run(launch, arguments, lambda: f"spectra of {frames} windows of {size} samples, {batch} streams", window.device)
    return out


def why_not(window: Tensor) -> str | None:
    """Say why the kernel cannot take windows like this one; None if it can."""
    if not window.is_cuda or window.dtype != torch.float32:
        return f"the window is {window.dtype} on {window.device}, the kernel takes float32 on a CUDA GPU"
    if len(window) % 4 or len(window) > _MAX_WINDOW:
        return f"a window has {len(window)} samples, allowed are multiples of 4 up to {_MAX_WINDOW}"
    return why_not_early(window.device)


@functools.cache
@torch.inference_mode(False)  # a tensor made in inference mode could not be used outside of it later
def _turns(size: int, device: torch.device) -> Tensor:
    """(W, 2) cos and sin of 2 pi m / W."""
    angles = 2 * math.pi / size * torch.arange(size, dtype=torch.float64, device="cpu")
    return torch.stack([angles.cos(), angles.sin()], 1).float().to(device)


@functools.lru_cache(maxsize=256)
def log_power_launch(size: int, step: int, blocks: int) -> Launch:
    """Make the launch for windows of `size` samples, `step` samples apart."""
    half = (size // 4 + 32) // 32 * 32
    smem_bytes = 4 * (2 * (size // 4 + 1) * 4 * -(-2 * _FRAMES // 4) + 2 * size)
    source = translation_unit(
        "spectrum/log_power.cuh",
        _LOG_POWER,
        f"    ds2::log_power<{size}, {_FRAMES}>({{{names(_LOG_POWER)}}}, shared);\n",
        ahead=f"using Shape = ds2::LogPowerShape<{size}, {_FRAMES}>;\n"
        f"static_assert(Shape::THREADS == {2 * half} && Shape::SMEM_BYTES == {smem_bytes},"
        ' "spectrum.py and log_power.cuh disagree");\n',
        launch_bounds=str(2 * half),
        alignment=16,
    )
    samples_bytes = 4 * ((_FRAMES - 1) * step + size)
    return Launch(source, 2 * half, grid=blocks, smem_bytes=smem_bytes + samples_bytes, early=True)
