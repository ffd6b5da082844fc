"""The bound of rounding.py itself: no processor breaks it, in whatever order it sums, and a few eps of error do."""

import functools
import itertools
from collections.abc import Callable

import pytest
import torch
from ds2_ops.recurrent.backends.reference import recurrence_reference
from support.op_cases import CPU, outputs_and_gradients, ragged_lengths
from support.recurrence_cases import CLIP, problem
from support.rounding import Arithmetic, variances, worst_share
from torch import Tensor

SHAPES = [(6, 1, 33), (9, 4, 64), (5, 5, 7)]
CASES = [
    *itertools.product(SHAPES, [torch.float32], ["relu", "clipped_relu", "tanh"]),
    *itertools.product(SHAPES, [torch.bfloat16], ["relu", "clipped_relu"]),
]
on_every_case = pytest.mark.parametrize(("shape", "dtype", "nonlinearity"), CASES, ids=str)

Shape = tuple[int, int, int]
Product = Callable[[Tensor, Tensor, Tensor], Tensor]  # term, operand and matrix to term + operand @ matrix


def processor(seed: int, lanes: int, fused: bool, sums: torch.dtype = torch.float32) -> Product:
    """A processor that deals the terms of a sum in random order to lanes, each of which adds them one by one."""
    generator = torch.Generator().manual_seed(seed)

    def product(term: Tensor, operand: Tensor, matrix: Tensor) -> Tensor:
        order = torch.randperm(len(matrix), generator=generator)
        products = operand.double()[:, order, None] * matrix.double()[order]  # exact
        products = products if fused else products.float().double()
        parts = [term.double(), *(torch.zeros_like(term).double() for _ in range(lanes - 1))]
        for k, terms in enumerate(products.unbind(1)):
            parts[k % lanes] = (parts[k % lanes] + terms).to(sums).double()
        return functools.reduce(lambda a, b: (a + b).to(sums).double(), parts).to(term.dtype)

    return product


def simulate(product: Product, inputs: list[Tensor], cotangents: list[Tensor], nonlinearity: str) -> list[Tensor]:
    """Outputs and gradients of the recurrence, every sum by `product`; utterances as ragged as they get."""
    x, weight_hh, h0 = inputs
    grad_y, grad_h_n = cotangents
    lengths = ragged_lengths(*x.shape[:2])
    bend = {"relu": torch.relu, "clipped_relu": lambda z: z.clamp(0, CLIP), "tanh": torch.tanh}[nonlinearity]
    states = [h0]
    for t, frame in enumerate(x):
        new = bend(product(frame, states[-1], weight_hh.t()))
        states.append(torch.where((lengths > t)[:, None], new, states[-1]))
    grads = [torch.zeros_like(h0)]
    for t in reversed(range(len(x))):
        y = states[t + 1]
        slope = 1 - y * y if nonlinearity == "tanh" else ((y > 0) & ((y < CLIP) | (nonlinearity == "relu"))).to(y.dtype)
        given = grad_y[t] + (lengths == t + 1)[:, None] * grad_h_n
        grads.append(product(given, grads[-1], weight_hh) * slope * (lengths > t)[:, None])
    grad_x, before = torch.stack(grads[:0:-1]), torch.stack(states[:-1])
    grad_weight = product(torch.zeros_like(weight_hh), grad_x.flatten(0, 1).t(), before.flatten(0, 1))
    grad_h0 = torch.where((lengths == 0)[:, None], grad_h_n, product(torch.zeros_like(h0), grads[-1], weight_hh))
    valid = torch.arange(len(x))[:, None, None] < lengths[:, None]
    return [torch.stack(states[1:]) * valid, states[-1], grad_x, grad_weight, grad_h0]


@functools.cache
def case(
    shape: Shape, dtype: torch.dtype, nonlinearity: str
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """Inputs, cotangents, the float64 truth and its variances."""
    inputs, cotangents = problem(shape, CPU, dtype, nonlinearity=nonlinearity)
    lengths = ragged_lengths(*shape[:2])
    truth = outputs_and_gradients(
        lambda *leaves: recurrence_reference(*leaves, lengths, cell=nonlinearity, clip=CLIP),
        [t.double() for t in inputs],
        [t.double() for t in cotangents],
    )
    return inputs, cotangents, truth, variances(Arithmetic.of(dtype), inputs, cotangents, lengths, nonlinearity, CLIP)


def share_of(product: Product, shape: Shape, dtype: torch.dtype, nonlinearity: str) -> float:
    inputs, cotangents, truth, allowed = case(shape, dtype, nonlinearity)
    return worst_share(simulate(product, inputs, cotangents, nonlinearity), truth, allowed)


@on_every_case
def test_no_processor_breaks_the_bound(shape: Shape, dtype: torch.dtype, nonlinearity: str) -> None:
    for seed, lanes, fused in itertools.product(range(3), (1, 4, 16), (False, True)):
        share = share_of(processor(seed, lanes, fused), shape, dtype, nonlinearity)
        assert share <= 1, f"{lanes} lanes, fused {fused}, seed {seed}"


@on_every_case
def test_eight_eps_in_any_one_step_break_it(shape: Shape, dtype: torch.dtype, nonlinearity: str) -> None:
    frames = shape[0]
    for step in range(2 * frames + 2):  # forward, backward, the gradients of the weights and of h0
        # The slope 1 - y^2 of tanh loses a digit where y is near 1.
        eps = torch.finfo(dtype).eps * (16 if nonlinearity == "tanh" and frames <= step < 2 * frames else 8)
        calls, right = itertools.count(), processor(0, 8, fused=True)

        def product(term: Tensor, operand: Tensor, matrix: Tensor) -> Tensor:
            scale = 1 + eps if next(calls) == step else 1.0  # noqa: B023
            return (right(term, operand, matrix).double() * scale).to(term.dtype)  # noqa: B023

        assert share_of(product, shape, dtype, nonlinearity) > 1, step


@pytest.mark.parametrize(
    ("shape", "dtype", "nonlinearity"),
    [case for case in CASES if case[0][2] > 16 or case[1] == torch.float32],  # sums of 7 are as good as one rounding
    ids=str,
)
def test_sums_and_operands_of_low_precision_break_it(shape: Shape, dtype: torch.dtype, nonlinearity: str) -> None:
    for lanes in (1, 16):
        assert share_of(processor(0, lanes, True, torch.bfloat16), shape, dtype, nonlinearity) > 1
    right = processor(0, 1, fused=True)
    for low in (torch.float16, torch.bfloat16) if dtype == torch.float32 else ():  # float16 has the 11 bits of TF32

        def product(term: Tensor, operand: Tensor, matrix: Tensor) -> Tensor:
            return right(term, operand.to(low).float(), matrix.to(low).float())  # noqa: B023

        assert share_of(product, shape, dtype, nonlinearity) > 1
