"""LSTM and GRU on the GPU: weights stay on chip for all time steps, one launch a pass, on the recurrence's time loop.

Everything runs on torch's current stream, without host synchronisation, and can be captured in a CUDA graph.
Arguments, shapes and returns are those of :mod:`ds2_ops.recurrent.gated.gemm`.
Shape letters: T frames, B batch, H hidden.
"""

import torch
from torch import Tensor

from ds2_ops.recurrent.cells import GATED, GatedCell
from ds2_ops.recurrent.options import Options
from ds2_ops.recurrent.persistent import launch_pass, problem_of
from ds2_ops.recurrent.weights import transposed


def forward(
    cell: str,
    x: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None,
    h0: Tensor | None,
    c0: Tensor | None,
    lengths: Tensor | None,
    save: bool,
    max_sms: int | None = None,
    *,
    early: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Run the forward time loop as `gemm.forward`; sums, c and the cell's functions are float32, to within 2e-7.

    What is saved is None unless asked for. `early` is that of `Options`.
    """
    frames, batch, _ = x.shape
    hidden, row = weight_hh.shape[1], GATED[cell]
    y, h_n = x.new_empty(frames, batch, hidden), x.new_empty(batch, hidden)
    c_n = x.new_empty(*_carried(row, batch, hidden), dtype=torch.float32)
    saved = x.new_empty(frames, batch, row.saved, hidden) if save else None
    launch_pass(
        f"{cell} forward",
        problem_of(batch, hidden, x.dtype, cell, False),
        frames,
        (x, None, weight_hh, h0, lengths, y, h_n),
        Options(cell, 0.0, max_sms, early),
        of_gates=(saved, bias, c0, c_n, None),
    )
    return y, h_n, c_n, saved


def backward_data(
    cell: str,
    grad_y: Tensor,
    grad_h_n: Tensor | None,
    grad_c_n: Tensor | None,
    saved: Tensor,
    weight_hh: Tensor,
    lengths: Tensor | None,
    max_sms: int | None = None,
    weight_t: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the time loop backwards, as `gemm.backward_data`; weight_t is the transpose of weight_hh, if it exists."""
    frames, batch, hidden = grad_y.shape
    row = GATED[cell]
    grad_x = grad_y.new_empty(frames, batch, row.gates * hidden)
    grad_last = torch.empty_like(grad_y) if row.last_apart else grad_y.new_empty(0)
    grad_h0 = grad_y.new_empty(batch, hidden)
    grad_c0 = grad_y.new_empty(*_carried(row, batch, hidden), dtype=torch.float32)
    launch_pass(
        f"{cell} backward_data",
        problem_of(batch, hidden, grad_y.dtype, cell, True),
        frames,
        (grad_y, None, transposed(weight_hh) if weight_t is None else weight_t, grad_h_n, lengths, grad_x, grad_h0),
        Options(cell, 0.0, max_sms),
        of_gates=(saved, None, grad_c_n, grad_c0, grad_last if row.last_apart else None),
    )
    return grad_x, grad_last, grad_h0, grad_c0


def _carried(row: GatedCell, batch: int, hidden: int) -> tuple[int, ...]:
    return (batch, hidden) if row.carries_c else (0,)
