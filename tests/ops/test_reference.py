"""The reference itself: its gradients by finite differences, its numbers by hand and by torch.nn."""

import pytest
import torch
from ds2_ops.recurrent.reference import recurrence_reference
from ds2_ops.row_convolution.reference import lookahead_reference
from op_cases import CPU, draw


@pytest.mark.parametrize("nonlinearity", ["relu", "clipped_relu", "tanh"])
@pytest.mark.parametrize("lengths", [None, torch.tensor([4, 2, 0])])
def test_gradcheck_of_the_recurrence(nonlinearity: str, lengths: torch.Tensor | None) -> None:
    leaves = [
        draw(seed, *shape, device=CPU, dtype=torch.float64)
        for seed, shape in ((1, (4, 3, 5)), (2, (5, 5)), (3, (3, 5)))
    ]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    assert torch.autograd.gradcheck(
        lambda x, weight_hh, h0: recurrence_reference(x, weight_hh, h0, lengths, nonlinearity=nonlinearity, clip=1.0),
        leaves,
    )


@pytest.mark.parametrize("nonlinearity", ["relu", "tanh"])
def test_recurrence_is_that_of_torch_rnn(nonlinearity: str) -> None:
    peer = torch.nn.RNN(6, 6, nonlinearity=nonlinearity, bias=False, dtype=torch.float64)
    x, h0 = torch.randn(5, 3, 6, dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64)
    expected, last = peer(x, h0[None])
    y, h_n = recurrence_reference(x @ peer.weight_ih_l0.T, peer.weight_hh_l0, h0, nonlinearity=nonlinearity)
    torch.testing.assert_close((y, h_n), (expected, last[0]))


def test_recurrence_by_hand() -> None:
    x = torch.tensor([1.0, -1.0, 30.0, 5.0])[:, None, None]
    y, h_n = recurrence_reference(x, torch.tensor([[0.5]]), torch.tensor([[4.0]]), torch.tensor([3]))
    assert y.flatten().tolist() == [3.0, 0.5, 20.0, 0.0] and h_n.item() == 20.0


def test_lookahead_by_hand() -> None:
    x = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [4.0, 40.0]])[:, :, None]  # T 4, B 2, H 1
    y = lookahead_reference(x, torch.tensor([[1.0, 0.5, 0.25]]), torch.tensor([4, 2]))
    assert y[:, 0, 0].tolist() == [1 + 1 + 0.75, 2 + 1.5 + 1, 3 + 2, 4]
    assert y[:, 1, 0].tolist() == [10 + 10, 20, 0, 0]


def test_gradcheck_of_the_lookahead() -> None:
    x, weight = torch.randn(5, 2, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    leaves = (x.requires_grad_(), weight.requires_grad_())
    assert torch.autograd.gradcheck(lambda x, weight: lookahead_reference(x, weight, torch.tensor([5, 2])), leaves)
