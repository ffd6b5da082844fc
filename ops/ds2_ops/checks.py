"""Checks of arguments before a launch, the choice of a backend, and lengths of utterances: masks, reversal in time.

Shape letters: T frames, B batch.
"""

import difflib
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ds2_ops.jit import runtime
from ds2_ops.jit.launch import device_index
from ds2_ops.jit.runtime import MIN_CAPABILITY

_log = logging.getLogger("ds2_ops")


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raise ValueError unless ``value`` is one of ``allowed``; the error suggests the nearest one."""
    if value not in allowed:
        near = difflib.get_close_matches(value, allowed, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{name} is {value!r}, allowed are {', '.join(map(repr, allowed))}{hint}")


def check_shape(name: str, tensor: Tensor, expected: Sequence[int], legend: str) -> None:
    """Raise ValueError unless ``tensor`` has the expected shape."""
    if tensor.shape != tuple(expected):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {legend} = {tuple(expected)}")


def check_like(name: str, tensor: Tensor, x: Tensor) -> None:
    """Raise unless ``tensor`` has the dtype and the device of ``x``."""
    if tensor.dtype != x.dtype:
        raise TypeError(
            f"{name} is {tensor.dtype} but x is {x.dtype}: convert one with .to(dtype), or run under torch.autocast"
        )
    check_device(name, tensor, x)


def check_device(name: str, tensor: Tensor, x: Tensor, x_name: str = "x") -> None:
    """Raise unless ``tensor`` is on the device of ``x``."""
    if tensor.device != x.device:
        raise ValueError(f"{name} is on {tensor.device} but {x_name} is on {x.device}: move one with .to(device)")


def check_read(name: str, tensor: Tensor, dtype: torch.dtype, x: Tensor) -> None:
    """Raise unless ``tensor`` has the dtype that a kernel reads it as, and the device of ``x``."""
    if tensor.dtype != dtype:
        raise TypeError(f"{name} is {tensor.dtype}, expected {dtype}: convert it with .to({dtype})")
    check_device(name, tensor, x, "the data")


def check_x(shape: Sequence[int], dtype: torch.dtype, dtypes: Sequence[torch.dtype]) -> None:
    """Raise unless the shape of x is (T, B, H) and its dtype is allowed."""
    if len(shape) != 3:
        raise ValueError(f"x has shape {tuple(shape)}, expected (T, B, H): frames, batch, hidden")
    if dtype not in dtypes:
        raise TypeError(f"x is {dtype}, allowed are {', '.join(map(str, dtypes))}")


def needs_grad(*tensors: Tensor | None) -> bool:
    """Return whether autograd must record an operation on these tensors."""
    if torch.is_grad_enabled():
        for tensor in tensors:  # `any` of a generator takes twice as long
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def contiguous(tensor: Tensor | None) -> Tensor | None:
    """Return the tensor, or a contiguous copy; None for None."""
    return None if tensor is None else tensor.contiguous()


def under_autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Cast floating-point tensors as torch.autocast casts the inputs of a matrix product; float64 stays.

    All are on the device of the first one.
    """
    first = tensors[0]
    assert first is not None
    device = "cuda" if first.is_cuda else first.device.type  # `device.type` takes longer than `is_cuda`
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def refuse_second_derivative(op: str) -> None:
    """Raise RuntimeError in a backward pass that autograd records, whose result would silently have no gradient."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{op} has no second derivative and this backward runs with create_graph=True: use backend='reference'"
        )


def why_no_gpu(device: torch.device) -> str | None:
    """Say why kernels for `MIN_CAPABILITY` or later do not run on a device; None if they do."""
    if device.type != "cuda":
        return f"the data is on {device}, the kernels need a CUDA GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, the kernels need 8.0 or later"
    return runtime.why_no_kernel(device_index(device))


def why_no_plan(device: torch.device, plan: Callable[[int], object]) -> str | None:
    """Say why no kernel can run on a device: `why_no_gpu`, or the error of a plan; None if one can.

    Args:
        device: of the data.
        plan: makes a launch from the largest shared memory of a block; raises ValueError where that does not suffice.
    """
    if reason := why_no_gpu(device):
        return reason
    try:
        plan(runtime.smem_bytes_per_block(device_index(device)))
    except (ValueError, RuntimeError) as error:
        return str(error)
    return None


def choose_backend(
    backend: str, fastest: str, fallback: str, reason: str | None, case: str, *facts: object, way_out: str = ""
) -> str:
    """Turn the backend "auto" into one that runs, and log the choice once for each case.

    Args:
        backend: "auto", or the name of the fastest one.
        fastest: chosen for "auto" if there is no reason against it.
        fallback: chosen for "auto" otherwise.
        reason: why the fastest one cannot run, or None.
        case: the operation, a format for `facts` with ``%``.
        way_out: what to do where the fastest one was named, if the reason does not say it.

    Raises:
        RuntimeError: the fastest one was named and cannot run.
    """
    if backend == "auto":
        _log_choice(fastest, fallback, reason, case, facts)
        return fallback if reason else fastest
    if reason:
        raise RuntimeError(f"backend {backend!r} cannot run this: {reason}{way_out}")
    return backend


@functools.cache
def _log_choice(fastest: str, fallback: str, reason: str | None, case: str, facts: tuple[object, ...]) -> None:
    chosen = f"{fallback!r}: {reason}" if reason else repr(fastest)
    _log.info(f"{case} runs on backend %s", *facts, chosen)


def check_lengths(lengths: Tensor | None, batch: int) -> None:
    """Raise unless ``lengths`` is an integer tensor of shape (B,), or None."""
    if lengths is None:
        return
    check_shape("lengths", lengths, (batch,), "(B,)")
    if lengths.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"lengths is {lengths.dtype}, allowed are torch.int32 and torch.int64")


def lengths_on(lengths: Tensor | None, frames: int, device: torch.device) -> Tensor | None:
    """Copy lengths to ``device`` as int32; raise ValueError where one on the CPU lies outside 0..T.

    Lengths on a GPU are not checked: the host would wait for the device. Lengths are not checked either while
    torch.compile traces the reference: the check would break its graph.
    """
    if lengths is None:
        return None
    if lengths.device.type == "cpu" and not torch.compiler.is_compiling():
        for row, length in enumerate(lengths.tolist()):
            if not 0 <= length <= frames:
                raise ValueError(f"lengths[{row}] is {length}, allowed are 0 to T = {frames} frames")
    return lengths.to(device=device, dtype=torch.int32, non_blocking=True)


def valid_frames(lengths: Tensor, frames: int) -> Tensor:
    """Mark the frames that belong to an utterance.

    Args:
        lengths: (B,) integer tensor, frames per utterance.
        frames: T, the padded number of frames.

    Returns:
        (T, B, 1) bool tensor on the device of ``lengths``, True where t < length.
    """
    return torch.arange(frames, device=lengths.device)[:, None, None] < lengths[:, None]


def without_padding(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Return x (T, B, N) with 0 past the frames of each utterance, ``lengths`` (B,) or all T where None."""
    return x if lengths is None else torch.where(valid_frames(lengths, len(x)), x, 0.0)


def reverse_time(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Reverse each utterance of (T, B, ...) in time within its own length; padding does not move.

    Differentiable. Its gradient is the same reversal, without the sums that autograd needs for an arbitrary index.
    """
    time = torch.arange(x.shape[0], device=x.device)[:, None]
    if lengths is None:
        order = (x.shape[0] - 1 - time).expand(-1, x.shape[1])
    else:
        ends = lengths.to(x.device, torch.int64)
        order = torch.where(time < ends, ends - 1 - time, time)
    return _reorder(x, order)


class _Reorder(torch.autograd.Function):
    """Reorder the frames of x (T, B, ...) by an order (T, B) that is its own inverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return x[order, torch.arange(x.shape[1], device=x.device)]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return _reorder(grad, order), None


_reorder: Callable[[Tensor, Tensor], Tensor] = _Reorder.apply
