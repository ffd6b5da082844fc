"""The norm of all gradients in one launch, clipping and update of all parameters in another; torch holds the state."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds2_ops.checks import why_no_gpu
from ds2_ops.jit.launch import Launch, Source, names, parameters, run, translation_unit

THREADS = 256
_PIECE = 8192  # numbers of a block


def _source(function: str, declarations: str, *, memory: bool = False) -> Source:
    members = parameters(f"const void* pieces, {declarations}")
    call = names(members[1:]) + (", reinterpret_cast<double*>(shared)" if memory else "")
    return translation_unit(
        "optimizer/update.cuh",
        members,
        f"    ds2::{function}(reinterpret_cast<const ds2::Piece*>(pieces), {call});\n",
        alignment=16 if memory else 0,
        threads=("UPDATE_THREADS", THREADS),
    )


SQUARES = _source("sum_squares", "double* partial", memory=True)
NESTEROV = _source("nesterov", "const float* norm, float most, double momentum")
ADAMW = _source("adamw", "const float* norm, float most, double beta1, double beta2, double eps")


def why_not(optimizer: torch.optim.Optimizer) -> str | None:
    """Say why the kernels cannot take the steps of an optimizer; None if they can. Its state may not exist yet."""
    why_not_group = {torch.optim.SGD: _why_not_sgd, torch.optim.AdamW: _why_not_adamw}.get(type(optimizer))
    if why_not_group is None:
        return f"the optimizer is {type(optimizer).__name__}, the kernels support SGD and AdamW"
    for group in optimizer.param_groups:
        if reason := why_not_group(group):
            return reason
        if not isinstance(group["lr"], Tensor):
            return "the learning rate is a Python number, the kernels read a tensor"
        for parameter in group["params"]:
            if not parameter.is_cuda or parameter.dtype != torch.float32 or not parameter.is_contiguous():
                return "a parameter is not contiguous float32 on a CUDA GPU"
            if reason := why_no_gpu(parameter.device):
                return reason
    return None


def _why_not_sgd(group: Mapping[str, Any]) -> str | None:
    nesterov = group["momentum"] > 0 and group["nesterov"] and not group["dampening"] and not group["maximize"]
    return None if nesterov else "the kernel for SGD uses Nesterov's momentum, without dampening"


def _why_not_adamw(group: Mapping[str, Any]) -> str | None:
    if group["amsgrad"] or group["maximize"]:
        return "the kernel for AdamW supports neither amsgrad nor maximize"
    return None if group["capturable"] else "the count of steps is on the host: pass capturable=True"


class FusedUpdate:
    """Clipping and update of all parameters of an optimizer in one launch, which changes the optimizer's own state.

    The arithmetic is that of torch's fused optimizers, in float64, rounded to float32 where they store: results agree
    to the last bit or two. Runs on torch's current stream and can be captured in a CUDA graph. Each call reads the
    learning rates from their tensors.

    Args:
        optimizer: one for which `why_not` returns None, and which has taken a step or loaded a state. Parameters,
            gradients and state must keep their addresses.
        rounded: parameter -> bfloat16 tensor that receives its new values.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rounded: Mapping[Tensor, Tensor]) -> None:
        group = optimizer.param_groups[0]
        self._sgd = isinstance(optimizer, torch.optim.SGD)
        self._numbers = [group["momentum"]] if self._sgd else [*group["betas"], group["eps"]]
        moments = ["momentum_buffer"] if self._sgd else ["exp_avg", "exp_avg_sq"]
        rows: list[tuple[Tensor | None, ...]] = []
        decays: list[float] = []
        self._tensors: list[Tensor] = []  # referenced, because the table holds their addresses
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
                self._tensors += [tensor for tensor in rows[-1] if tensor is not None]
                self._steps += [] if steps is None else [steps]
        self._device = self._tensors[0].device
        self._table = _table(rows, decays).to(self._device)

    def __call__(self, norm: Tensor, max_norm: float) -> None:
        """Take a step; change nothing where the norm is not finite.

        Args:
            norm: () float32 on the device, of all gradients.
            max_norm: the norm to which larger gradients are clipped; 0: no clipping.
        """
        if self._steps:
            counts = torch.isfinite(norm).to(self._steps[0].dtype)
            torch._foreach_add_(self._steps, [counts] * len(self._steps))  # a single tensor would be read on the host
        source = NESTEROV if self._sgd else ADAMW
        launch = Launch(source, THREADS, grid=len(self._table))
        run(launch, [self._table, norm, max_norm, *self._numbers], lambda: "the optimizer's step", self._device)


class FusedNorm:
    """The 2-norm of some flat tensors in one launch and a sum; the tensors must keep their addresses.

    Args:
        tensors: contiguous float32 on a GPU.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
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
                raise ValueError(f"a tensor of {numbers} numbers begins at an address that is no multiple of 16 bytes")
            if tensor is None or column >= 5:  # the learning rate and the count of steps are one number each
                columns.append(address + 0 * starts)
            else:
                columns.append(address + starts * tensor.element_size())
        lengths = np.minimum(numbers - starts, _PIECE)
        bits = int.from_bytes(struct.pack("<f", decay), "little")
        pieces.append(np.stack([*columns, lengths << 32 | bits], 1))
    return torch.from_numpy(np.concatenate(pieces))
