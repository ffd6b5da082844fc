"""The reference of the row convolution: its numbers by hand, its gradients by finite differences."""

import torch
from ds2_ops.row_convolution import lookahead_reference


def test_lookahead_by_hand() -> None:
    x = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [4.0, 40.0]])[:, :, None]  # T 4, B 2, H 1
    y = lookahead_reference(x, torch.tensor([[1.0, 0.5, 0.25]]), torch.tensor([4, 2]))
    assert y[:, 0, 0].tolist() == [1 + 1 + 0.75, 2 + 1.5 + 1, 3 + 2, 4]
    assert y[:, 1, 0].tolist() == [10 + 10, 20, 0, 0]


def test_gradcheck_of_the_lookahead() -> None:
    x, weight = torch.randn(5, 2, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    leaves = (x.requires_grad_(), weight.requires_grad_())
    assert torch.autograd.gradcheck(lambda x, weight: lookahead_reference(x, weight, torch.tensor([5, 2])), leaves)
