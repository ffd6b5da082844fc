"""What the ops refuse before anything is launched, and the words in which they say so."""

import difflib
from collections.abc import Sequence

import torch
from torch import Tensor


def check_choice(what: str, given: str, allowed: Sequence[str]) -> None:
    """Raise ValueError unless ``given`` is one of ``allowed``; the error names the nearest one."""
    if given not in allowed:
        near = difflib.get_close_matches(given, allowed, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{what} is {given!r}, allowed are {', '.join(map(repr, allowed))}{hint}")


def check_shape(name: str, tensor: Tensor, expected: Sequence[int], legend: str) -> None:
    """Raise ValueError unless ``tensor`` has the expected shape."""
    if tuple(tensor.shape) != tuple(expected):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {legend} = {tuple(expected)}")


def check_like(name: str, tensor: Tensor, x: Tensor) -> None:
    """Raise unless ``tensor`` has the dtype and the device of ``x``."""
    if tensor.dtype != x.dtype:
        raise TypeError(
            f"{name} is {tensor.dtype} but x is {x.dtype}: convert one with .to(dtype), or run under torch.autocast"
        )
    if tensor.device != x.device:
        raise ValueError(f"{name} is on {tensor.device} but x is on {x.device}: move one with .to(device)")


def check_x(x: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """Raise unless ``x`` is (T, B, H) of an allowed dtype."""
    if x.dim() != 3:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected (T, B, H): frames, batch, hidden")
    if x.dtype not in dtypes:
        raise TypeError(f"x is {x.dtype}, allowed are {', '.join(map(str, dtypes))}")


def check_lengths(lengths: Tensor, batch: int) -> None:
    """Raise unless ``lengths`` is an integer tensor of shape (B,)."""
    check_shape("lengths", lengths, (batch,), "(B,)")
    if lengths.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"lengths is {lengths.dtype}, allowed are torch.int32 and torch.int64: frames per utterance")


def lengths_on(lengths: Tensor | None, frames: int, device: torch.device) -> Tensor | None:
    """Bring lengths to ``device`` as int32; raise ValueError where one on the CPU lies outside 0..T.

    Lengths that are on a GPU already are not read back, which would make the host wait for the device; nor are they
    while torch.compile traces the reference, whose graph would break there.
    """
    if lengths is None:
        return None
    if lengths.device.type == "cpu" and not torch.compiler.is_compiling():
        for row, length in enumerate(lengths.tolist()):
            if not 0 <= length <= frames:
                raise ValueError(f"lengths[{row}] is {length}, allowed are 0 to T = {frames} frames")
    return lengths.to(device=device, dtype=torch.int32, non_blocking=True)


def under_autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Cast floating tensors as torch.autocast would cast the inputs of a matrix product (float64 stays)."""
    device = next(t for t in tensors if t is not None).device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def refuse_second_derivative(op: str) -> None:
    """Raise RuntimeError inside a backward that is itself being recorded: its result would lack a gradient silently."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{op} has no second derivative and this backward runs with create_graph=True: use backend='reference'"
        )
