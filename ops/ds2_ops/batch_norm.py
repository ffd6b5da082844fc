"""Batch norm of ragged batches on a GPU, with the clip that follows it, and sums over ranks between its launches.

From top to bottom: the launches (sums over rows, then the transform, in both passes), the operator, and the equation as
a reference.

Shape letters: B utterances, F bins, T frames, C channels, N rows: all axes but the channels taken together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds2_ops.checks import refuse_second_derivative, why_no_gpu
from ds2_ops.jit.launch import Launch, Parameters, Source, names, parameters, run, translation_unit

THREADS = 256
_NUMBERS = {torch.bfloat16: "Bf16", torch.float16: "Fp16", torch.float32: "Fp32"}
_BYTES = 16  # of a load instruction
# Two for each of an H200's 132 multiprocessors: both passes of 22,400 rows of 1152 take 121 us, with 528 blocks 139 us,
# because every block of the second launch reads the sums of all chunks of its columns.
_BLOCKS = 264
_MIN_ROWS = 4  # of a thread: fewer are not worth the start of a block
_ROWS = (
    "const int* lengths, int rows, int channels, int chunk_rows, int chunks, int column_blocks, int bins, int frames"
)
_ROW_NAMES = names(parameters(_ROWS))
_CHANNEL = "const float* weight, const float* bias, const float* mean, const float* inverse"
_KERNELS: dict[str, tuple[Parameters, str]] = {
    name: (parameters(f"{_ROWS}, {declarations}"), call)
    for name, (declarations, call) in {
        "sum_rows": ("double* partial, const void* x", "(rows_of, x, partial, memory)"),
        "normalise": (
            """const double* partial, const void* x, void* y, const int* count, const float* weight, const float* bias,
            float* mean, float* inverse, float* running_mean, float* running_var, float share, float eps, float clip""",
            "(rows_of, x, y, partial, count, weight, bias, {mean, inverse, running_mean, running_var, share}, eps, "
            "clip, memory)",
        ),
        "sum_gradients": (
            f"double* partial, const void* grad_y, const void* x, {_CHANNEL}, float clip",
            "(rows_of, grad_y, x, {weight, bias, mean, inverse}, partial, clip, memory)",
        ),
        "backward_rows": (
            f"""const double* partial, const void* grad_y, const void* x, void* grad_x, const int* count, {_CHANNEL},
            float* grad_weight, float* grad_bias, float clip""",
            "(rows_of, grad_y, x, grad_x, partial, count, {weight, bias, mean, inverse}, grad_weight, grad_bias, clip, "
            "memory)",
        ),
    }.items()
}


@dataclass(frozen=True)
class Rows:
    """How the kernels divide a contiguous tensor (..., C) among blocks.

    Attributes:
        dtype: of its elements.
        rows, channels: N and C.
        bins, frames: F and T where rows are (B, F, T) with lengths; 0 where all rows are valid.
        clipped: whether clipped ReLU follows.
    """

    dtype: torch.dtype
    rows: int
    channels: int
    bins: int = 0
    frames: int = 0
    clipped: bool = False

    @property
    def lanes(self) -> int:
        """Threads that share a row."""
        return 8 if self.channels > 4 * _BYTES // self.dtype.itemsize else 4

    @property
    def columns(self) -> int:
        """Blocks of columns."""
        return -(-self.channels // (self.lanes * _BYTES // self.dtype.itemsize))

    @functools.cached_property
    def chunk(self) -> tuple[int, int]:
        """Rows of a chunk, and number of chunks."""
        max_chunks, rows_at_once = _BLOCKS // self.columns, THREADS // self.lanes
        chunks = max(1, min(max_chunks, self.rows // (_MIN_ROWS * rows_at_once)))
        rows = -(-self.rows // chunks)
        rows += -rows % rows_at_once
        return rows, -(-self.rows // rows)

    def partial(self, device: torch.device) -> Tensor:
        """Allocate the sums of each chunk, which the second launch reads: (chunks, 2, C) float64."""
        return torch.empty(self.chunk[1], 2, self.channels, dtype=torch.float64, device=device)

    def launch(self, kernel: str) -> Launch:
        """Make the launch of a kernel over all rows."""
        clipped = self.clipped and kernel != "sum_rows"
        source = _source(kernel, self.dtype, self.lanes, self.bins > 0, clipped)
        smem_bytes = THREADS * 2 * (_BYTES // self.dtype.itemsize) * 8 if kernel.startswith("sum") else THREADS * 8
        return Launch(source, THREADS, grid=self.chunk[1] * self.columns, smem_bytes=smem_bytes)

    def run(self, kernel: str, lengths: Tensor | None, partial: Tensor, *arguments: Tensor | float | None) -> None:
        """Launch a kernel; `partial` holds the sums of each chunk, (chunks, 2, C), or of all, (1, 2, C)."""
        chunk_rows, _ = self.chunk
        shape = (lengths, self.rows, self.channels, chunk_rows, len(partial), self.columns, self.bins, self.frames)

        def what() -> str:
            return f"batch norm, {kernel} of {self.rows} rows of {self.channels} channels in {self.dtype}"

        run(self.launch(kernel), [*shape, partial, *arguments], what, partial.device)


@functools.cache
def _source(kernel: str, dtype: torch.dtype, lanes: int, ragged: bool, clipped: bool) -> Source:
    members, call = _KERNELS[kernel]
    flags = [ragged] if kernel == "sum_rows" else [ragged, clipped]
    template = ", ".join([f"ds2::{_NUMBERS[dtype]}", str(lanes), *(str(flag).lower() for flag in flags)])
    return translation_unit(
        "batch_norm/rows.cuh",
        members,
        f"""    extern __shared__ __align__(16) unsigned char shared[];
    double* memory = reinterpret_cast<double*>(shared);
    const ds2::Rows rows_of{{{_ROW_NAMES}}};
    ds2::{kernel}<{template}>{call};
""",
        ahead=f'static_assert(ds2::NORM_THREADS == {THREADS}, "batch_norm.py and rows.cuh disagree");\n',
        launch_bounds=f"{THREADS}, 2",
    )


def why_not(dtype: torch.dtype, channels: int, device: torch.device) -> str | None:
    """Say why the kernels cannot normalise channels of a dtype on a device; None if they can."""
    if device.type != "cuda":
        return why_no_gpu(device)
    if dtype not in _NUMBERS:
        return f"the data is {dtype}, the kernels support bfloat16, float16 and float32"
    numbers = _BYTES // dtype.itemsize
    if channels % numbers:
        return f"there are {channels} channels, the kernels load {numbers} at a time"
    return _why_not_device(device)


@functools.cache
def _why_not_device(device: torch.device) -> str | None:
    if reason := why_no_gpu(device):
        return reason
    try:
        from ds2_ops.jit.build import compiler_version

        compiler_version()
    except RuntimeError as error:
        return str(error)
    return None


# Sums over chunks and ranks. Arguments: sums of chunks of rows (K, 2, C) float64, which may be overwritten, and None or
# (2, C) float32 to receive the sums of this rank. Returns the sums over all chunks and ranks (1, 2, C).
Reduce = Callable[[Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class RunningStatistics:
    """Running averages (C,) float32: mean and variance of a batch enter them with weight `share`."""

    mean: Tensor
    var: Tensor
    share: float


def batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    count: Tensor,
    *,
    eps: float,
    lengths: Tensor | None = None,
    clip: float | None = None,
    running: RunningStatistics | None = None,
    reduce: Reduce | None = None,
) -> Tensor:
    """Normalise each channel over the valid positions, y = (x - mean) / sqrt(var + eps) * weight + bias.

    (Deep Speech 2, section 3.2.) Two launches in each pass; statistics are float64 sums of sums of four numbers in
    float32. Runs on torch's current stream, can be captured in a CUDA graph, gives the same bits on every run.
    Differentiable in ``x``, ``weight`` and ``bias``. Requires that `why_not` returns None.

    Args:
        x: (..., C) contiguous, bfloat16, float16 or float32. Without ``lengths``, x and the gradient of y must be 0 at
            padding.
        weight, bias: (C,) float32.
        count: (1,) int32 on the device, valid positions, at least 1; with ``reduce`` those of all ranks.
        eps: added to the variance, the mean square deviation.
        lengths: (B,) int32 on the device, valid frames of x (B, F, T, C): padding is ignored, comes out as 0 and has no
            gradient.
        clip: apply clipped ReLU up to this value in the same launch; None: no nonlinearity.
        running: averages to update.
        reduce: sums over chunks and ranks; the statistics are then those of all ranks.

    Returns:
        y like x.
    """
    y: Tensor = _BatchNorm.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, count, lengths, eps, clip, running, reduce
    )
    return y


class _BatchNorm(torch.autograd.Function):
    """Saves only the input and vectors of channels; the backward pass recomputes where the clip applies."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, count: Tensor, lengths: Tensor | None, eps: float,
        clip: float | None, running: RunningStatistics | None, reduce: Reduce | None,
    ) -> Tensor:  # fmt: skip
        channels, device = x.shape[-1], x.device
        bins, frames = (x.shape[1], x.shape[2]) if lengths is not None else (0, 0)
        rows = Rows(x.dtype, x.numel() // channels, channels, bins, frames, clip is not None)
        limit = 0.0 if clip is None else clip
        partial = rows.partial(device)
        rows.run("sum_rows", lengths, partial, x)
        if reduce is not None:
            partial = reduce(partial, None)
        mean, inverse = torch.empty(2, channels, device=device)
        averages = (None, None, 0.0) if running is None else (running.mean, running.var, running.share)
        y = torch.empty_like(x)
        rows.run("normalise", lengths, partial, x, y, count, weight, bias, mean, inverse, *averages, eps, limit)
        ctx.save_for_backward(x, weight, bias, mean, inverse, count, lengths)
        ctx.rows, ctx.clip, ctx.reduce = rows, limit, reduce
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("batch_norm")
        x, weight, bias, mean, inverse, count, lengths = ctx.saved_tensors
        rows = ctx.rows
        channel = (weight, bias, mean, inverse)
        grad_y = grad_y.contiguous()
        partial = rows.partial(x.device)
        rows.run("sum_gradients", lengths, partial, grad_y, x, *channel, ctx.clip)
        grad_weight: Tensor | None = torch.empty_like(mean)
        grad_bias: Tensor | None = torch.empty_like(mean)
        gradients = grad_weight, grad_bias
        if ctx.reduce is not None:
            own = torch.empty(2, len(mean), device=x.device)
            partial = ctx.reduce(partial, own)
            gradients = own[1] * inverse, own[0]
            grad_weight = grad_bias = None
        grad_x = torch.empty_like(x)
        outputs = (grad_weight, grad_bias)
        rows.run("backward_rows", lengths, partial, grad_y, x, grad_x, count, *channel, *outputs, ctx.clip)
        return grad_x, *gradients, None, None, None, None, None, None


def batch_norm_reference(
    x: Tensor, weight: Tensor, bias: Tensor, valid: Tensor, *, eps: float, clip: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise each channel over the valid positions (Deep Speech 2, section 3.2).

    Args:
        x: (..., C); values at padding are ignored.
        weight, bias: (C,).
        valid: (...) bool, True for valid positions.
        eps: added to the variance.
        clip: apply clipped ReLU up to this value; None: no nonlinearity.

    Returns:
        y like x, 0 at padding; mean and variance (C,).
    """
    rows = x[valid]
    mean, var = rows.mean(0), rows.var(0, correction=0)
    normal = (rows - mean) / torch.sqrt(var + eps) * weight + bias
    if clip is not None:
        normal = normal.clamp(0.0, clip)
    y = torch.zeros_like(x)
    y[valid] = normal
    return y, mean, var
