"""The persistent recurrence on the GPU: weights stay on chip for all time steps, one launch a pass.

Everything runs on torch's current stream, without host synchronisation, and can be captured in a CUDA graph.
Shape letters: T frames, B batch, H hidden.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ds2_ops.jit.launch import device_index, run_on
from ds2_ops.recurrent.options import Options
from ds2_ops.recurrent.plan.entry import common, pass_arguments
from ds2_ops.recurrent.plan.problem import Choice, DoesNotFit, Problem, check_rows
from ds2_ops.recurrent.planned import plan_for
from ds2_ops.recurrent.weights import transposed


@functools.lru_cache(maxsize=1024)
def why_not(
    frames: int,
    batch: int,
    hidden: int,
    dtype: torch.dtype,
    device: torch.device,
    nonlinearity: str,
    max_sms: int | None,
    directions: int = 1,
) -> str | None:
    """Say why the persistent backend cannot run this recurrence, forward and backward; None if it can.

    Args:
        frames: T; any.
        batch: B; any.
        hidden: H.
        dtype: of all tensors.
        device: where they are.
        nonlinearity: "relu", "clipped_relu" or "tanh".
        max_sms: the most multiprocessors to use, or None.
        directions: 2 for both in one launch.
    """
    if device.type != "cuda":
        return f"the tensors are on {device}; the persistent kernels need a CUDA GPU: use backend='cpu' or 'auto'"
    if frames == 0 or batch == 0 or hidden == 0:
        return f"there is nothing to launch for shape ({frames}, {batch}, {hidden}): use backend='gemm'"
    try:
        check_rows(frames, directions * batch)
        for backward in (False, True):
            problem = problem_of(batch, hidden, dtype, nonlinearity, backward, directions)
            plan_for(problem, device_index(device), max_sms)
    except (DoesNotFit, RuntimeError) as error:
        return str(error)
    return None


def forward(
    x: Tensor,
    weight_hh: Tensor,
    h0: Tensor | None,
    lengths: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """Run the forward time loop (Persistent RNNs, Diamos et al. 2016, sections 3 and 4).

    Sums are fp32. Products of 16-bit numbers are exact; those of fp32 go through TF32 (10 explicit mantissa bits), as
    torch's own do when ``torch.backends.cuda.matmul.allow_tf32`` is set. The bits are the same on every run and do not
    depend on where T is cut.

    Args:
        x: (T, B, H) contiguous pre-activations on a CUDA device.
        weight_hh: (H, H) contiguous, same dtype and device.
        h0: (B, H) contiguous first state, or None for zeros.
        lengths: (B,) int32 on the device, or None when all utterances have T frames.
        options: the nonlinearity, its clip, and the most multiprocessors to use.

    Returns:
        y (T, B, H), 0 at padding, and h_n (B, H), the state after each utterance's last frame.

    Raises:
        DoesNotFit: the planner's reason.
        RuntimeError: the driver's or compiler's error, with op, shape, dtype, tile and GPU.
    """
    return _launch("recurrence forward", x, None, weight_hh, h0, lengths, options)


def backward_data(
    grad_y: Tensor,
    grad_h_n: Tensor | None,
    y: Tensor,
    weight_hh: Tensor,
    lengths: Tensor | None,
    options: Options,
    weight_t: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the time loop backwards: gradients of the pre-activations and of the first state.

    Args:
        grad_y: (T, B, H) contiguous gradient of y; what it holds at padding does not matter.
        grad_h_n: (B, H) contiguous gradient of h_n, or None for zeros.
        y: (T, B, H) output of ``forward``, from which alone the nonlinearities' slopes come.
        weight_hh, lengths, options: as ``forward``.
        weight_t: the transpose of ``weight_hh``, where there is one; else it is made.

    Returns:
        grad_x (T, B, H), 0 at padding, and grad_h0 (B, H).

    Raises:
        DoesNotFit, RuntimeError: as ``forward``.
    """
    matrix = transposed(weight_hh) if weight_t is None else weight_t
    return _launch("recurrence backward_data", grad_y, y, matrix, grad_h_n, lengths, options)


def _launch(
    op: str,
    inputs: Tensor,
    output_y: Tensor | None,
    matrix: Tensor,
    state: Tensor | None,
    lengths: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """Launch one pass of a cell without gates.

    Returns:
        result (T, B, H) and last_state (B, H).
    """
    frames, batch, hidden = inputs.shape
    result, last_state = torch.empty_like(inputs), inputs.new_empty(batch, hidden)
    problem = problem_of(batch, hidden, inputs.dtype, options.nonlinearity, output_y is not None)
    launch_pass(op, problem, frames, (inputs, output_y, matrix, state, lengths, result, last_state), options)
    return result, last_state


def dtype_name(tensor: Tensor) -> str:
    """Name the dtype as `Problem` does."""
    return str(tensor.dtype).removeprefix("torch.")


@functools.lru_cache(maxsize=1024)
def problem_of(batch: int, hidden: int, dtype: torch.dtype, cell: str, backward: bool, directions: int = 1) -> Problem:
    """The problem that a pass on tensors of a dtype is."""
    return Problem(batch, hidden, str(dtype).removeprefix("torch."), cell, backward, directions)


def launch_pass(
    op: str,
    problem: Problem,
    frames: int,
    tensors: Sequence[Tensor | None],
    options: Options,
    of_gates: Sequence[Tensor | None] = (),
) -> None:
    """Plan, build and launch one pass, by the names of struct Pass of csrc/recurrent/pass.cuh.

    Args:
        op: for messages.
        problem: what is run.
        frames: T.
        tensors: its arrays from input to last_state, shaped as that struct says; None for a null pointer.
        options: clip and the most multiprocessors to use.
        of_gates: its arrays from saved on, where the cell has gates.
    """
    check_rows(frames, problem.directions * problem.batch)
    given = (*tensors, *of_gates)
    assert given[0] is not None
    device = given[0].device
    index = device_index(device)
    choice = plan_for(problem, index, options.max_sms, options.early)
    pointers = [0 if tensor is None else tensor.data_ptr() for tensor in given]
    if common(pointers) % 4:
        # A view of 16-bit numbers may start inside a word, and the kernels read words. Copies live until the launch.
        given = tuple(t.clone() if t is not None and t.data_ptr() % 4 else t for t in given)
        pointers = [0 if tensor is None else tensor.data_ptr() for tensor in given]
    if words := choice.exchange_words:
        exchange = torch.empty(words, dtype=torch.int32, device=device)
    numbers = pass_arguments(choice, problem, frames, pointers, options.clip, exchange.data_ptr() if words else 0)
    launch = choice.early if options.early and choice.design == "cluster" else choice.launch
    run_on(launch, numbers, functools.partial(_what, op, problem, frames, choice), index)


def _what(op: str, problem: Problem, frames: int, choice: Choice) -> str:
    shape = (frames, problem.batch, problem.hidden)
    return f"persistent {op} of (T, B, H) = {shape}, torch.{problem.dtype}, {choice.explain()}"
