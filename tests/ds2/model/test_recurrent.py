"""Single layers against torch.nn and against their own definitions."""

import pytest
import torch
from support.layer_cases import GATED_CELLS, config, padded, ragged, utterances
from torch import nn

from ds2.distributed.communicator import Communicator
from ds2.distributed.gradients import GradientReducer
from ds2.model.recurrent import GatedRecurrentLayer, RecurrentLayer, make_recurrent_layer


@pytest.mark.parametrize("bidirectional", [False, True])
def test_simple_layer_equals_torch(bidirectional: bool) -> None:
    layer = RecurrentLayer(4, config(nonlinearity="tanh", bidirectional=bidirectional)).double()
    twin = nn.RNN(4, 6, bidirectional=bidirectional).double()
    with torch.no_grad():
        layer.bias.normal_()  # type: ignore[union-attr]
        for suffix in ("l0", "l0_reverse")[: 1 + bidirectional]:
            getattr(twin, f"weight_ih_{suffix}").copy_(layer.weight_ih)
            getattr(twin, f"bias_ih_{suffix}").copy_(layer.bias)
            getattr(twin, f"bias_hh_{suffix}").zero_()
            getattr(twin, f"weight_hh_{suffix}").copy_(layer.weight_hh_reverse if "rev" in suffix else layer.weight_hh)
    x = padded(4)
    y = layer(x, ragged())
    for whole, own in zip(utterances(x), utterances(y), strict=True):
        expected = twin(whole)[0].unflatten(2, (1 + bidirectional, 6)).sum(2)
        torch.testing.assert_close(own, expected)
    assert not y[~ragged().valid.t()].any()


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("backend", ["auto", "gemm"])
def test_gated_layer_is_that_of_torch_within_each_length(cell: str, bidirectional: bool, backend: str) -> None:
    layer = GatedRecurrentLayer(4, config(cell=cell, bidirectional=bidirectional, backend=backend)).double()
    peers = []
    for own in (layer.cell, *((layer.cell_reverse,) if bidirectional else ())):
        peers.append({"lstm": nn.LSTM, "gru": nn.GRU}[cell](4, 6).double())
        peers[-1].load_state_dict(own.state_dict())  # type: ignore[union-attr]
    x = padded(4)
    y = layer(x, ragged())
    for whole, own in zip(utterances(x), utterances(y), strict=True):
        expected = peers[0](whole)[0]
        if bidirectional:
            expected = expected + peers[1](whole.flip(0))[0].flip(0)
        torch.testing.assert_close(own, expected)
    assert not y[~ragged().valid.t()].any()


@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_reset_gate_of_gru_before_acts_before_the_product(bidirectional: bool) -> None:
    layer = GatedRecurrentLayer(4, config(cell="gru_before", bidirectional=bidirectional)).double()

    def expected(cell: nn.Module, x: torch.Tensor) -> torch.Tensor:
        w_r, w_z, w_n = cell.weight_ih_l0.chunk(3)
        u_r, u_z, u_n = cell.weight_hh_l0.chunk(3)
        b_r, b_z, b_n = (cell.bias_ih_l0 + cell.bias_hh_l0).chunk(3)
        h, outputs = x.new_zeros(6), []
        for frame in x[:, 0]:
            r, z = torch.sigmoid(w_r @ frame + u_r @ h + b_r), torch.sigmoid(w_z @ frame + u_z @ h + b_z)
            n = torch.tanh(w_n @ frame + u_n @ (r * h) + b_n)
            h = (1 - z) * n + z * h
            outputs.append(h)
        return torch.stack(outputs)[:, None]

    x = padded(4)
    y = layer(x, ragged())
    for whole, own in zip(utterances(x), utterances(y), strict=True):
        wanted = expected(layer.cell, whole)
        if layer.cell_reverse is not None:
            wanted = wanted + expected(layer.cell_reverse, whole.flip(0)).flip(0)
        torch.testing.assert_close(own, wanted)
    assert not y[~ragged().valid.t()].any()


@pytest.mark.parametrize("cell", ["rnn", *GATED_CELLS])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_all_matrices_have_sinks_that_take_the_gradients_of_autograd(cell: str, bidirectional: bool) -> None:
    layer = make_recurrent_layer(4, config(cell=cell, bidirectional=bidirectional, backend="gemm"))
    matrices = [parameter for parameter in layer.parameters() if parameter.ndim == 2]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    x = padded(4).float()
    results = []
    for sinks in (False, True):
        reducer = GradientReducer(
            layer.parameters(), Communicator(x.device), 10**6, overlap=False, low_precision=matrices if sinks else ()
        )
        reducer.start_step()
        context = reducer.start_pass(last=True)
        assert all((context.sink(parameter) is not None) == sinks for parameter in matrices)
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x, ragged(), context)
        y.float().square().sum().backward()
        if sinks:
            assert all(bool(parameter.grad.any()) for parameter in matrices)  # type: ignore[union-attr]
        reducer.finish_step()
        results.append([parameter.grad.clone() for parameter in layer.parameters()])  # type: ignore[union-attr]
    for mine, theirs in zip(*results, strict=True):
        # Autograd rounds the sum of a bias to bf16, half a unit in whose last place is 2^-9; a sink does not.
        torch.testing.assert_close(mine, theirs, rtol=0 if mine.ndim == 2 else 2**-8, atol=0)


def test_batch_norm_acts_on_the_projection() -> None:
    layer = RecurrentLayer(4, config(batch_norm=True, nonlinearity="relu")).double()
    nn.init.zeros_(layer.weight_hh)
    x = padded(4)
    y = layer(x, ragged())
    valid = ragged().valid.t()
    projected = (x @ layer.weight_ih.t())[valid]
    normalised = (projected - projected.mean(0)) / torch.sqrt(projected.var(0, correction=0) + 1e-5)
    torch.testing.assert_close(y[valid], normalised.relu())


def test_dropout_acts_in_training_only() -> None:
    layer = RecurrentLayer(4, config(dropout=0.5)).double()
    x = padded(4)
    assert not torch.equal(layer(x, ragged()), layer(x, ragged()))
    layer.eval()
    assert torch.equal(layer(x, ragged()), layer(x, ragged()))


def test_bf16_autocast_keeps_products_in_bf16_and_statistics_in_float32() -> None:
    layer = RecurrentLayer(4, config(batch_norm=True))
    x = padded(4).float()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x, ragged())
    assert y.dtype == torch.bfloat16
    assert layer.norm is not None
    assert layer.norm.running_var.dtype == torch.float32
    y.sum().backward()
    assert layer.weight_hh.grad is not None
    assert layer.weight_hh.grad.dtype == torch.float32
