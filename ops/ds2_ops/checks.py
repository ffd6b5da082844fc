"""What the ops refuse before anything is launched, and the words in which they say so; which backend they take."""

import difflib
import functools
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

_log = logging.getLogger("ds2_ops")


def check_choice(what: str, given: str, allowed: Sequence[str]) -> None:
    """Raise ValueError unless ``given`` is one of ``allowed``; the error names the nearest one."""
    if given not in allowed:
        near = difflib.get_close_matches(given, allowed, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{what} is {given!r}, allowed are {', '.join(map(repr, allowed))}{hint}")


def check_shape(name: str, tensor: Tensor, expected: Sequence[int], legend: str) -> None:
    """Raise ValueError unless ``tensor`` has the expected shape."""
    if tensor.shape != tuple(expected):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {legend} = {tuple(expected)}")


def check_like(name: str, tensor: Tensor, x: Tensor) -> None:
    """Raise unless ``tensor`` has the dtype and the device of ``x``; shapes are `check_shape`'s."""
    if tensor.dtype != x.dtype:
        raise TypeError(
            f"{name} is {tensor.dtype} but x is {x.dtype}: convert one with .to(dtype), or run under torch.autocast"
        )
    if tensor.device != x.device:
        raise ValueError(f"{name} is on {tensor.device} but x is on {x.device}: move one with .to(device)")


def check_x(x: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """Raise unless ``x`` is (T, B, H) of an allowed dtype."""
    check_frames(x.shape, x.dtype, dtypes)


def check_frames(shape: Sequence[int], dtype: torch.dtype, dtypes: Sequence[torch.dtype]) -> None:
    """Do as `check_x` with its shape and dtype."""
    if len(shape) != 3:
        raise ValueError(f"x has shape {tuple(shape)}, expected (T, B, H): frames, batch, hidden")
    if dtype not in dtypes:
        raise TypeError(f"x is {dtype}, allowed are {', '.join(map(str, dtypes))}")


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd is to know what is made of these."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def contiguous(tensor: Tensor | None) -> Tensor | None:
    """The tensor, or a copy whose rows follow one another; None stays."""
    return None if tensor is None else tensor.contiguous()


def under_autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Cast floating tensors, of any shape, as torch.autocast casts inputs of a matrix product (float64 stays).

    The first of them says on which device all are.
    """
    first = tensors[0]
    assert first is not None
    device = "cuda" if first.is_cuda else first.device.type  # which takes long to say what it is
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


def take_fastest(
    asked: str, fastest: str, fallback: str, reason: str | None, case: str, *facts: object, way_out: str = ""
) -> str:
    """Turn the backend "auto" into one that runs, logged once a case.

    Args:
        asked: "auto", or the fastest one's name.
        fastest: taken by "auto" unless there is a reason against it.
        fallback: taken by "auto" otherwise.
        reason: why the fastest one cannot run, or None.
        case: what runs, in the form of ``%`` for `facts`.
        way_out: what to do where the fastest one was asked for, if the reason does not say.

    Raises:
        RuntimeError: the fastest one was asked for by name and there is a reason against it.
    """
    if asked == "auto":
        _log_choice(fastest, fallback, reason, case, facts)
        return fallback if reason else fastest
    if reason:
        raise RuntimeError(f"backend {asked!r} cannot run this: {reason}{way_out}")
    return asked


@functools.cache
def _log_choice(fastest: str, fallback: str, reason: str | None, case: str, facts: tuple[object, ...]) -> None:
    chosen = f"{fallback!r}: {reason}" if reason else repr(fastest)
    _log.info(f"{case} runs on backend %s", *facts, chosen)
