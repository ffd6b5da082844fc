"""The reference itself: its gradients by finite differences, its numbers by hand and by torch.nn."""

import pytest
import torch
from ds2_ops.recurrent.cells import CELLS
from ds2_ops.recurrent.reference import recurrence_reference
from support.op_cases import CPU, draw


@pytest.mark.parametrize("nonlinearity", CELLS)
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
