"""A recurrent layer for inference: the projection and the recurrence, whose kernels overlap.

Shape letters: T frames, B batch, R = T B rows, K width of the input, H hidden.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ds2_ops.checks import check_choice, check_lengths, check_like, check_shape, check_x, contiguous, lengths_on
from ds2_ops.jit.launch import Launch, device_index, multiprocessors, names, parameters, run, translation_unit
from ds2_ops.jit.runtime import capability, why_no_kernel
from ds2_ops.recurrent.autograd import options_of
from ds2_ops.recurrent.backends import persistent
from ds2_ops.recurrent.backends.choose import resolve
from ds2_ops.recurrent.calibrate import choose_tile
from ds2_ops.recurrent.cells import CELLS, PLAIN
from ds2_ops.recurrent.op import check_tensors, recurrence
from ds2_ops.recurrent.plan.problem import MMA_ROWS, MMA_WORDS, NUMBERS, THREADS, WARPS, Design, Problem

Weights = tuple[Tensor, Tensor, Tensor]  # weight_ih, bias, weight_hh
MAX_ROWS = 4096  # for more, a library's product is several times as fast
_MIN_LIBRARY_ROWS = 32  # of x on a CPU: for fewer, oneDNN's preparations take longer than they save
_MIN_SHARE_ROWS = 64  # of a block
_WIDE_ROWS = 256  # of x; with as many or more, a block has two tiles of W
# The most pairs of matrix instructions along a warp's share of K for which a multiprocessor has registers:
_WIDE_PAIRS = 6  # for one block with two tiles
_NARROW_PAIRS = 3  # for two blocks with two tiles
_MAX_PAIRS = 10  # for one tile: two rows of x share the registers with the weights
_CLUSTER = 16  # clusters fill few GPCs, so that a whole GPC is free for the recurrence that follows
_PROJECTION = parameters(
    """const void* x, const void* matrix, const void* bias, const int* begin, void* z,
    int rows, int batch, int width, int hidden, int shares"""
)


def why_no_projection(x: Tensor, weight: Tensor, bias: Tensor) -> str | None:
    """Say why the kernel cannot run this projection; None if it can.

    Args:
        x: (T, B, K).
        weight: (H, K); bias: (H,).
    """
    rows, width = x.shape[0] * x.shape[1], x.shape[2]
    if not x.is_cuda or capability(device_index(x.device)) != (9, 0):
        return f"x is on {x.device}, the kernel needs a Hopper GPU"
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"x is {x.dtype}, the kernel multiplies 16-bit numbers"
    if not 1 <= rows <= MAX_ROWS:
        return f"x has {rows} rows, the kernel takes 1 to {MAX_ROWS}"
    if _pairs(width) > _MAX_PAIRS or width % 8 or x.data_ptr() % 16 or weight.data_ptr() % 16:
        return f"rows of {width} numbers are too long, or are not aligned to 16 bytes"
    if not (weight.is_contiguous() and bias.is_contiguous()):  # the kernel would read a copy before it is written
        return "weight or bias is not contiguous"
    return why_no_kernel(device_index(x.device))


def launch_projection(
    x: Tensor, weight: Tensor, bias: Tensor, begin: Tensor | None, *, concurrent: bool = False
) -> Tensor:
    """Run `project` by the kernel; `why_no_projection` returned None for the arguments, and x is contiguous."""
    frames, batch, width = x.shape
    hidden = weight.shape[0]
    z = x.new_empty(frames, batch, hidden)
    dtype = str(x.dtype).removeprefix("torch.")
    rows = frames * batch
    launch, shares = projection_launch(width, hidden, dtype, multiprocessors(x.device), concurrent, rows)
    arguments = [x, weight, bias, begin, z, rows, batch, width, hidden, shares]
    run(launch, arguments, lambda: f"projection of (T, B, K) = {tuple(x.shape)} to H {hidden}, {x.dtype}", x.device)
    return z


@functools.lru_cache(maxsize=256)
def projection_launch(
    width: int, hidden: int, dtype: str, sms: int, concurrent: bool = False, rows: int = 1
) -> tuple[Launch, int]:
    """Return the launch for a width, a hidden size and a dtype of `Problem`, and the number of shares of the rows.

    `sms`: multiprocessors of the GPU.
    """
    pairs = _pairs(width)
    tiles = 2 if rows >= _WIDE_ROWS and pairs <= _WIDE_PAIRS else 1
    running_blocks = sms if tiles == 2 and pairs > _NARROW_PAIRS else 2 * sms  # at the same time
    row_blocks = -(-hidden // (tiles * MMA_ROWS))
    shares = max(1, min(-(-rows // _MIN_SHARE_ROWS), running_blocks // row_blocks))
    cluster = 1 if concurrent or shares > 1 else _CLUSTER
    smem_bytes = tiles * WARPS * THREADS * 4
    source = translation_unit(
        "recurrent/projection.cuh",
        _PROJECTION,
        f"    ds2::project<Shape>({{{names(_PROJECTION)}}});\n",
        ahead=f"using Shape = ds2::ProjectionShape<ds2::{NUMBERS[dtype][0]}, {pairs}, {tiles}, {cluster}>;\n"
        f'static_assert(Shape::SMEM_BYTES == {smem_bytes}, "layer.py and projection.cuh disagree");\n',
        launch_bounds="Shape::ALL_THREADS, 1",
    )
    grid = -(-row_blocks // cluster) * cluster * shares
    return Launch(source, THREADS, grid=grid, cluster=cluster, smem_bytes=smem_bytes, early=not concurrent), shares


def _pairs(width: int) -> int:
    return -(-width // (2 * 2 * MMA_WORDS * WARPS))


@torch.no_grad()
def recurrent_layer(
    x: Tensor,
    weight_ih: Tensor,
    bias: Tensor,
    weight_hh: Tensor,
    h0: Tensor | None = None,
    c0: Tensor | None = None,
    lengths: Tensor | None = None,
    begin: Tensor | None = None,
    *,
    cell: str = "clipped_relu",
    clip: float = 20.0,
    backend: str = "auto",
    max_sms: int | None = None,
    projection_stream: torch.cuda.Stream | None = None,
) -> tuple[Tensor, ...]:
    """Run :func:`ds2_ops.recurrence` on W_ih x_t + b without gradients (Persistent RNNs, 2016, section 3, equation 2).

    On the persistent kernels and up to `MAX_ROWS` rows T B, both kernels load their weights while the previous kernels
    of the stream still run (programmatic dependent launch), also in a CUDA graph. No kernel that still runs may write
    the weights. The bits of an utterance then depend neither on its batch nor on the lengths of its blocks
    (`ds2_ops.recurrent.calibrate.choose_tile`).

    Args:
        x: (T, B, K).
        weight_ih: (G H, K); bias: (G H,); weight_hh: (G H, H). Same dtype and device as ``x``.
        h0, c0, lengths, clip, backend, max_sms: as for :func:`ds2_ops.recurrence`.
        begin: (B,) int32 on the device, the first frame of each utterance; W_ih x_t + b is 0 before it, so states of 0
            stay 0. None: all 0.
        cell: "lstm", or a cell of one gate.
        projection_stream: a stream for the projection, where layers on other streams share the GPU. ``x`` must be ready
            on it, not on the current stream. The projection leaves multiprocessors to the other layers.

    Returns:
        y (T, B, H) and h_n (B, H), of an LSTM also c_n, as :func:`ds2_ops.recurrence`.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`ds2_ops.recurrence`.
    """
    check_choice("cell", cell, (*PLAIN, "lstm"))
    gates, rows = CELLS[cell].gates, len(weight_ih)
    legend = "H" if gates == 1 else f"{gates} H"
    check_x(x.shape, x.dtype, (torch.bfloat16, torch.float16, torch.float32, torch.float64))
    check_shape("weight_ih", weight_ih, (rows, x.shape[2]), f"({legend}, K)")
    check_shape("bias", bias, (rows,), f"({legend},)")
    check_shape("weight_hh", weight_hh, (rows, rows // gates), f"({legend}, H)")
    for name, tensor in (("weight_ih", weight_ih), ("bias", bias), ("weight_hh", weight_hh)):
        check_like(name, tensor, x)
    weights = weight_ih, bias, weight_hh
    if cell == "lstm" and backend in ("auto", "cpu") and _library_takes(x, h0, c0, begin):
        return _lstm_of_library(x, weights, h0, c0, lengths, begin)
    early = _starts_early(x, weights, cell, backend, max_sms)
    z = _project_on(x, weight_ih, bias, begin, projection_stream)
    if not early:
        options: dict[str, Any] = {"cell": cell, "c0": c0, "clip": clip, "backend": backend, "max_sms": max_sms}
        return recurrence(z, weight_hh, h0, lengths, **options)
    check_tensors(cell, z, weight_hh, None, h0, c0)
    inputs = z, weight_hh, None, contiguous(h0), contiguous(c0), _lengths_of(z, lengths)
    y, h_n, c_n, _ = persistent.forward(inputs, options_of(cell, clip, max_sms, x.dtype, early=True))
    return (y, h_n) if c_n is None else (y, h_n, c_n)


def _library_takes(x: Tensor, h0: Tensor | None, c0: Tensor | None, begin: Tensor | None) -> bool:
    """Whether torch's LSTM computes a layer: on a CPU, where states stay 0 until an utterance begins."""
    if x.device.type != "cpu" or x.dtype != torch.float32 or len(x) * x.shape[1] < _MIN_LIBRARY_ROWS:
        return False
    return begin is None or not any(s is not None and bool(s[begin > 0].any()) for s in (h0, c0))


def _lstm_of_library(
    x: Tensor, weights: Weights, h0: Tensor | None, c0: Tensor | None, lengths: Tensor | None, begin: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Run an LSTM by torch's for CPUs, in one call for the utterances of equal first and last frames.

    Its library (oneDNN) keeps all steps of a layer in one kernel, but takes no pre-activations.
    """
    weight_ih, bias, weight_hh = weights
    frames, batch, _ = x.shape
    shape = (batch, weight_hh.shape[1])
    z = x[..., :1].expand(-1, -1, len(weight_ih))
    check_tensors("lstm", z, weight_hh, None, h0, c0)
    lengths = _lengths_of(x, lengths)
    ends = [frames] * batch if lengths is None else lengths.tolist()
    begins = [0] * batch if begin is None else begin.clamp_max(frames).tolist()
    y, h_n, c_n = x.new_zeros(frames, *shape), *(x.new_zeros(shape) if s is None else s.clone() for s in (h0, c0))
    parameters = [weight_ih, weight_hh, bias, torch.zeros_like(bias)]
    spans = list(zip(begins, ends, strict=True))
    for first, end in set(spans):
        if first < end:
            rows = [row for row, span in enumerate(spans) if span == (first, end)]
            own = slice(None) if len(rows) == batch else torch.tensor(rows, device=x.device)
            states = (h_n[own][None], c_n[own][None])
            y[first:end, own], h, c = torch.lstm(
                x[first:end, own], states, parameters, True, 1, 0.0, False, False, False
            )
            h_n[own], c_n[own] = h[0], c[0]
    return y, h_n, c_n


def _lengths_of(x: Tensor, lengths: Tensor | None) -> Tensor | None:
    """Check the lengths of x (T, B, ...) and copy them to its device."""
    check_lengths(lengths, x.shape[1])
    return lengths_on(lengths, len(x), x.device)


@torch.no_grad()
def project(x: Tensor, weight: Tensor, bias: Tensor, begin: Tensor | None, *, concurrent: bool = False) -> Tensor:
    """Compute W x + b without gradients, 0 before each utterance's first frame.

    On a Hopper GPU in 16-bit types, up to `MAX_ROWS` rows T B, its bits do not depend on T and B.

    Args:
        x: (T, B, K) contiguous.
        weight: (H, K); bias: (H,); not written by kernels that still run.
        begin: (B,) int32 first frames on the device, or None for 0.
        concurrent: recurrences of other streams run at the same time: launch single blocks, since clusters would wait.

    Returns:
        (T, B, H).
    """
    if why_no_projection(x, weight, bias) is None:
        return launch_projection(x, weight, bias, begin, concurrent=concurrent)
    z = functional.linear(x, weight, bias)
    return z if begin is None else z * (torch.arange(len(x), device=x.device)[:, None] >= begin)[:, :, None]


def _project_on(
    x: Tensor, weight: Tensor, bias: Tensor, begin: Tensor | None, projection_stream: torch.cuda.Stream | None
) -> Tensor:
    """Run `project` on another stream, on which x is ready, if there is one; the current stream waits for it."""
    if projection_stream is None:
        return project(x.contiguous(), weight, bias, begin)
    with torch.cuda.stream(projection_stream):
        z = project(x.contiguous(), weight, bias, begin, concurrent=True)
    current = torch.cuda.current_stream(x.device)
    current.wait_stream(projection_stream)
    z.record_stream(current)
    return z


def why_not_concurrent(
    batch: int, hidden: int, dtype: torch.dtype, device: torch.device, cell: str, max_sms: int
) -> str | None:
    """Say why layers cannot run at the same time on `max_sms` multiprocessors each; None if they can."""
    reason = persistent.why_not(1, batch, hidden, dtype, device, cell, max_sms)
    if reason is None:
        problem, index = persistent.problem_of(batch, hidden, dtype, cell, False), device_index(device)
        if choose_tile(problem, index, max_sms, True).launch.cooperative:
            reason = f"recurrences of {hidden} units and {batch} utterances need the whole chip"
        elif CELLS[cell].gates > 1 and (dtype == torch.float32 or not _in_clusters(problem, index, None)):
            reason = f"{cell} layers of {hidden} units in {dtype} would have other bits on few multiprocessors"
    return reason


def _starts_early(x: Tensor, weights: Weights, cell: str, backend: str, max_sms: int | None) -> bool:
    """Return whether the recurrence can load its weights while the projection of x (T, B, K) still runs.

    Weights that are not contiguous would be copied by a kernel that still runs.
    """
    weight_ih, bias, weight_hh = weights
    if not weight_hh.is_contiguous() or why_no_projection(x, weight_ih, bias) is not None:
        return False
    pre_activations = x[..., :1].expand(-1, -1, len(weight_ih))
    if resolve(backend, pre_activations, cell, max_sms) != "persistent":
        return False
    index, hidden = device_index(x.device), len(weight_ih) // CELLS[cell].gates
    problem = persistent.problem_of(x.shape[1], hidden, x.dtype, cell, False)
    return _in_clusters(problem, index, max_sms) and choose_tile(problem, index, max_sms, True).design is Design.CLUSTER


def _in_clusters(problem: Problem, index: int, max_sms: int | None) -> bool:
    """Return whether the cluster design runs this layer for every batch, since bits must not depend on the batch.

    Small layers with gates have a faster design, which does not start early.
    """
    return problem.cell.gates == 1 or choose_tile(problem._replace(batch=1), index, max_sms).design is Design.CLUSTER
