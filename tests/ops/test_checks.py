"""Utterances turned round in time, each within its own length."""

import torch
from ds2_ops.checks import reverse_time

LENGTHS = torch.tensor([6, 3, 0])


def test_turning_keeps_padding_in_place_and_undoes_itself() -> None:
    x = torch.randn(8, 3, 2)
    y = reverse_time(x, LENGTHS)
    assert torch.equal(y[:6, 0], x[:6, 0].flip(0))
    assert torch.equal(y[:3, 1], x[:3, 1].flip(0))
    assert torch.equal(y[6:, 0], x[6:, 0]) and torch.equal(y[3:, 1], x[3:, 1]) and torch.equal(y[:, 2], x[:, 2])
    assert torch.equal(reverse_time(y, LENGTHS), x)
    assert torch.equal(reverse_time(x, None), x.flip(0))


def test_gradients_by_finite_differences() -> None:
    x = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: reverse_time(x, torch.tensor([4, 2, 0])), x)
    assert torch.autograd.gradgradcheck(lambda x: reverse_time(x, None), x)
