"""A cell with gates is described by its row of the table alone: layers train it, blocks stream it, exports write it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ds2_ops.recurrent.cells import CELLS, Cell
from support.exported import in_onnxruntime, log_energies, of_energies, sound, streamed
from torch import Tensor

from ds2.export.files import export_onnx
from ds2.export.model import Exported, TorchModel
from ds2.inference.network import UNBOUNDED, BlockNetwork
from ds2.model.checkpoint import LoadedModel

Make = Callable[..., LoadedModel]
NAME = "gru_before"  # whose row is replaced: the configuration allows it, and torch has no kernels of it


def forward(
    x: Tensor, weight_t: Tensor, bias_hn: None, h: Tensor, c: Tensor, wide: torch.dtype
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """JANET (van der Westhuizen and Lasenby 2018), an LSTM with a forget gate only: h = c = f c + (1 - f) g."""
    f, g = x.addmm(h, weight_t).to(wide).chunk(2, dim=1)
    f, g = f.sigmoid(), g.tanh()
    new_c = g.lerp(c, f)
    return new_c.to(x.dtype), new_c, (f, g, f, g, c)


def backward(
    dh: Tensor, dc: Tensor, saved: Tensor, weight_hh: Tensor, wide: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    f, g, _, _, c = saved.to(wide).unbind(1)
    dc = dc + dh
    grad = torch.cat([dc * (c - g) * f * (1 - f), dc * (1 - f) * (1 - g * g)], dim=1).to(saved.dtype)
    return grad, grad, (grad @ weight_hh).to(wide), dc * f


@pytest.fixture
def loaded(random_model: Make, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    row = Cell(NAME, "Janet", forward=forward, backward=backward, gates=2, carries_c=True)
    monkeypatch.setitem(CELLS, NAME, row)
    made = random_model(cell=NAME)
    assert made.model.state_dict()["recurrent_modules.0.recurrent.0.cell.weight_hh_l0"].shape == (2 * 24, 24)
    return made


def test_it_trains(loaded: LoadedModel) -> None:
    """The loop of products and `backward` have the gradients of `forward` under autograd."""
    features, lengths, gradients = torch.randn(2, 80, 50).double(), torch.tensor([50, 31]), []
    for backend in ("gemm", "reference"):
        config = loaded.config.model
        config.backend = backend
        model = type(loaded.model)(config, 80, loaded.model.labels).double().train()
        model.load_state_dict(loaded.model.state_dict())
        model(features, lengths)[0].square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for ours, reference in zip(*gradients, strict=True):
        assert ours is not None and bool(ours.any())
        torch.testing.assert_close(ours, reference)


def test_it_streams(loaded: LoadedModel) -> None:
    energies = log_energies(loaded, sound(13_000))
    network = BlockNetwork(loaded.model.double(), 20, torch.float64, 12)
    frames = energies.shape[2]
    state, slots, parts = network.new_state(1), torch.zeros(1, dtype=torch.int64), []
    normalised = (energies - loaded.features.mean.double()[:, None]) / loaded.features.std.double()[:, None]
    blocks = -(-(frames + 4 * network.delay) // 20)
    padded = torch.nn.functional.pad(normalised, (0, 20 * blocks - frames))
    for number, block in enumerate(padded.split(20, 2)):
        end = UNBOUNDED if 20 * (number + 1) < frames else frames
        first, last = network.valid_span(number, end)
        y = network.run(block, state, slots, torch.tensor([number]), torch.tensor([end]), edges=True)
        parts.append(y[first:last, 0].log_softmax(1))
    torch.testing.assert_close(torch.cat(parts), of_energies(loaded, energies), rtol=0, atol=1e-9)


def test_it_is_exported(loaded: LoadedModel, tmp_path: Path) -> None:
    energies = log_energies(loaded, sound(13_000))
    truth = of_energies(loaded, energies)
    exported = Exported.of(loaded, from_samples=False, chunk_s=0.16)
    run = torch.inference_mode()(TorchModel(exported, torch.float64).eval().forward)
    torch.testing.assert_close(streamed(run, exported, [energies])[0], truth, rtol=0, atol=1e-9)
    export_onnx(loaded, tmp_path / "model.onnx")
    (found,) = streamed(in_onnxruntime(tmp_path / "model.onnx"), exported, [energies.float()])
    in_float32 = of_energies(loaded, energies.float())
    assert (found - truth).square().mean().sqrt() <= 2 * (in_float32 - truth).square().mean().sqrt()
