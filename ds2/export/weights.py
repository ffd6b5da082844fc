"""A model's weights as an exported network uses them: batch norm folded away, products from the right.

Shape letters: C channels, F bins, D width of a layer's input, H hidden, G gates, V labels, W samples of a window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ds2.audio import kaldi
from ds2.audio.features import POWER_FLOOR, Features
from ds2.model.acoustic import AcousticModel, RecurrentModule
from ds2.model.convolution import MaskedConv
from ds2.model.norm import SequenceBatchNorm


@dataclass(frozen=True)
class Spectrum:
    """Windows of samples to log energies: two products a bin, their squares' sum, filters, a floor, a logarithm."""

    transform: Tensor  # (2 F, 1, 1, W): what is squared, cosines and then sines
    mel: Tensor | None  # (M, F, 1, 1)
    floor: float
    adds_floor: bool  # else energies below it become it
    lead_samples: int
    window_samples: int
    step_samples: int


@dataclass(frozen=True)
class Conv:
    """A convolution of the front end and its batch norm."""

    weight: Tensor  # (C', C, kernel in frequency, in time)
    bias: Tensor  # (C',)
    stride: tuple[int, int]
    clip: float


@dataclass(frozen=True)
class Cell:
    """What happens in a frame: `kind` is rnn, lstm or gru; gates follow torch."""

    kind: str
    weight_hh: Tensor  # (H, G H)
    bias_hn: Tensor | None  # (H,) of a GRU, inside the product with its reset gate
    low: float  # an rnn's values, unless it is `tanh`
    high: float | None
    tanh: bool

    @property
    def hidden(self) -> int:
        """H."""
        return self.weight_hh.shape[0]


@dataclass(frozen=True)
class Direction:
    """A direction of a recurrent layer."""

    weight_ih: Tensor  # (D, G H)
    bias: Tensor  # (G H,)
    cell: Cell


@dataclass(frozen=True)
class Module:
    """Recurrent layers, each of a direction or two, row convolutions (tau + 1, H), and the skip past all of them."""

    layers: list[list[Direction]]
    row_convs: list[Tensor]
    residual: bool
    projection: Tensor | None  # (D, H)


@dataclass(frozen=True)
class Weights:
    """The whole model."""

    spectrum: Spectrum
    scale: Tensor  # (1, 1, F, 1): 1 / deviation of the features
    shift: Tensor  # ... - mean / deviation
    convs: list[Conv]
    modules: list[Module]
    classifier: Tensor  # (H, V)
    bias: Tensor  # (V,)


@torch.no_grad()
def collect(model: AcousticModel, features: Features) -> Weights:
    """The weights of a model in evaluation mode, float64 on the CPU: rounded once, where they are written."""
    scale = 1.0 / features.std.double()
    classifier, bias = model.classifier.weight.double(), model.classifier.bias.double()
    if model.norm is not None:
        factor, offset = _affine(model.norm)
        classifier, bias = classifier * factor, bias + classifier @ offset
    return Weights(
        _spectrum(features),
        _kept(scale.view(1, 1, -1, 1)),
        _kept((-features.mean.double() * scale).view(1, 1, -1, 1)),
        [_conv(conv) for conv in model.convs],  # type: ignore[arg-type]
        [_module(module, model) for module in model.recurrent_modules],  # type: ignore[arg-type]
        _kept(classifier.t()),
        _kept(bias),
    )


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().double().cpu().contiguous()


def _affine(norm: SequenceBatchNorm) -> tuple[Tensor, Tensor]:
    """Batch norm of evaluation as x * factor + offset, float64."""
    factor = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
    return factor, norm.bias.double() - norm.running_mean.double() * factor


def _spectrum(features: Features) -> Spectrum:
    """The transform as a product: what Kaldi does to a window before it, the mean taken off too, is linear."""
    window, style = features.window_samples, features.style
    samples = torch.arange(window, dtype=torch.float64)
    bins = torch.arange(features.fft_samples // 2 + 1, dtype=torch.float64)
    phase = 2 * math.pi / features.fft_samples * torch.outer(bins, samples)
    transform = torch.cat([phase.cos(), phase.sin()]) * features.window.double().cpu()
    if style is not None:
        transform = transform @ kaldi.emphasised(torch.eye(window, dtype=torch.float64), style).t()
    mel = features.mel_weights
    return Spectrum(
        _kept(transform[:, None, None, :]),
        None if mel is None else _kept(mel.t()[:, :, None, None]),
        POWER_FLOOR if style is None else kaldi.LEAST_ENERGY,
        style is None,
        features.lead_samples,
        window,
        features.step_samples,
    )


def _conv(conv: MaskedConv) -> Conv:
    weight = conv.weight.double()
    if conv.norm is not None:
        factor, bias = _affine(conv.norm)
        weight = weight * factor[:, None, None, None]
    else:
        assert conv.bias is not None  # one of the two is there
        bias = conv.bias
    return Conv(_kept(weight), _kept(bias), (conv.stride[0], conv.stride[1]), conv.clip)


def _module(module: RecurrentModule, model: AcousticModel) -> Module:
    return Module(
        [_layer(layer, model) for layer in module.recurrent],
        [_kept(row_conv.weight.t()) for row_conv in module.row_convs],  # type: ignore[operator]
        module.residual,
        None if module.projection is None else _kept(module.projection.weight.t()),
    )


def _layer(layer: nn.Module, model: AcousticModel) -> list[Direction]:
    """A layer's directions from the names of its state, which stay while what computes it changes."""
    state = {name: value.double() for name, value in layer.named_parameters()}
    norm = layer.norm
    affine = _affine(norm) if isinstance(norm, SequenceBatchNorm) else None
    if model.config.cell == "rnn":
        return _simple(state, affine, model)
    names = ["cell"] + ["cell_reverse"] * model.config.bidirectional
    return [_gated(state, name, affine, model.config.cell) for name in names]


def _simple(state: dict[str, Tensor], affine: tuple[Tensor, Tensor] | None, model: AcousticModel) -> list[Direction]:
    """Batch norm stands behind the projection, which both directions share."""
    kind = model.config.nonlinearity
    weight, bias = state["weight_ih"], state.get("bias")
    if affine is not None:
        weight, bias = weight * affine[0][:, None], affine[1]
    assert bias is not None
    high = model.config.clip if kind == "clipped_relu" else None
    matrices = [state[name] for name in ("weight_hh", "weight_hh_reverse") if name in state]
    return [
        Direction(_kept(weight.t()), _kept(bias), Cell("rnn", _kept(matrix.t()), None, 0.0, high, kind == "tanh"))
        for matrix in matrices
    ]


def _gated(state: dict[str, Tensor], name: str, affine: tuple[Tensor, Tensor] | None, kind: str) -> Direction:
    """Batch norm stands before the projection."""
    weight, weight_hh, bias, bias_hh = (
        state[f"{name}.{part}_l0"] for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    if affine is not None:
        weight, bias = weight * affine[0], bias + weight @ affine[1]
    bias_hn = None
    if kind == "gru":
        hidden = weight_hh.shape[1]
        bias_hn = _kept(bias_hh[2 * hidden :])
        bias_hh = torch.cat([bias_hh[: 2 * hidden], torch.zeros_like(bias_hh[2 * hidden :])])
    cell = Cell(kind, _kept(weight_hh.t()), bias_hn, 0.0, None, tanh=False)
    return Direction(_kept(weight.t()), _kept(bias + bias_hh), cell)
