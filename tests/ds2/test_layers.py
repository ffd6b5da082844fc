"""Single layers against torch.nn and against their own definitions."""

import pytest
import torch
from torch import Tensor, nn

from ds2.config.schema import ConvConfig, ModelConfig
from ds2.model.convolution import MaskedConv, RowConvolution
from ds2.model.ragged import Ragged, reverse
from ds2.model.recurrent import RecurrentLayer, TorchRecurrentLayer

LENGTHS = [6, 3, 0]


def ragged(frames: int = 8, lengths: list[int] = LENGTHS) -> Ragged:
    return Ragged.of(torch.tensor(lengths), frames, torch.device("cpu"))


def padded(width: int, frames: int = 8) -> Tensor:
    x = torch.randn(frames, len(LENGTHS), width, dtype=torch.float64)
    return torch.where(ragged(frames).valid.t()[:, :, None], x, 0.0)


def config(**overrides: object) -> ModelConfig:
    return ModelConfig(**({"hidden": 6, "batch_norm": False} | overrides))  # type: ignore[arg-type]


def utterances(x: Tensor) -> list[Tensor]:
    """The valid frames of each utterance that has any, (T, 1, D)."""
    return [x[:length, row, None] for row, length in enumerate(LENGTHS) if length]


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
    y, _ = layer(x, ragged())
    for whole, own in zip(utterances(x), utterances(y), strict=True):
        expected = twin(whole)[0].unflatten(2, (1 + bidirectional, 6)).sum(2)
        torch.testing.assert_close(own, expected)
    assert not y[~ragged().valid.t()].any()


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_torch_layer_sums_directions_within_each_length(cell: str, bidirectional: bool) -> None:
    layer = TorchRecurrentLayer(4, config(cell=cell, bidirectional=bidirectional)).double()
    x = padded(4)
    y, _ = layer(x, ragged())
    for whole, own in zip(utterances(x), utterances(y), strict=True):
        expected = layer.cell(whole)[0]
        if bidirectional:
            expected = expected + layer.cell_reverse(whole.flip(0))[0].flip(0)  # type: ignore[misc]
        torch.testing.assert_close(own, expected)
    assert not y[~ragged().valid.t()].any()


def test_a_layer_continues_from_its_state() -> None:
    x = torch.randn(8, 2, 4, dtype=torch.float64)
    first, second, whole = ragged(3, [3, 3]), ragged(5, [5, 5]), ragged(8, [8, 8])
    for layer in (RecurrentLayer(4, config()), TorchRecurrentLayer(4, config(cell="lstm"))):
        layer.double()
        head, state = layer(x[:3], first)
        tail, _ = layer(x[3:], second, state)
        torch.testing.assert_close(torch.cat([head, tail]), layer(x, whole)[0])


def test_batch_norm_acts_on_the_projection() -> None:
    layer = RecurrentLayer(4, config(batch_norm=True, nonlinearity="relu")).double()
    nn.init.zeros_(layer.weight_hh)
    x = padded(4)
    y, _ = layer(x, ragged())
    valid = ragged().valid.t()
    projected = (x @ layer.weight_ih.t())[valid]
    normalised = (projected - projected.mean(0)) / torch.sqrt(projected.var(0, correction=0) + 1e-5)
    torch.testing.assert_close(y[valid], normalised.relu())


def test_dropout_acts_in_training_only() -> None:
    layer = RecurrentLayer(4, config(dropout=0.5)).double()
    x = padded(4)
    assert not torch.equal(layer(x, ragged())[0], layer(x, ragged())[0])
    layer.eval()
    assert torch.equal(layer(x, ragged())[0], layer(x, ragged())[0])


def test_reverse_keeps_padding_in_place_and_undoes_itself() -> None:
    x = padded(2)
    flipped = reverse(x, ragged())
    assert torch.equal(flipped[:6, 0], x[:6, 0].flip(0))
    assert torch.equal(flipped[:3, 1], x[:3, 1].flip(0))
    assert not flipped[3:, 1].any()
    assert torch.equal(reverse(flipped, ragged()), x)


@pytest.mark.parametrize(("kernel", "stride"), [(11, 2), (11, 1), (1, 1), (5, 4)])
def test_convolution_lengths_and_chunks(kernel: int, stride: int) -> None:
    conv = MaskedConv(2, ConvConfig([3, kernel], [2, stride], 5), config()).double()
    for frames in (1, 2, 9, 10):
        x = torch.randn(1, 2, 7, frames, dtype=torch.float64)
        whole, after = conv(x, ragged(frames, [frames]))
        assert whole.shape == (1, 5, conv.output_bins(7), after.frames)
        assert after.lengths_cpu.tolist() == [-(-frames // stride)]
        tail, outputs = None, []
        for t in range(frames):
            y, tail = conv.stream(x[..., t : t + 1], tail, final=False)
            outputs.append(y)
        outputs.append(conv.stream(x[..., :0], tail, final=True)[0])
        torch.testing.assert_close(torch.cat(outputs, 3), whole)


def test_row_convolution_starts_as_the_identity() -> None:
    x = padded(6)
    row_conv = RowConvolution(6, 3).double()
    torch.testing.assert_close(row_conv(x, ragged()), x)


def test_bf16_autocast_keeps_products_in_bf16_and_statistics_in_float32() -> None:
    layer = RecurrentLayer(4, config(batch_norm=True))
    x = padded(4).float()
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = layer(x, ragged())
    assert y.dtype == torch.bfloat16
    assert layer.norm is not None
    assert layer.norm.running_var.dtype == torch.float32
    y.sum().backward()
    assert layer.weight_hh.grad is not None
    assert layer.weight_hh.grad.dtype == torch.float32
