"""The network as inference needs it: batch norm folded into weights, and where each layer is on a stream's time axis.

Batch norm in evaluation is y = s x + t with s = g / sqrt(var + eps) and t = b - s mean. Behind a product it becomes
(s W) x + t, before a product W (s x + t) = (W s) x + W t.

A stream comes in blocks. Every layer gives as many frames as come in (divided by its stride) and is late by its
lookahead; the end of its input is cached for the next block. `TimeWindow` has this arithmetic.

Shape letters: C channels, F bins, D width of a layer's input, H hidden, G gates, V labels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from ds2.model.acoustic import AcousticModel, RecurrentModule
from ds2.model.convolution import MaskedConv
from ds2.model.norm import SequenceBatchNorm


@dataclass(frozen=True)
class TimeWindow:
    """What a layer sees of its input: output frame m sees `length` input frames from m stride - past on.

    With `cached` frames in front of it, a block has as many windows as strides if length - stride <= cached < length.
    The first of them begins at input frame -delay_in - cached of the source, which is where output frame -delay begins
    if cached = past + delay stride - delay_in. One delay fulfils both.

    Attributes:
        length, past, stride: see above.
        delay_in: frames by which the input is late.
    """

    length: int
    past: int
    stride: int
    delay_in: int

    @property
    def delay(self) -> int:
        """Frames by which the output is late."""
        return -((self.past + self.stride - self.length - self.delay_in) // self.stride)

    @property
    def cached(self) -> int:
        """Input frames that are cached from block to block."""
        return self.past + self.delay * self.stride - self.delay_in


@dataclass(frozen=True)
class ConvWeights:
    """A convolution over bins and frames, then clip to 0 .. `clip`."""

    weight: Tensor  # (C', C, kernel in frequency, kernel in time)
    bias: Tensor  # (C',)
    stride: tuple[int, int]
    clip: float
    bins: int  # F of the input
    window: TimeWindow

    @property
    def bins_out(self) -> int:
        """F of the output."""
        return -(-self.bins // self.stride[0])


@dataclass(frozen=True)
class DirectionWeights:
    """One direction of a recurrent layer; gates in the order of torch.nn."""

    weight_ih: Tensor  # (G H, D)
    bias: Tensor  # (G H,)
    weight_hh: Tensor  # (G H, H)
    bias_hn: Tensor | None  # (H,) of the cell gru: inside the product with the reset gate


@dataclass(frozen=True)
class RecurrentWeights:
    """A recurrent layer; the outputs of two directions are added."""

    cell: str  # as model.cell
    nonlinearity: str  # of an rnn
    clip: float  # of clipped_relu
    directions: list[DirectionWeights]

    @property
    def hidden(self) -> int:
        """H."""
        return self.directions[0].weight_hh.shape[1]


@dataclass(frozen=True)
class ModuleWeights:
    """Recurrent layers, then row convolutions, and the skip around all of them."""

    layers: list[RecurrentWeights]
    row_convs: list[Tensor]  # (tau + 1, H) each
    residual: bool
    projection: Tensor | None  # (H, D) of the skip
    delay_in: int

    @property
    def lookahead(self) -> int:
        """Frames by which the output is later than the input."""
        return sum(len(weight) - 1 for weight in self.row_convs)

    @property
    def cached(self) -> int:
        """Rows (H,) that a stream caches: inputs of the row convolutions, and frames of the skip that wait."""
        return self.lookahead * (1 + self.residual)


@dataclass(frozen=True)
class NetworkWeights:
    """The whole network, from normalised features to logits. Folded weights are float64, others as trained."""

    bins: int  # F of the features
    convs: list[ConvWeights]
    modules: list[ModuleWeights]
    classifier: Tensor  # (V, H)
    bias: Tensor  # (V,)
    delay: int  # output frames by which logits are late

    @property
    def hidden(self) -> int:
        """H of the recurrent layers."""
        return self.modules[0].layers[0].hidden

    @property
    def cell(self) -> str:
        """As model.cell."""
        return self.modules[0].layers[0].cell

    @property
    def is_bidirectional(self) -> bool:
        """Whether layers start at an utterance's end too."""
        return len(self.modules[0].layers[0].directions) > 1


@torch.no_grad()
def fold(model: AcousticModel, delay_in: int = 0) -> NetworkWeights:
    """Describe a model in evaluation mode, on its device.

    Args:
        model: what it learns later is not seen.
        delay_in: frames by which the features are late.
    """
    delay, bins = delay_in, model.bins
    convs: list[ConvWeights] = []
    for conv in cast(Iterable[MaskedConv], model.convs):
        convs.append(_conv(conv, bins, delay))
        delay, bins = convs[-1].window.delay, convs[-1].bins_out
    modules: list[ModuleWeights] = []
    for module in cast(Iterable[RecurrentModule], model.recurrent_modules):
        modules.append(_module(module, delay, model))
        delay += modules[-1].lookahead
    weight, bias = _norm_before(model.classifier.weight, model.classifier.bias.double(), model.norm)
    return NetworkWeights(model.bins, convs, modules, weight, bias, delay)


def _scale_and_shift(norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Scale and shift of batch norm in evaluation, float64 (C,) each.

    Raises:
        TypeError: another norm, which cannot be folded into a product.
    """
    if not isinstance(norm, SequenceBatchNorm):
        raise TypeError(f"{type(norm).__name__} cannot be folded: describe it as a layer of its own in this module")
    scale = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
    return scale, norm.bias.double() - norm.running_mean.double() * scale


def _norm_behind(weight: Tensor, bias: Tensor | None, norm: nn.Module | None) -> tuple[Tensor, Tensor]:
    """Weight (C, ...) and bias (C,) of a product and the norm behind it, float64."""
    weight = weight.double()
    shift = weight.new_zeros(len(weight)) if bias is None else bias.double()
    if norm is None:
        return weight, shift
    scale, offset = _scale_and_shift(norm)
    return weight * scale.view(-1, *[1] * (weight.dim() - 1)), shift * scale + offset


def _norm_before(weight: Tensor, bias: Tensor, norm: nn.Module | None) -> tuple[Tensor, Tensor]:
    """Weight (V, H) and bias (V,) of a product and the norm before it, float64."""
    weight = weight.double()
    if norm is None:
        return weight, bias
    scale, shift = _scale_and_shift(norm)
    return weight * scale, bias + weight @ shift


def _conv(conv: MaskedConv, bins: int, delay_in: int) -> ConvWeights:
    weight, bias = _norm_behind(conv.weight, conv.bias, conv.norm)
    window = TimeWindow(conv.kernel[1], (conv.kernel[1] - 1) // 2, conv.stride[1], delay_in)
    return ConvWeights(weight, bias, (conv.stride[0], conv.stride[1]), conv.clip, bins, window)


def _module(module: RecurrentModule, delay_in: int, model: AcousticModel) -> ModuleWeights:
    return ModuleWeights(
        [_recurrent(layer, model) for layer in module.recurrent],
        [row_conv.weight.detach().t() for row_conv in module.row_convs],  # type: ignore[operator]
        module.residual,
        None if module.projection is None else module.projection.weight.detach(),
        delay_in,
    )


def _recurrent(layer: nn.Module, model: AcousticModel) -> RecurrentWeights:
    """A layer from the names of its state, which stay while what computes it changes."""
    config, state = model.config, {name: value.detach() for name, value in layer.named_parameters()}
    if config.cell == "rnn":
        directions = _simple_directions(state, layer.norm)  # type: ignore[arg-type]
    else:
        names = ["cell", "cell_reverse"] if config.bidirectional else ["cell"]
        directions = [_gated_direction(state, name, layer.norm, config.cell) for name in names]  # type: ignore[arg-type]
    return RecurrentWeights(config.cell, config.nonlinearity, config.clip, directions)


def _simple_directions(state: dict[str, Tensor], norm: nn.Module | None) -> list[DirectionWeights]:
    """Batch norm stands behind the projection, which both directions share."""
    weight, bias = _norm_behind(state["weight_ih"], state.get("bias"), norm)
    matrices = [state[name] for name in ("weight_hh", "weight_hh_reverse") if name in state]
    return [DirectionWeights(weight, bias, matrix, None) for matrix in matrices]


def _gated_direction(state: dict[str, Tensor], name: str, norm: nn.Module | None, cell: str) -> DirectionWeights:
    """Batch norm stands before the projection; the recurrent bias joins the other, but for gru's last gate."""
    weight, weight_hh, bias, bias_hh = (
        state[f"{name}.{part}_l0"] for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    bias, bias_hh = bias.double(), bias_hh.double()
    bias_hn = None
    if cell == "gru":
        hidden = weight_hh.shape[1]
        bias_hn = bias_hh[2 * hidden :]
        bias_hh = nn.functional.pad(bias_hh[: 2 * hidden], (0, hidden))
    weight, bias = _norm_before(weight, bias + bias_hh, norm)
    return DirectionWeights(weight, bias, weight_hh, bias_hn)
