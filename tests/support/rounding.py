"""How far rounding alone may take the ops from float64, on any processor and in any order of summation.

Only the size of a rounding error is known beforehand, not its sign: as in model 1.1 of Higham and Mary, "A new
approach to probabilistic rounding error analysis" (SIAM J. Sci. Comput. 41, 2019), let them be independent with mean 0
and at most the unit roundoff u, here uniform: a variance of u^2 / 3 relative to what is rounded. The variance of every
result then follows from the float64 computation by first-order propagation through the recurrence, with no look at
what any processor rounded. A sum of n terms is charged as if its products were rounded and added one after the other,
which rounds more than fused products, lanes, chunks or trees do, and at the mean over all orders: after k of n terms
whose sum is S and whose squares add up to Q, the square of the partial sum is on average

    E[T_k^2] = Q k (n - k) / (n (n - 1)) + S^2 k (k - 1) / (n (n - 1)),

which adds up over k = 2 .. n to (n + 1) (Q + 2 S^2) / 6 - Q / n.

Shape letters: T frames, B batch, H hidden.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from ds2_ops.checks import valid_frames
from ds2_ops.recurrent.backends.reference import recurrence_reference
from ds2_ops.row_convolution import lookahead_reference
from torch import Tensor

from support.op_cases import outputs_and_gradients, relative_error

UNLIKELINESS = 12.0


@dataclass(frozen=True)
class Arithmetic:
    """Unit roundoffs of a recurrence: of the operands of products, of sums inside them, of what a step stores.

    ``stores_frames``: the gradient of the weights is stored after every frame's addition, as autograd does.
    """

    operand: float
    inner: float
    stored: float
    stores_frames: bool = False

    @classmethod
    def of(cls, dtype: torch.dtype, *, tf32: bool = False, stores_frames: bool = False) -> "Arithmetic":
        """Products that add up in float32, or wider if the dtype is; TF32 cuts operands off after 11 bits."""
        stored = torch.finfo(dtype).eps / 2
        return cls(2.0**-10 if tf32 else 0.0, min(stored, 2.0**-24), stored, stores_frames)


def variances(
    arithmetic: Arithmetic,
    inputs: Sequence[Tensor | None],
    cotangents: Sequence[Tensor],
    lengths: Tensor | None,
    nonlinearity: str,
    clip: float,
    *,
    of_weight: bool = True,
) -> list[Tensor]:
    """Variances in float64 of y, h_n, grad_x, grad_weight_hh, and of grad_h0 if h0 is given, element by element.

    Args:
        inputs: x (T, B, H), weight_hh (H, H) and h0 (B, H) or None, as the computation in question gets them.
        cotangents: gradients of y (T, B, H) and of h_n (B, H).
        lengths: (B,), or None for T everywhere.
        of_weight: whether grad_weight_hh is among the results.
    """
    x, weight, h0 = (None if t is None else t.detach().double().cpu() for t in inputs)
    assert x is not None and weight is not None
    grad_y, grad_h_n = (t.double().cpu() for t in cotangents)
    frames, batch, _ = x.shape
    lengths = torch.full((batch,), frames) if lengths is None else lengths.cpu().long()
    valid = valid_frames(lengths, frames)
    first = torch.zeros_like(x[0]) if h0 is None else h0
    y = recurrence_reference(x, weight, h0, lengths, cell=nonlinearity, clip=clip)[0]
    states = torch.cat([first[None], y])  # padding is never read: a frame after it is padding too

    state_variances = [torch.zeros_like(first)]
    for t in range(frames):
        own, _ = _step(arithmetic, x[t], states[t], weight.t())
        spread = own + state_variances[-1] @ weight.t() ** 2
        variance = _slope(y[t], nonlinearity, clip) ** 2 * spread
        if nonlinearity == "tanh":
            variance += (
                _uniform(2 * arithmetic.stored) * y[t] ** 2
            )  # library functions are good to a unit in the last place
        state_variances.append(torch.where(valid[t], variance, 0.0))

    grads, grad_variances = [torch.zeros_like(first)], [torch.zeros_like(first)]
    for t in reversed(range(frames)):
        slope = _slope(y[t], nonlinearity, clip)
        arriving = grad_y[t] + (lengths == t + 1)[:, None] * grad_h_n
        own, arrived = _step(arithmetic, arriving, grads[-1], weight)
        own += _uniform(arithmetic.stored) * arriving**2 * (lengths == t + 1)[:, None]  # the two gradients' own sum
        variance = slope**2 * (own + grad_variances[-1] @ weight**2)
        if nonlinearity == "tanh":
            of_slope = 4 * y[t] ** 2 * state_variances[t + 1] + _uniform(arithmetic.inner) * (y[t] ** 4 + slope**2)
            variance += arrived**2 * of_slope + _uniform(arithmetic.stored) * (arrived * slope) ** 2
        grads.append(torch.where(valid[t], arrived * slope, 0.0))
        grad_variances.append(torch.where(valid[t], variance, 0.0))
    own, _ = _step(arithmetic, torch.zeros_like(first), grads[-1], weight)
    of_grad_h0 = torch.where((lengths == 0)[:, None], 0.0, own + grad_variances[-1] @ weight**2)
    grad_x, of_grad_x = torch.stack(grads[:0:-1]), torch.stack(grad_variances[:0:-1])

    of_states = torch.stack(state_variances)
    last = of_states[lengths, torch.arange(batch)]
    results = [of_states[1:], last, of_grad_x]
    if of_weight:
        results.append(_weight_variance(arithmetic, grad_x, states[:-1], of_grad_x, of_states[:-1]))
    return results if h0 is None else [*results, of_grad_h0]


def lookahead_variances(
    arithmetic: Arithmetic, inputs: Sequence[Tensor], cotangents: Sequence[Tensor], truth: Sequence[Tensor]
) -> list[Tensor]:
    """Variances of y, grad_x and grad_weight of the row convolution, each a sum of products; truth is in float64."""

    def sums(change: Callable[[Tensor], Tensor]) -> list[Tensor]:
        arriving, above = ([change(t.double()) for t in tensors] for tensors in (inputs, cotangents))
        return outputs_and_gradients(lookahead_reference, arriving, above)

    return [
        _sum_variance(arithmetic.inner, terms, squares, true)
        + _uniform(arithmetic.inner) * squares
        + _uniform(arithmetic.stored) * true**2
        for terms, squares, true in zip(sums(lambda t: (t != 0).double()), sums(torch.square), truth, strict=True)
    ]


def worst_share(ours: Sequence[Tensor], truth: Sequence[Tensor], variance: Sequence[Tensor]) -> float:
    """The largest :func:`share` of any frame of any (T, B, H) among the results, or of any matrix among them."""
    worst = 0.0
    for our, true, allowed in zip(ours, truth, variance, strict=True):
        error = our.double().cpu() - true.double().cpu()
        frames = zip(error, allowed, strict=True) if error.ndim == 3 else [(error, allowed)]
        worst = max(worst, *(share(*frame) for frame in frames))
    return worst


def share(error: Tensor, variance: Tensor) -> float:
    """Squared error as a share of what rounding explains: right results stay below 1, whoever computes them.

    Laurent and Massart, "Adaptive estimation of a quadratic functional by model selection" (Annals of Statistics 28,
    2000), lemma 1: the sum of the squares of normal numbers of variances v is above
    sum(v) + 2 sqrt(UNLIKELINESS sum(v^2)) + 2 UNLIKELINESS max(v) once in exp(UNLIKELINESS) times.
    """
    squared, limit = error.double().square().sum().item(), _limit(variance)
    if limit == 0.0:
        return math.inf if squared else 0.0
    return squared / limit


def relative_bound(truth: Tensor, variance: Tensor) -> float:
    """What op_cases.relative_error stays below by rounding alone."""
    return math.sqrt(_limit(variance)) / (truth.double().norm().item() or 1.0)


def allowed_against_stock(stock: Tensor, truth: Tensor, variance: Tensor) -> float:
    """Twice the relative error of stock PyTorch, or what rounding alone explains where that is more."""
    return max(2.0 * relative_error(stock, truth), relative_bound(truth, variance))


def _limit(variance: Tensor) -> float:
    squares = variance.square().sum().item()
    largest = variance.max().item() if variance.numel() else 0.0
    return variance.sum().item() + 2 * math.sqrt(UNLIKELINESS * squares) + 2 * UNLIKELINESS * largest


def _step(arithmetic: Arithmetic, term: Tensor, operand: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Variance of term + operand @ matrix by its own roundings: (B, H), and that sum."""
    product = operand @ matrix
    of_products = operand**2 @ matrix**2
    total = term + product
    terms = (term != 0).double() + (operand != 0).double() @ (matrix != 0).double()
    variance = _sum_variance(arithmetic.inner, terms, of_products + term**2, total)
    variance += (_uniform(arithmetic.inner) + 2 * _uniform(arithmetic.operand)) * of_products
    # Stored as a product, then as a sum; nothing is rounded where there is no product.
    return variance + _uniform(arithmetic.stored) * (product**2 + total**2) * (of_products > 0), total


def _sum_variance(roundoff: float, terms: Tensor, squares: Tensor, total: Tensor) -> Tensor:
    """Variance of a sum of `terms` terms whose squares add up to `squares`; see the head of this file."""
    return _uniform(roundoff) * ((terms + 1) * (squares + 2 * total**2) / 6 - squares / terms.clamp_min(1)).clamp_min(0)


def _weight_variance(arithmetic: Arithmetic, grad: Tensor, state: Tensor, of_grad: Tensor, of_state: Tensor) -> Tensor:
    """Variance of sum_tb grad[t, b, i] state[t, b, j]."""

    def sums(left: Tensor, right: Tensor) -> Tensor:
        return left.flatten(0, 1).t() @ right.flatten(0, 1)

    squares, total = sums(grad**2, state**2), sums(grad, state)
    terms = sums((grad != 0).double(), (state != 0).double())
    variance = sums(of_grad, state**2) + sums(grad**2, of_state)
    variance += _sum_variance(arithmetic.inner, terms, squares, total)
    variance += (_uniform(arithmetic.inner) + 2 * _uniform(arithmetic.operand)) * squares
    variance += _uniform(arithmetic.stored) * total**2
    if arithmetic.stores_frames:
        by_frame = torch.einsum("tbi,tbj->tij", grad, state)
        squares, terms = (by_frame**2).sum(0), (by_frame != 0).double().sum(0)
        variance += _sum_variance(arithmetic.stored, terms, squares, total) + _uniform(arithmetic.stored) * squares
    return variance


def _slope(y: Tensor, nonlinearity: str, clip: float) -> Tensor:
    if nonlinearity == "tanh":
        return 1 - y * y
    return ((y > 0) & (y < (clip if nonlinearity == "clipped_relu" else math.inf))).double()


def _uniform(roundoff: float) -> float:
    """Variance of a number that is uniform between -roundoff and roundoff."""
    return roundoff**2 / 3
