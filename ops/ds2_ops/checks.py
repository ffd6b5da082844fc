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
