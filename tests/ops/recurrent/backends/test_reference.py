"""The reference itself: its gradients by finite differences, its numbers by hand and by torch.nn."""

import pytest
import torch
from ds2_ops.recurrent.backends.reference import recurrence_reference
from ds2_ops.recurrent.cells import CELLS
from support.op_cases import CPU, draw


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("lengths", [None, torch.tensor([4, 2, 0])])
def test_gradients_by_finite_differences(cell: str, lengths: torch.Tensor | None) -> None:
    row, hidden = CELLS[cell], 3
    shapes = [(4, 3, row.gates * hidden), (row.gates * hidden, hidden), (3, hidden)]
    x, weight_hh, h0, bias, c0 = (
        draw(seed, *shape, device=CPU, dtype=torch.float64).requires_grad_()
        for seed, shape in enumerate([*shapes, (hidden,), (3, hidden)])
    )
    leaves = [x, weight_hh, h0, bias if cell.startswith("gru") else None, c0 if row.carries_c else None]
    assert torch.autograd.gradcheck(
        lambda x, w, h, b, c: recurrence_reference(x, w, h, lengths, cell=cell, bias_hn=b, c0=c, clip=1.0), leaves
    )


@pytest.mark.parametrize("cell", ["relu", "tanh", "lstm", "gru_after"])
def test_is_that_of_torch_nn(cell: str) -> None:
    hidden = 6
    x = torch.randn(5, 3, 4, dtype=torch.float64)
    h0, c0 = torch.randn(2, 3, hidden, dtype=torch.float64)
    kind = {"lstm": torch.nn.LSTM, "gru_after": torch.nn.GRU}.get(cell, torch.nn.RNN)
    options = {"nonlinearity": cell} if kind is torch.nn.RNN else {}
    peer = kind(4, hidden, dtype=torch.float64, **options)
    expected, last = peer(x, (h0[None], c0[None]) if cell == "lstm" else h0[None])
    z = torch.nn.functional.linear(x, peer.weight_ih_l0, peer.bias_ih_l0)
    bias, bias_hn = peer.bias_hh_l0, None
    if cell == "gru_after":
        bias, bias_hn = torch.cat([bias[: 2 * hidden], torch.zeros(hidden, dtype=torch.float64)]), bias[2 * hidden :]
    states = {"c0": c0 if cell == "lstm" else None, "bias_hn": bias_hn}
    ours = recurrence_reference(z + bias, peer.weight_hh_l0, h0, cell=cell, **states)
    torch.testing.assert_close(ours, (expected, *(t[0] for t in (last if cell == "lstm" else (last,)))))


def test_clipped_relu_by_hand() -> None:
    x = torch.tensor([1.0, -1.0, 30.0, 5.0])[:, None, None]
    y, h_n = recurrence_reference(x, torch.tensor([[0.5]]), torch.tensor([[4.0]]), torch.tensor([3]))
    assert y.flatten().tolist() == [3.0, 0.5, 20.0, 0.0] and h_n.item() == 20.0


def test_the_reset_gate_before_the_product_by_hand() -> None:
    x = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64)[None, None]
    weight = torch.tensor([[0.7], [0.4], [-1.1]], dtype=torch.float64)
    y, _ = recurrence_reference(x, weight, torch.tensor([[2.0]], dtype=torch.float64), cell="gru_before")
    r, z = torch.sigmoid(torch.tensor([0.3 + 1.4, -0.2 + 0.8], dtype=torch.float64))
    n = torch.tanh(0.5 - 1.1 * (r * 2))
    torch.testing.assert_close(y.flatten()[0], (1 - z) * n + z * 2)
