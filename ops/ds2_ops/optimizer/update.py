"""Norm, clipping and update of all parameters in two launches, for optimizers of torch, which keep their state."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds2_ops.jit.launch import Launch, run
from ds2_ops.jit.source import Source, names, parameters, translation_unit

LEAST_CAPABILITY = (8, 0)  # bf16 conversions
THREADS = 256
_PIECE = 8192  # numbers a block
_COLUMNS = 8  # of struct Piece, 8 bytes each


def _source(function: str, declarations: str, *, memory: bool = False) -> Source:
    members = parameters(f"const void* pieces, {declarations}")
    shared = "extern __shared__ __align__(16) unsigned char shared[];\n    " if memory else ""
    call = names(members[1:]) + (", reinterpret_cast<double*>(shared)" if memory else "")
    return translation_unit(
        "optimizer/update.cuh",
        members,
        f"    {shared}ds2::{function}(reinterpret_cast<const ds2::Piece*>(pieces), {call});\n",
        ahead=f'static_assert(ds2::UPDATE_THREADS == {THREADS}, "update.py and update.cuh disagree");\n',
        launch_bounds=str(THREADS),
    )


SQUARES = _source("sum_squares", "double* partial", memory=True)
NESTEROV = _source("nesterov", "const float* norm, float most, double momentum")
ADAMW = _source("adamw", "const float* norm, float most, double beta1, double beta2, double eps")


def why_not(optimizer: torch.optim.Optimizer) -> str | None:
    """Say why the kernels cannot take the steps of an optimizer; None if they can. Its state may not exist yet."""
    supported = {torch.optim.SGD: _odd_sgd, torch.optim.AdamW: _odd_adamw}
    odd = supported.get(type(optimizer))
    if odd is None:
        return f"the optimizer is {type(optimizer).__name__}, the kernels know SGD and AdamW"
    for group in optimizer.param_groups:
        if reason := odd(group):
            return reason
        if not isinstance(group["lr"], Tensor):
            return "the learning rate is a number of the host"
        for parameter in group["params"]:
            if not parameter.is_cuda or parameter.dtype != torch.float32 or not parameter.is_contiguous():
                return "a parameter is not contiguous float32 on a CUDA GPU"
            if torch.cuda.get_device_capability(parameter.device) < LEAST_CAPABILITY:
                return "the GPU has a compute capability below 8.0"
    return None


def _odd_sgd(group: Mapping[str, Any]) -> str | None:
    usual = group["momentum"] > 0 and group["nesterov"] and not group["dampening"] and not group["maximize"]
    return None if usual else "the kernel for SGD is Nesterov's"


def _odd_adamw(group: Mapping[str, Any]) -> str | None:
    if group["amsgrad"] or group["maximize"]:
        return "the kernel for AdamW has no amsgrad"
    return None if group["capturable"] else "the count of steps is on the host"


class FusedUpdate:
    """Clipping and update of everything an optimizer holds in one launch; the optimizer's own state is what changes.

    Per number the arithmetic of torch's fused optimizers, float64 rounded to float32 where they store: results agree to
    the last bit or two. On torch's current stream, can be captured in a CUDA graph; learning rates are read from their
    tensors each time.

    Args:
        optimizer: for which `why_not` finds no reason, and which has taken a step or loaded a state. Parameters,
            gradients and state must stay where they are.
        rounded: bfloat16 tensors that are given the new values of some parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rounded: Mapping[Tensor, Tensor]) -> None:
        group = optimizer.param_groups[0]
        self._sgd = isinstance(optimizer, torch.optim.SGD)
        self._numbers = [group["momentum"]] if self._sgd else [*group["betas"], group["eps"]]
        moments = ["momentum_buffer"] if self._sgd else ["exp_avg", "exp_avg_sq"]
        rows: list[tuple[Tensor | None, ...]] = []
        decays: list[float] = []
        self._held: list[Tensor] = []  # the table holds addresses
        self._steps: list[Tensor] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = optimizer.state[parameter]
                first, second, *_ = [*(state[name] for name in moments), None]
                steps = None if self._sgd else state["step"]
                rows.append((parameter, parameter.grad, first, second, rounded.get(parameter), group["lr"], steps))
                decays.append(group["weight_decay"])
                self._held += [tensor for tensor in rows[-1] if tensor is not None]
                self._steps += [] if steps is None else [steps]
        self._device = self._held[0].device
        self._table = _table(rows, decays).to(self._device)

    def __call__(self, norm: Tensor, most: float) -> None:
        """Take a step, or none where the norm is not finite: then nothing changes.

        Args:
            norm: () float32 on the device, of all gradients.
            most: the norm to which larger gradients are clipped; 0: none are.
        """
        if self._steps:
            counts = torch.isfinite(norm).to(self._steps[0].dtype)
            torch._foreach_add_(self._steps, [counts] * len(self._steps))  # a lone tensor would be read on the host
        source = NESTEROV if self._sgd else ADAMW
        launch = Launch(source, THREADS, grid=len(self._table))
        run(launch, [self._table, norm, most, *self._numbers], lambda: "the optimizer's step", self._device)


class FusedNorm:
    """The 2-norm over some flat tensors in one launch and a sum; they must stay where they are.

    Args:
        tensors: contiguous float32 on a GPU.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._held = list(tensors)
        rows = [(None, tensor, None, None, None, None, None) for tensor in tensors]
        self._table = _table(rows, [0.0] * len(rows)).to(tensors[0].device)

    def __call__(self) -> Tensor:
        """() float32."""
        partial = torch.empty(len(self._table), dtype=torch.float64, device=self._table.device)
        launch = Launch(SQUARES, THREADS, grid=len(partial), smem_bytes=8 * THREADS)
        run(launch, [self._table, partial], lambda: "the norm of the gradients", partial.device)
        return partial.sum().sqrt().float()


def _table(rows: Sequence[tuple[Tensor | None, ...]], decays: Sequence[float]) -> Tensor:
    """Pieces (N, 8) int64 as struct Piece of csrc/optimizer/update.cuh lays them out."""
    pieces: list[np.ndarray] = []
    for row, decay in zip(rows, decays, strict=True):
        numbers = row[1].numel() if row[1] is not None else 0
        starts = np.arange(0, numbers, _PIECE, dtype=np.int64)
        columns = []
        for column, tensor in enumerate(row):
            address = 0 if tensor is None else tensor.data_ptr()
            if column < 5 and address % 16:
                raise ValueError(f"a tensor of {numbers} numbers does not begin on a boundary of 16 bytes")
            moves = tensor is not None and column < 5  # the rate and the count are one number each
            columns.append(address + (starts * tensor.element_size() if moves and tensor is not None else 0 * starts))
        lengths = np.minimum(numbers - starts, _PIECE)
        bits = int.from_bytes(struct.pack("<f", decay), "little")
        pieces.append(np.stack([*columns, lengths << 32 | bits], 1))
    return torch.from_numpy(np.concatenate(pieces))
