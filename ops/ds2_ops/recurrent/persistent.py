"""The persistent recurrence on the GPU: weights stay on chip for all time steps, one launch a pass.

Everything runs on torch's current stream, without host synchronisation, and can be captured in a CUDA graph.
Shape letters: T frames, B batch, H hidden.
"""

import functools
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from ds2_ops.jit import runtime
from ds2_ops.jit.launch import device_index, run
from ds2_ops.recurrent.options import Options
from ds2_ops.recurrent.plan.choose import choose
from ds2_ops.recurrent.plan.problem import THREADS, Choice, DeviceFacts, DoesNotFit, Problem


@functools.lru_cache(maxsize=1024)
def why_not(
    frames: int,
    batch: int,
    hidden: int,
    dtype: torch.dtype,
    device: torch.device,
    nonlinearity: str,
    max_sms: int | None,
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
    """
    if device.type != "cuda":
        return f"the tensors are on {device}; the persistent kernels need a CUDA GPU: use backend='cpu' or 'auto'"
    if frames == 0 or batch == 0 or hidden == 0:
        return f"there is nothing to launch for shape ({frames}, {batch}, {hidden}): use backend='gemm'"
    try:
        _check_rows(frames, batch)
        for backward in (False, True):
            problem = Problem(batch, hidden, str(dtype).removeprefix("torch."), nonlinearity, backward)
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
    return _launch("forward", x, None, weight_hh, h0, lengths, options)


def backward_data(
    grad_y: Tensor,
    grad_h_n: Tensor | None,
    y: Tensor,
    weight_hh: Tensor,
    lengths: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """Run the time loop backwards: gradients of the pre-activations and of the first state.

    Args:
        grad_y: (T, B, H) contiguous gradient of y; what it holds at padding does not matter.
        grad_h_n: (B, H) contiguous gradient of h_n, or None for zeros.
        y: (T, B, H) output of ``forward``, from which alone the nonlinearities' slopes come.
        weight_hh, lengths, options: as ``forward``.

    Returns:
        grad_x (T, B, H), 0 at padding, and grad_h0 (B, H).

    Raises:
        DoesNotFit, RuntimeError: as ``forward``.
    """
    return _launch("backward_data", grad_y, y, weight_hh.t().contiguous(), grad_h_n, lengths, options)


@functools.cache
def device_facts(index: int) -> DeviceFacts:
    """Ask the driver what CUDA device ``index`` can hold."""
    properties = torch.cuda.get_device_properties(index)
    facts = DeviceFacts(
        name=properties.name,
        capability=(properties.major, properties.minor),
        sms=properties.multi_processor_count,
        smem_bytes_per_block=runtime.smem_bytes_per_block(index),
        active_clusters={},
    )
    if facts.capability != DeviceFacts().capability:
        return facts
    with torch.cuda.device(index):
        probe = runtime.load(f'extern "C" __global__ void __launch_bounds__({THREADS}, 1) ds2_kernel() {{}}', index)
        active = {
            cluster: runtime.max_active_clusters(
                probe, block=THREADS, cluster=cluster, smem_bytes=facts.smem_bytes_per_block, stream=0
            )
            for cluster in (2, 4, 5, 6, 8, 16)
        }
    return DeviceFacts(facts.name, facts.capability, facts.sms, facts.smem_bytes_per_block, active)


def _check_rows(frames: int, batch: int) -> None:
    if frames * batch >= 2**31:
        raise DoesNotFit(
            f"T x B = {frames} x {batch} is beyond 2^31 rows, which the kernels count in 32 bits: use backend='gemm'"
        )


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
    result, last_state = torch.empty_like(inputs), inputs.new_empty((batch, hidden))
    problem = Problem(batch, hidden, dtype_name(inputs), options.nonlinearity, backward=output_y is not None)
    tensors = (inputs, output_y, matrix, state, lengths, result, last_state)
    launch_pass(f"recurrence {op}", problem, frames, tensors, options)
    return result, last_state


def dtype_name(tensor: Tensor) -> str:
    """Name the dtype as `Problem` does."""
    return str(tensor.dtype).removeprefix("torch.")


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
        tensors: its pointers from input to last_state.
        options: clip and the most multiprocessors to use.
        of_gates: its pointers from saved on, where the cell has gates.
    """
    _check_rows(frames, problem.batch)
    inputs = tensors[0]
    assert inputs is not None
    choice = plan_for(problem, device_index(inputs.device), options.max_sms)
    given = (*tensors, *of_gates)
    pointers = _pointers(given)
    starts = _common(pointers)
    if starts % 4:
        # A view of 16-bit numbers may start inside a word, and the kernels read words. Copies live until the launch.
        given = tuple(t.clone() if t is not None and t.data_ptr() % 4 else t for t in given)
        pointers = _pointers(given)
        starts = _common(pointers)
    row_bytes = problem.hidden * inputs.element_size()
    wide_rows = (row_bytes | starts) % 16 == 0
    sizes = (frames, problem.batch, problem.hidden, choice.samples)
    arguments: list[Tensor | float | None] = [*pointers[:7], *sizes, row_bytes % 4 == 0, wide_rows, options.clip]
    arguments += pointers[7:]
    if choice.exchange_words:
        arguments.append(torch.full((choice.exchange_words,), -1, dtype=torch.int32, device=inputs.device))

    def what() -> str:
        shape = (frames, problem.batch, problem.hidden)
        return f"persistent {op} of (T, B, H) = {shape}, {inputs.dtype}, {choice.explain()}"

    run(choice.launch, arguments, what, inputs.device)


def _pointers(tensors: Sequence[Tensor | None]) -> list[int]:
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def _common(pointers: list[int]) -> int:
    """A number that is a multiple of a power of two where all arrays of rows, so not the lengths, start at such."""
    return functools.reduce(operator.or_, pointers[:4] + pointers[5:])


@functools.lru_cache(maxsize=1024)
def plan_for(problem: Problem, index: int, max_sms: int | None) -> Choice:
    """The planner's choice for CUDA device ``index``."""
    return choose(problem, device_facts(index), max_sms)
