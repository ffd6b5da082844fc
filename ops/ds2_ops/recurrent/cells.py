"""The cells: their equations, forward and backward, and what backends, planner and checks need to know of each.

Shape letters: B batch, H hidden, G gates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # the planner reads this table where torch is not installed
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Cell:
    """One recurrent cell.

    A cell of one gate is its nonlinearity: h_t = f(x_t + W h_(t-1)). It saves nothing, as its slope follows from its
    output. A cell with gates is two functions:

    - forward(x, weight_t, bias_hn, h, c, wide) of pre-activations x (B, G H), the transposed matrix (H, G H), the bias
      (H,) of the last gate's product or None, and the states (B, H) before the step. Returns the states after it and
      the values to save; differentiable.
    - backward(dh, dc, saved, weight_hh, wide) of the gradients (B, H) of the states after the step, what it saved
      (B, S, H), and the matrix (G H, H). Returns the gradients of x (B, G H) and of the last gate's product (B, H) in
      the dtype of the saved values, and of the states before the step.

    Products have the dtype of x; everything else, and c, dh and dc, is `wide`.

    Attributes:
        name: as ``cell`` of :func:`ds2_ops.recurrence`.
        cuda: its struct in csrc/recurrent/cells.cuh.
        activate_: of a cell of one gate: f(pre, clip), in place and differentiable.
        backward_: of a cell of one gate: from (gradient of y, y, clip), replaces the gradient by that of the
            pre-activation.
        forward, backward: of a cell with gates, see above.
        gates: rows of the recurrent matrix a unit, in the order of torch.nn.
        carries_c: whether it has a second state c.
        last_apart: whether the gradient of the last gate's product is not that of x.
        phases: products of a step that need each other's results.
        takes_clip: whether it reads `clip`.
    """

    name: str
    cuda: str
    activate_: Callable[[Tensor, float], Tensor] | None = None
    backward_: Callable[[Tensor, Tensor, float], object] | None = None
    forward: Callable[..., tuple[Tensor, Tensor, tuple[Tensor, ...]]] | None = None
    backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] | None = None
    gates: int = 1
    carries_c: bool = False
    last_apart: bool = False
    phases: int = 1
    takes_clip: bool = False

    @property
    def saved(self) -> int:
        """Numbers a unit and frame that the backward pass needs: with gates four, and the state before the step."""
        return 5 if self.gates > 1 else 0


class Options(NamedTuple):
    """How a backend runs a recurrence.

    Attributes:
        cell: a name in `CELLS`.
        clip: upper bound of "clipped_relu", representable in the dtype of ``x``.
        max_sms: the most streaming multiprocessors that persistent kernels may occupy, or None for all.
        early: load the weights while the kernel ahead on the stream still runs, where that one allows it: the weights
            must not be its result.
    """

    cell: str
    clip: float = 20.0
    max_sms: int | None = None
    early: bool = False


def _relu_backward_(grad: Tensor, y: Tensor, clip: float) -> None:
    import torch

    torch.ops.aten.threshold_backward.grad_input(grad, y, 0.0, grad_input=grad)


def _clipped_relu_backward_(grad: Tensor, y: Tensor, clip: float) -> None:
    import torch

    torch.ops.aten.hardtanh_backward.grad_input(grad, y, 0.0, clip, grad_input=grad)


def _tanh_backward_(grad: Tensor, y: Tensor, clip: float) -> None:
    import torch

    torch.ops.aten.tanh_backward.grad_input(grad, y, grad_input=grad)


States = tuple["Tensor", "Tensor", tuple["Tensor", ...]]
Gradients = tuple["Tensor", "Tensor", "Tensor", "Tensor"]


def _lstm(x: Tensor, weight_t: Tensor, bias_hn: None, h: Tensor, c: Tensor, wide: torch.dtype) -> States:
    """GRNN (Holmes et al. 2019), section 2, without peepholes. Saves i, f, g, o, and c before the step."""
    i, f, g, o = x.addmm(h, weight_t).to(wide).chunk(4, dim=1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    new_c = (f * c).addcmul(i, g)
    return (o * new_c.tanh()).to(x.dtype), new_c, (i, f, g, o, c)


def _lstm_backward(dh: Tensor, dc: Tensor, saved: Tensor, weight_hh: Tensor, wide: torch.dtype) -> Gradients:
    import torch

    i, f, g, o, c = saved.to(wide).unbind(1)
    tanh_c = (f * c).addcmul(i, g).tanh()
    dc = dc + dh * o * (1 - tanh_c * tanh_c)
    gates = [dc * g * i * (1 - i), dc * c * f * (1 - f), dc * i * (1 - g * g), dh * tanh_c * o * (1 - o)]
    grad = torch.cat(gates, dim=1).to(saved.dtype)
    return grad, grad, (grad @ weight_hh).to(wide), dc * f


def _gru_after(x: Tensor, weight_t: Tensor, bias_hn: Tensor | None, h: Tensor, c: Tensor, wide: torch.dtype) -> States:
    """torch.nn, cuDNN: n = tanh(x_n + r (W_n h + b)). Saves r, z, n, W_n h + b, and h before the step."""
    two = 2 * h.shape[1]
    r, z = x[:, :two].addmm(h, weight_t[:, :two]).to(wide).sigmoid().chunk(2, dim=1)
    product = (h @ weight_t[:, two:]).to(wide)
    product = product if bias_hn is None else product + bias_hn
    n = x[:, two:].to(wide).addcmul(r, product).tanh()
    return n.lerp(h.to(wide), z).to(x.dtype), c, (r, z, n, product, h)


def _gru_after_backward(dh: Tensor, dc: Tensor, saved: Tensor, weight_hh: Tensor, wide: torch.dtype) -> Gradients:
    import torch

    r, z, n, product, h = saved.to(wide).unbind(1)
    d_n, d_z = dh * (1 - z) * (1 - n * n), dh * (h - n) * z * (1 - z)
    grad = torch.cat([d_n * product * r * (1 - r), d_z, d_n], dim=1).to(saved.dtype)
    last = (d_n * r).to(saved.dtype)
    back = (torch.cat([grad[:, : 2 * h.shape[1]], last], dim=1) @ weight_hh).to(wide)
    return grad, last, back + dh * z, dc


def _gru_before(x: Tensor, weight_t: Tensor, bias_hn: Tensor | None, h: Tensor, c: Tensor, wide: torch.dtype) -> States:
    """Cho et al. 2014: n = tanh(x_n + W_n (r h) + b). Saves r, z, n, r again, and h before the step."""
    two, wide_h = 2 * h.shape[1], h.to(wide)
    r, z = x[:, :two].addmm(h, weight_t[:, :two]).to(wide).sigmoid().chunk(2, dim=1)
    shift = x[:, two:] if bias_hn is None else x[:, two:] + bias_hn
    n = shift.addmm((r * wide_h).to(x.dtype), weight_t[:, two:]).to(wide).tanh()
    return n.lerp(wide_h, z).to(x.dtype), c, (r, z, n, r, h)


def _gru_before_backward(dh: Tensor, dc: Tensor, saved: Tensor, weight_hh: Tensor, wide: torch.dtype) -> Gradients:
    import torch

    r, z, n, _, h = saved.to(wide).unbind(1)
    two = 2 * h.shape[1]
    d_n, d_z = dh * (1 - z) * (1 - n * n), dh * (h - n) * z * (1 - z)
    last = d_n.to(saved.dtype)
    d_reset = (last @ weight_hh[two:]).to(wide)  # of r h
    grad = torch.cat([d_reset * h * r * (1 - r), d_z, d_n], dim=1).to(saved.dtype)
    back = (grad[:, :two] @ weight_hh[:two]).to(wide) + d_reset * r
    return grad, last, back + dh * z, dc


_ROWS = (
    Cell("relu", "Relu", lambda pre, clip: pre.relu_(), _relu_backward_),
    Cell(
        "clipped_relu", "ClippedRelu", lambda pre, clip: pre.clamp_(0.0, clip), _clipped_relu_backward_, takes_clip=True
    ),
    Cell("tanh", "Tanh", lambda pre, clip: pre.tanh_(), _tanh_backward_),
    Cell("lstm", "Lstm", forward=_lstm, backward=_lstm_backward, gates=4, carries_c=True),
    Cell("gru_after", "GruAfter", forward=_gru_after, backward=_gru_after_backward, gates=3, last_apart=True),
    Cell("gru_before", "GruBefore", forward=_gru_before, backward=_gru_before_backward, gates=3, phases=2),
)
CELLS = {cell.name: cell for cell in _ROWS}
PLAIN = {cell.name: cell for cell in _ROWS if cell.gates == 1}
GATED = {cell.name: cell for cell in _ROWS if cell.gates > 1}
