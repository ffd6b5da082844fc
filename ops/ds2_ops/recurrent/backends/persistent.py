"""The persistent recurrence on the GPU: weights stay on chip for all time steps, one launch a pass.

Everything runs on torch's current stream, without host synchronisation, and can be captured in a CUDA graph. Two
directions run in one launch: their rows alternate in every array.
Shape letters: T frames, B batch, H hidden, G gates, S saved values.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ds2_ops.jit.launch import Launch, Source, device_index, names, parameters, run, run_on, translation_unit
from ds2_ops.recurrent.backends.reference import BackwardInputs, Gradients, Inputs, Outputs
from ds2_ops.recurrent.calibrate import choose_tile
from ds2_ops.recurrent.cells import CELLS, Cell, Options
from ds2_ops.recurrent.deferred import Prefetch
from ds2_ops.recurrent.plan.problem import Choice, Design, DoesNotFit, Problem, check_rows, common, pass_arguments


@functools.lru_cache(maxsize=1024)
def why_not(
    frames: int,
    batch: int,
    hidden: int,
    dtype: torch.dtype,
    device: torch.device,
    cell: str,
    max_sms: int | None,
    directions: int = 1,
) -> str | None:
    """Say why the persistent backend cannot run this recurrence, forward and backward; None if it can.

    Args:
        frames, batch, hidden: T, B, H.
        dtype, device: of all tensors.
        cell, max_sms: as of `Options`.
        directions: 2 for both in one launch.
    """
    if device.type != "cuda":
        return f"the tensors are on {device}; the persistent kernels need a CUDA GPU: use backend='cpu' or 'auto'"
    if frames == 0 or batch == 0 or hidden == 0:
        return f"there is nothing to launch for shape ({frames}, {batch}, {hidden}): use backend='gemm'"
    try:
        check_rows(frames, directions * batch)
        for backward in (False, True):
            problem = problem_of(batch, hidden, dtype, cell, backward, directions)
            choose_tile(problem, device_index(device), max_sms)
    except (DoesNotFit, RuntimeError) as error:
        return str(error)
    return None


def forward(inputs: Inputs, options: Options, save: bool = False) -> Outputs:
    """Run the forward time loop (Persistent RNNs, Diamos et al. 2016, sections 3 and 4).

    Sums are fp32, and so are c and the functions of cells with gates, to within 2e-7. Products of 16-bit numbers are
    exact; those of fp32 go through TF32 (10 explicit mantissa bits), as torch's own do when
    ``torch.backends.cuda.matmul.allow_tf32`` is set. The bits are the same on every run and do not depend on where T is
    cut.

    Args:
        inputs:
            x (T, B, G H), contiguous pre-activations on a CUDA device, or (T, B, 2, G H) of both directions, the second
            of which begins at each utterance's last frame;
            weight_hh (G H, H), or (2, G H, H), contiguous, same dtype and device;
            bias_hn (H,) or (2, H), contiguous, of the last gate's recurrent product; or None;
            h0 (B, H) or (B, 2, H), contiguous first state, or None for zeros; c0 as h0, in float32;
            lengths (B,) int32 on the device, or None when all utterances have T frames.
        options: the cell, its clip, and the most multiprocessors to use.
        save: whether a backward pass will follow.

    Returns:
        y (T, B, H) or (T, B, 2, H), 0 at padding; h_n as h0, the state after each utterance's last frame; c_n, None
        where the cell has none; what backward needs of a cell with gates (T, B, S, H) or (T, B, 2, S, H), or None.

    Raises:
        DoesNotFit: the planner's reason.
        RuntimeError: the driver's or compiler's error, with op, shape, dtype, tile and GPU.
    """
    x, weight_hh, bias_hn, h0, c0, lengths = inputs
    cell = CELLS[options.cell]
    rows, hidden = x.shape[:-1], weight_hh.shape[-1]
    y, h_n = x.new_empty(*rows, hidden), x.new_empty(*rows[1:], hidden)
    c_n = _empty_c(cell, h_n)
    saved = x.new_empty(*rows, cell.saved, hidden) if save and cell.saved else None
    of_gates = (saved, bias_hn, c0, c_n, None) if cell.gates > 1 else ()
    _launch(False, x, hidden, options, (x, None, weight_hh, h0, lengths, y, h_n, *of_gates))
    return y, h_n, c_n, saved


def backward_data(inputs: BackwardInputs, options: Options, weight_t: Tensor | None = None) -> Gradients:
    """Run the time loop backwards: gradients of the pre-activations and of the first state.

    Args:
        inputs:
            the gradient of y (T, B, H) or (T, B, 2, H), contiguous; what it holds at padding does not matter;
            the gradients of h_n and c_n, contiguous, or None for zeros;
            y and what was saved, as ``forward`` returned them; weight_hh and lengths, as ``forward``.
        options: as ``forward``.
        weight_t: the transpose of ``weight_hh``, if it exists already.

    Returns:
        grad_x, 0 at padding; the gradient of the last gate's recurrent product, as y, or None where it is that of x;
        grad_h0; grad_c0, None where the cell has none.

    Raises:
        DoesNotFit, RuntimeError: as ``forward``.
    """
    grad_y, grad_h_n, grad_c_n, y, saved, weight_hh, lengths = inputs
    cell = CELLS[options.cell]
    rows, hidden = grad_y.shape[:-1], weight_hh.shape[-1]
    grad_x, grad_h0 = grad_y.new_empty(*rows, cell.gates * hidden), grad_y.new_empty(*rows[1:], hidden)
    grad_last = torch.empty_like(grad_y) if cell.last_apart else None
    grad_c0 = _empty_c(cell, grad_h0)
    matrix = transposed(weight_hh) if weight_t is None else weight_t
    output_y, of_gates = (None, (saved, None, grad_c_n, grad_c0, grad_last)) if cell.gates > 1 else (y, ())
    arrays = (grad_y, output_y, matrix, grad_h_n, lengths, grad_x, grad_h0, *of_gates)
    _launch(True, grad_y, hidden, options, arrays)
    return grad_x, grad_last, grad_h0, grad_c0


def _empty_c(cell: Cell, h: Tensor) -> Tensor | None:
    return torch.empty_like(h, dtype=torch.float32) if cell.carries_c else None


def _launch(backward: bool, x: Tensor, hidden: int, options: Options, arrays: Sequence[Tensor | None]) -> None:
    """Plan, build and launch one pass.

    Args:
        backward: which pass.
        x: an array of as many frames, utterances and directions.
        hidden: H.
        options: the cell, its clip, the most multiprocessors to use.
        arrays: of struct Pass of csrc/recurrent/pass.cuh, from input to last_state, and from saved on where the cell
            has gates; shaped as that struct says; None for a null pointer.
    """
    shape, device = x.shape, x.device
    frames, batch, directions = shape[0], shape[1], 1 if len(shape) == 3 else shape[2]
    check_rows(frames, directions * batch)
    problem = problem_of(batch, hidden, x.dtype, options.cell, backward, directions)
    index = device_index(device)
    choice = choose_tile(problem, index, options.max_sms, options.early)
    pointers = [0 if tensor is None else tensor.data_ptr() for tensor in arrays]
    if common(pointers) % 4:
        # A view of 16-bit numbers may start inside a word, and the kernels read words. Copies live until the launch.
        arrays = tuple(t.clone() if t is not None and t.data_ptr() % 4 else t for t in arrays)
        pointers = [0 if tensor is None else tensor.data_ptr() for tensor in arrays]
    if words := choice.exchange_words:
        exchange = torch.empty(words, dtype=torch.int32, device=device)
    numbers = pass_arguments(choice, problem, frames, pointers, options.clip, exchange.data_ptr() if words else 0)
    launch = choice.early if options.early and choice.design is Design.CLUSTER else choice.launch
    run_on(launch, numbers, functools.partial(_what, problem, frames, choice), index)


@functools.lru_cache(maxsize=1024)
def problem_of(batch: int, hidden: int, dtype: torch.dtype, cell: str, backward: bool, directions: int = 1) -> Problem:
    """The planner's problem that a pass on tensors of a dtype is."""
    return Problem(batch, hidden, str(dtype).removeprefix("torch."), cell, backward, directions)


def _what(problem: Problem, frames: int, choice: Choice) -> str:
    shape = (frames, problem.batch, problem.hidden)
    name = "backward_data" if problem.backward else "forward"
    both = " in both directions" if problem.directions > 1 else ""
    return (
        f"persistent {problem.nonlinearity} {name}{both} of (T, B, H) = {shape}, torch.{problem.dtype}, "
        f"{choice.explain()}"
    )


_THREADS, _TILE = 256, 64
_STORED = {2: "unsigned short", 4: "unsigned"}  # numbers by their bytes


@functools.cache
def transposition(item_bytes: int) -> Source:
    """The kernel that transposes a matrix of numbers of 2 or 4 bytes."""
    arguments = parameters("const void* from, void* to, int rows, int columns")
    return translation_unit(
        "recurrent/transpose.cuh",
        arguments,
        f"    ds2::transpose<{_STORED[item_bytes]}>({names(arguments)}, shared);\n",
        ahead=f"static_assert(ds2::TRANSPOSE_THREADS == {_THREADS} && ds2::TRANSPOSE_TILE == {_TILE}, "
        '"persistent.py and transpose.cuh disagree");\n',
        launch_bounds=str(_THREADS),
        alignment=16,
    )


def transposed(matrix: Tensor) -> Tensor:
    """The transpose (C, R), contiguous, of a contiguous matrix (R, C) on a GPU; of each of (2, R, C)."""
    return transpose_of(matrix).take()


def transpose_of(matrix: Tensor) -> Prefetch:
    """The transpose of a recurrent matrix that a backward pass will load; as `transposed`."""
    shape = (*matrix.shape[:-2], matrix.shape[-1], matrix.shape[-2])
    return Prefetch(lambda: matrix.new_empty(shape), lambda result: transpose_into(result, matrix))


def transpose_into(result: Tensor, matrix: Tensor) -> None:
    """Write the transpose of a contiguous matrix, or of each of two, on a GPU into a contiguous tensor."""
    if matrix.dim() > 2:
        for one, other in zip(result, matrix, strict=True):
            transpose_into(one, other)
        return
    rows, columns = matrix.shape
    launch = _transposing(rows, columns, matrix.element_size())
    run(launch, [matrix, result, rows, columns], lambda: f"the transpose of {(rows, columns)}", matrix.device)


@functools.lru_cache(maxsize=256)
def _transposing(rows: int, columns: int, item_bytes: int) -> Launch:
    grid = -(-rows // _TILE) * -(-columns // _TILE)
    return Launch(transposition(item_bytes), _THREADS, grid=grid, smem_bytes=_TILE * (_TILE + 2) * item_bytes)
