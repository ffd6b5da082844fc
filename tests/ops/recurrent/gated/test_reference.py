"""The equations themselves: their gradients by finite differences, their numbers by torch.nn and by hand."""

import pytest
import torch
from ds2_ops.recurrent.cells import GATED
from ds2_ops.recurrent.gated.reference import gated_reference
from support.gated_cases import problem
from support.op_cases import CPU


@pytest.mark.parametrize("cell", GATED)
@pytest.mark.parametrize("lengths", [None, torch.tensor([3, 2, 0])])
def test_gradcheck(cell: str, lengths: torch.Tensor | None) -> None:
    inputs, _ = problem(cell, (3, 3, 2), CPU, torch.float64)
    leaves = [None if t is None else t.requires_grad_() for t in inputs]
    used = slice(0, 3 if GATED[cell].carries_c else 2)
    assert torch.autograd.gradcheck(lambda *given: gated_reference(cell, *given, lengths)[used], leaves)


@pytest.mark.parametrize("cell", ["lstm", "gru_after"])
def test_is_that_of_torch_nn(cell: str) -> None:
    x, h0 = torch.randn(5, 3, 4, dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64)
    c0 = torch.randn(3, 6, dtype=torch.float64)
    peer = (torch.nn.LSTM if cell == "lstm" else torch.nn.GRU)(4, 6, dtype=torch.float64)
    given = torch.nn.functional.linear(x, peer.weight_ih_l0, peer.bias_ih_l0)
    bias = peer.bias_hh_l0
    if cell == "lstm":
        expected, (h_n, c_n) = peer(x, (h0[None], c0[None]))
        ours = gated_reference(cell, given + bias, peer.weight_hh_l0, None, h0, c0)
        torch.testing.assert_close(ours, (expected, h_n[0], c_n[0]))
    else:
        expected, h_n = peer(x, h0[None])
        given = given + torch.cat([bias[:12], torch.zeros(6, dtype=torch.float64)])
        ours = gated_reference(cell, given, peer.weight_hh_l0, bias[12:], h0)
        torch.testing.assert_close(ours[:2], (expected, h_n[0]))


def test_the_reset_gate_before_the_product_by_hand() -> None:
    x = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64)[None, None]
    weight = torch.tensor([[0.7], [0.4], [-1.1]], dtype=torch.float64)
    y, _, _ = gated_reference("gru_before", x, weight, None, torch.tensor([[2.0]], dtype=torch.float64))
    r, z = torch.sigmoid(torch.tensor([0.3 + 1.4, -0.2 + 0.8], dtype=torch.float64))
    n = torch.tanh(0.5 - 1.1 * (r * 2))
    torch.testing.assert_close(y.flatten()[0], (1 - z) * n + z * 2)
