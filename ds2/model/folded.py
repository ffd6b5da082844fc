"""The network as inference needs it: norms folded into weights, and where each layer is on a stream's time axis.

Each training module makes its own description by a method `folded`; blocks of streams (`ds2.inference.network`) and
exported models (`ds2.export.model`) are made of descriptions alone. A new layer that existing fields can describe needs
no change here or there: a factor for each unit is a row convolution of one tap.

A stream comes in blocks. Every layer gives as many frames as come in (divided by its stride) and is late by its
lookahead; the end of its input is cached for the next block. `TimeWindow` has this arithmetic.

Shape letters: C channels, F bins, D width of a layer's input, H hidden, G gates, V labels.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TimeWindow:
    """The input frames that a layer sees: output frame m sees `length` input frames from m stride - past on.

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

    cell: str  # its name in `ds2_ops.recurrence`
    clip: float  # of the cell clipped_relu
    rms_eps: float | None  # each input frame is divided by its `ds2.model.norm.root_mean_square`; None: it is not
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
    rms_eps: float | None  # of the classifier's input, as of `RecurrentWeights`
    classifier: Tensor  # (V, H)
    bias: Tensor  # (V,)
    delay: int  # output frames by which logits are late

    @property
    def hidden(self) -> int:
        """H of the recurrent layers."""
        return self.modules[0].layers[0].hidden
