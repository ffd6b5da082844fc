"""Launches of batch norm: how rows are divided among blocks, and the kernels' arguments. Needs no framework.

Shape letters: B utterances, F bins, T frames, C channels, N rows: all axes but the channels taken together.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ds2_ops.jit.launch import Launch, Parameters, Source, names, parameters, translation_unit

THREADS = 256
NUMBERS = {"bfloat16": "Bf16", "float16": "Fp16", "float32": "Fp32"}
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
BYTES = 16  # of a load instruction
# Of a multiprocessor: both passes of 22,400 rows of 1152 take 121 us on an H200, with four blocks 139 us, because every
# block of the second launch reads the sums of all chunks of its columns.
_BLOCKS = 2
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
        dtype: of its elements, a key of `NUMBERS`.
        rows, channels: N and C.
        sms: multiprocessors of the GPU.
        bins, frames: F and T where rows are (B, F, T) with lengths; 0 where all rows are valid.
        clipped: whether clipped ReLU follows.
    """

    dtype: str
    rows: int
    channels: int
    sms: int
    bins: int = 0
    frames: int = 0
    clipped: bool = False

    @property
    def numbers(self) -> int:
        """Of a load instruction."""
        return BYTES // ELEMENT_BYTES[self.dtype]

    @property
    def lanes(self) -> int:
        """Threads that share a row."""
        return 8 if self.channels > 4 * self.numbers else 4

    @property
    def columns(self) -> int:
        """Blocks of columns."""
        return -(-self.channels // (self.lanes * self.numbers))

    @functools.cached_property
    def chunk(self) -> tuple[int, int]:
        """Rows of a chunk, and number of chunks."""
        max_chunks, rows_at_once = _BLOCKS * self.sms // self.columns, THREADS // self.lanes
        chunks = max(1, min(max_chunks, self.rows // (_MIN_ROWS * rows_at_once)))
        rows = -(-self.rows // chunks)
        rows += -rows % rows_at_once
        return rows, -(-self.rows // rows)

    def launch(self, kernel: str) -> Launch:
        """Make the launch of a kernel over all rows."""
        clipped = self.clipped and kernel != "sum_rows"
        source = _source(kernel, self.dtype, self.lanes, self.bins > 0, clipped)
        smem_bytes = THREADS * 2 * self.numbers * 8 if kernel.startswith("sum") else THREADS * 8
        return Launch(source, THREADS, grid=self.chunk[1] * self.columns, smem_bytes=smem_bytes)

    def shape(self, parts: int) -> tuple[int, ...]:
        """The arguments of every kernel behind the lengths; `parts` are the sums that a kernel reads, chunks or 1."""
        return (self.rows, self.channels, self.chunk[0], parts, self.columns, self.bins, self.frames)

    def __str__(self) -> str:
        """For the message of an error."""
        return f"{self.rows} rows of {self.channels} channels in {self.dtype}"


@functools.cache
def _source(kernel: str, dtype: str, lanes: int, ragged: bool, clipped: bool) -> Source:
    members, call = _KERNELS[kernel]
    flags = [ragged] if kernel == "sum_rows" else [ragged, clipped]
    template = ", ".join([f"ds2::{NUMBERS[dtype]}", str(lanes), *(str(flag).lower() for flag in flags)])
    return translation_unit(
        "batch_norm/rows.cuh",
        members,
        f"""    double* memory = reinterpret_cast<double*>(shared);
    const ds2::Rows rows_of{{{_ROW_NAMES}}};
    ds2::{kernel}<{template}>{call};
""",
        launch_bounds=f"{THREADS}, 2",
        alignment=16,
        threads=("NORM_THREADS", THREADS),
    )
