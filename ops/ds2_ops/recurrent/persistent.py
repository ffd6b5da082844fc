"""The persistent recurrence on the GPU: weights stay on chip for all time steps, one launch a pass.

Everything runs on torch's current stream, without host synchronisation, and can be captured in a CUDA graph.
Shape letters: T frames, B batch, H hidden.
"""

import ctypes
import functools

import torch
from torch import Tensor

from ds2_ops.jit import runtime
from ds2_ops.recurrent.options import Options
from ds2_ops.recurrent.plan.choose import choose
from ds2_ops.recurrent.plan.problem import THREADS, DeviceFacts, DoesNotFit, Launch, Problem


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
            plan_for(problem, _index(device), max_sms)
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
    y, h_n = torch.empty_like(x), torch.empty_like(x[0])
    _launch("forward", options, x, None, weight_hh, h0, lengths, y, h_n)
    return y, h_n


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
    grad_x, grad_h0 = torch.empty_like(grad_y), torch.empty_like(grad_y[0])
    matrix = weight_hh.t().contiguous()
    _launch("backward_data", options, grad_y, y, matrix, grad_h_n, lengths, grad_x, grad_h0)
    return grad_x, grad_h0


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


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _launch(
    op: str,
    options: Options,
    inputs: Tensor,
    output_y: Tensor | None,
    matrix: Tensor,
    state: Tensor | None,
    lengths: Tensor | None,
    result: Tensor,
    last_state: Tensor,
) -> None:
    """Plan, build and launch one pass; the tensors are struct Pass of csrc/recurrent/pass.cuh, in its order."""
    frames, batch, hidden = inputs.shape
    _check_rows(frames, batch)
    index = _index(inputs.device)
    problem = Problem(
        batch, hidden, str(inputs.dtype).removeprefix("torch."), options.nonlinearity, backward=output_y is not None
    )
    with torch.cuda.device(index):
        launch = plan_for(problem, index, options.max_sms)
        tensors = [_on_words(t) for t in (inputs, output_y, matrix, state, lengths, result, last_state)]
        pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        row_bytes = hidden * inputs.element_size()
        whole_words = row_bytes % 4 == 0
        rows = pointers[:4] + pointers[5:]  # all but the lengths
        wide_rows = row_bytes % 16 == 0 and all(pointer % 16 == 0 for pointer in rows)
        numbers = (frames, batch, hidden, launch.samples, int(whole_words), int(wide_rows))
        args = [*pointers, *map(ctypes.c_int, numbers), ctypes.c_float(options.clip)]
        if launch.exchange_words:
            exchange = torch.full((launch.exchange_words,), -1, dtype=torch.int32, device=inputs.device)
            args.append(exchange.data_ptr())
        try:
            runtime.launch(
                runtime.load(launch.source, index),
                args,
                grid=launch.grid,
                block=launch.threads,
                cluster=launch.cluster,
                smem_bytes=launch.smem_bytes,
                cooperative=launch.design == "grid",
                stream=torch.cuda.current_stream(index).cuda_stream,
            )
        except RuntimeError as error:
            raise RuntimeError(
                f"persistent recurrence {op} failed for (T, B, H) = {tuple(inputs.shape)}, {inputs.dtype}, "
                f"{launch.explain()}, on {device_facts(index).name}: {error}"
            ) from error


def _on_words(tensor: Tensor | None) -> Tensor | None:
    """Copy a tensor that starts inside a 4-byte word, as a view of 16-bit numbers may; the kernels read words."""
    return tensor.clone() if tensor is not None and tensor.data_ptr() % 4 else tensor


@functools.lru_cache(maxsize=1024)
def plan_for(problem: Problem, index: int, max_sms: int | None) -> Launch:
    """The planner's choice for CUDA device ``index``."""
    return choose(problem, device_facts(index), max_sms)
