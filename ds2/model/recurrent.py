"""The recurrent layers of the acoustic model, simple ones and those of cells with gates, and modules of them.

Shape letters: T frames, B batch, H hidden, G gates, D width of a layer's input.

Invariant: between layers, frames past an utterance's length are exactly 0, and no layer reads a gradient there.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from ds2_ops import bidirectional, recurrence
from ds2_ops.checks import reverse_time
from ds2_ops.recurrent.backends.choose import why_not_unasked
from ds2_ops.recurrent.backends.persistent import why_not
from ds2_ops.recurrent.cells import CELLS
from torch import Tensor, nn
from torch.nn import functional

from ds2.config.schema import ModelConfig
from ds2.model.convolution import RowConvolution
from ds2.model.dropout import UtteranceDropout
from ds2.model.norm import RmsNorm, SequenceBatchNorm, fold_norm_after, fold_norm_before, make_norm, rms_eps
from ds2.model.pass_context import OWN_PARAMETERS, PassContext, linear, sinks_of
from ds2.model.ragged import Ragged
from ds2.model.structure import operator_cell

_RECURRENT_GAIN = 0.5

# The cells with gates that torch has too: the module that has their weights, and the kernels.
_TORCH: dict[str, tuple[Callable[..., nn.Module], Callable[..., Sequence[Tensor]] | None]] = {
    "lstm": (nn.LSTM, torch.lstm),
    "gru": (nn.GRU, torch.gru),
}
_PARAMETERS = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")

Carry = tuple[Tensor, ...]  # from frame to frame: h (B, H), and c of a cell that has one


@dataclass(frozen=True)
class DirectionWeights:
    """One direction of a recurrent layer; gates in the order of torch.nn."""

    weight_ih: Tensor  # (G H, D)
    bias: Tensor  # (G H,)
    weight_hh: Tensor  # (G H, H)
    bias_hn: Tensor | None  # (H,) of a cell with `last_apart`: that of the last gate's recurrent product


@dataclass(frozen=True)
class RecurrentWeights:
    """A recurrent layer; the outputs of two directions are added."""

    cell: str  # its name in `ds2_ops.recurrence`
    clip: float  # of the cell clipped_relu; other cells do not read it
    rms_eps: float | None  # of the `ds2.model.norm.rms_norm` of the input; None: the input is not normalised
    directions: list[DirectionWeights]

    @property
    def hidden(self) -> int:
        """H."""
        return self.directions[0].weight_hh.shape[1]


class BaseRecurrentLayer(nn.Module):
    """What the layers of all cells share: the recurrence over the pre-activations that `project` computes."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, self.operator, self.clip, self.backend = config, operator_cell(config), config.clip, config.backend
        self.hidden = config.hidden
        self.dropout = UtteranceDropout(config.dropout)

    def project(self, x: Tensor, ragged: Ragged, context: PassContext) -> Tensor:
        """Compute pre-activations (T, B, G H) from the input (T, B, D); of both directions (T, B, 2, G H)."""
        raise NotImplementedError

    def weights_hh(self) -> list[Tensor]:
        """The recurrent matrix (G H, H) of each direction, a parameter."""
        raise NotImplementedError

    def biases_hn(self, context: PassContext) -> list[Tensor]:
        """The bias (H,) of each direction's last recurrent product, if the cell has `last_apart`; else none."""
        return []

    def folded(self) -> RecurrentWeights:
        """Describe the layer in evaluation."""
        raise NotImplementedError

    def forward(self, x: Tensor, ragged: Ragged, context: PassContext = OWN_PARAMETERS) -> Tensor:
        """Run the layer over whole utterances (T, B, D); return (T, B, H). Both are 0 past each length.

        The outputs of two directions are added, as in Deep Speech 2.
        """
        return self.recur_whole(self.project(x, ragged, context), ragged.lengths, context)

    def recur_whole(self, z: Tensor, lengths: Tensor, context: PassContext) -> Tensor:
        """Run the recurrence of one or both directions over the pre-activations of whole utterances."""
        weights = self.weights_hh()
        if len(weights) == 1:
            return self.recur(z, (), lengths, context)[0]
        bias_hn = torch.stack(biases_hn) if (biases_hn := self.biases_hn(context)) else None
        stacked, sink = torch.stack([context.weight(weight) for weight in weights]), sinks_of(weights, context)
        outputs = bidirectional(
            self.operator, z, stacked, bias_hn, lengths, clip=self.clip, backend=self.backend, weight_sink=sink
        )
        return outputs.sum(2)

    def recur(
        self, z: Tensor, carry: Carry, lengths: Tensor, context: PassContext, max_sms: int | None = None
    ) -> tuple[Tensor, Carry]:
        """Run the recurrence of a layer of one direction; return y (T, B, H), 0 past each length, and the last states.

        Args:
            z: (T, B, G H) pre-activations.
            carry: the states before frame 0; empty: zeros.
            lengths: (B,) int32 on the device, valid frames.
            max_sms: multiprocessors to use at most; None: all.
        """
        [weight], bias_hn = self.weights_hh(), next(iter(self.biases_hn(context)), None)
        h, c = (*carry, None, None)[:2]
        y, *last = recurrence(
            z,
            context.weight(weight),
            h,
            lengths,
            cell=self.operator,
            bias_hn=bias_hn,
            c0=c,
            clip=self.clip,
            backend=self.backend,
            max_sms=max_sms,
            weight_sink=context.sink(weight),
        )
        return y, tuple(last)


class RecurrentLayer(BaseRecurrentLayer):
    """Simple recurrent layer h_t = f(BN(W x_t) + U h_(t-1)) (paper, section 5.2; Deep Speech 2, section 3.2).

    With ``config.norm`` rms it is h_t = f(W RMS(x_t) + b + U h_(t-1)). Bidirectional layers share W and the norm, and
    have a U each.

    U starts as the identity times 0.5: each unit begins as a leaky sum of its own input, so the gradient reaches a few
    frames back and the state stays far below the clip (compared with others: docs/design/network.md). With
    ``config.start`` plain or even it is drawn evenly from +-1 / sqrt(H), as torch.nn does.
    """

    def __init__(self, width_in: int, config: ModelConfig) -> None:
        super().__init__(config)
        self.norm = make_norm(width_in if config.norm == "rms" else config.hidden, config)
        self.weight_ih = nn.Parameter(torch.empty(config.hidden, width_in))
        # Both norms start pre-activations with a variance of 1: batch norm after W, RMS norm by inputs of that size.
        nn.init.kaiming_normal_(self.weight_ih, nonlinearity="linear" if config.norm == "rms" else "relu")
        self.bias = None if isinstance(self.norm, SequenceBatchNorm) else nn.Parameter(torch.zeros(config.hidden))
        self.weight_hh = nn.Parameter(_recurrent_start(config))
        self.weight_hh_reverse = nn.Parameter(_recurrent_start(config)) if config.bidirectional else None

    def project(self, x: Tensor, ragged: Ragged, context: PassContext) -> Tensor:
        if isinstance(self.norm, RmsNorm):
            x = self.norm(x)
        x = self.dropout(x, ragged.keys, ragged.first)
        z = linear(x, [self.weight_ih], None, context, [] if self.bias is None else [self.bias])
        if isinstance(self.norm, SequenceBatchNorm):
            z = self.norm(z, ragged.count, context)
        return z if self.weight_hh_reverse is None else z[:, :, None].expand(-1, -1, 2, -1)

    def weights_hh(self) -> list[Tensor]:
        return [self.weight_hh] if self.weight_hh_reverse is None else [self.weight_hh, self.weight_hh_reverse]

    def folded(self) -> RecurrentWeights:
        if isinstance(self.norm, SequenceBatchNorm):
            weight, bias = fold_norm_after(self.weight_ih, None, self.norm)
        else:
            weight, bias = fold_norm_before(self.weight_ih, cast(Tensor, self.bias), self.norm)
        directions = [DirectionWeights(weight, bias, weight_hh.detach(), None) for weight_hh in self.weights_hh()]
        return RecurrentWeights(self.operator, self.clip, rms_eps(self.norm), directions)


class CellWeights(nn.Module):
    """The weights of a cell with gates that torch.nn lacks, with the names, shapes and first values of its modules."""

    def __init__(self, width_in: int, hidden: int, gates: int) -> None:
        super().__init__()
        rows, bound = gates * hidden, hidden**-0.5
        for name, shape in zip(_PARAMETERS, ((rows, width_in), (rows, hidden), (rows,), (rows,)), strict=True):
            self.register_parameter(name, nn.Parameter(torch.empty(shape).uniform_(-bound, bound)))


class GatedRecurrentLayer(BaseRecurrentLayer):
    """A layer of any cell with gates: on the operators of ds2_ops where their fast kernels run, else on torch's.

    Cells that torch lacks always run on the operators.

    Weights are those of torch.nn's modules, under their names. The gates' biases leave no room for batch norm on the
    projection as torch's kernels compute it, so all norms act on the layer's input.
    """

    def __init__(self, width_in: int, config: ModelConfig) -> None:
        super().__init__(config)
        row = CELLS[self.operator]
        make, self._kernels = _TORCH.get(config.cell, (functools.partial(CellWeights, gates=row.gates), None))
        self._has_c, self._has_bias_hn = row.carries_c, row.last_apart
        self.norm = make_norm(width_in, config)
        self.cell: nn.Module = make(width_in, config.hidden)
        self.cell_reverse: nn.Module | None = make(width_in, config.hidden) if config.bidirectional else None

    def forward(self, x: Tensor, ragged: Ragged, context: PassContext = OWN_PARAMETERS) -> Tensor:
        x = self._inputs(x, ragged, context)
        if not self._on_torch(x):
            return self.recur_whole(self._pre_activations(x, context), ragged.lengths, context)
        y = self._torch_forward(self.cell, x, ragged, context)
        if self.cell_reverse is None:
            return y
        backward = self._torch_forward(self.cell_reverse, reverse_time(x, ragged.lengths), ragged, context)
        return y + reverse_time(backward, ragged.lengths)

    def project(self, x: Tensor, ragged: Ragged, context: PassContext) -> Tensor:
        return self._pre_activations(self._inputs(x, ragged, context), context)

    def weights_hh(self) -> list[Tensor]:
        return [cell.get_parameter("weight_hh_l0") for cell in self._cells]

    def biases_hn(self, context: PassContext) -> list[Tensor]:
        if not self._has_bias_hn:
            return []
        return [context.weight(cell.get_parameter("bias_hh_l0"))[-self.hidden :] for cell in self._cells]

    def _inputs(self, x: Tensor, ragged: Ragged, context: PassContext) -> Tensor:
        """The input of the projection: normalised, then dropped."""
        if self.norm is not None:
            x = self.norm(x, ragged.count, context)
        dropped: Tensor = self.dropout(x, ragged.keys, ragged.first)
        return dropped

    def _pre_activations(self, x: Tensor, context: PassContext) -> Tensor:
        """The projection of `_inputs`, shaped as `project` returns it."""
        weights = [cell.get_parameter("weight_ih_l0") for cell in self._cells]
        if self.cell_reverse is None and not self._has_bias_hn:
            return linear(x, weights, None, context, [self.cell.get_parameter(name) for name in _PARAMETERS[2:]])
        biases = [
            self._input_bias(*(context.weight(cell.get_parameter(name)) for name in _PARAMETERS[2:]))
            for cell in self._cells
        ]
        z = linear(x, weights, biases[0] if len(biases) == 1 else torch.cat(biases), context)
        return z if self.cell_reverse is None else z.view(*z.shape[:2], 2, -1)

    @property
    def _cells(self) -> list[nn.Module]:
        """One a direction."""
        return [self.cell] if self.cell_reverse is None else [self.cell, self.cell_reverse]

    def folded(self) -> RecurrentWeights:
        """Describe the layer in evaluation; the recurrent bias joins the other, but for `bias_hn`."""
        directions = []
        for cell in self._cells:
            weight, weight_hh, bias, bias_hh = (cell.get_parameter(name).detach() for name in _PARAMETERS)
            bias_hn = bias_hh.double()[-self.hidden :] if self._has_bias_hn else None
            weight, bias = fold_norm_before(weight, self._input_bias(bias.double(), bias_hh.double()), self.norm)
            directions.append(DirectionWeights(weight, bias, weight_hh, bias_hn))
        return RecurrentWeights(self.operator, self.clip, rms_eps(self.norm), directions)

    def _on_torch(self, x: Tensor) -> bool:
        """Whether torch's kernels run the input `x` of the projection."""
        if self.backend != "auto":
            return False
        device = x.device
        dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else x.dtype
        return x.numel() == 0 or why_torch(self.config, dtype, device) is not None

    def _input_bias(self, bias_ih: Tensor, bias_hh: Tensor) -> Tensor:
        """The bias of the input's product (G H,), of a layer's two."""
        if self._has_bias_hn:
            bias_hh = functional.pad(bias_hh[: -self.hidden], (0, self.hidden))
        return bias_ih + bias_hh

    def _torch_forward(self, cell: nn.Module, x: Tensor, ragged: Ragged, context: PassContext) -> Tensor:
        """Run one direction on torch's kernels."""
        assert self._kernels is not None
        weights = [context.weight(cell.get_parameter(name)) for name in _PARAMETERS]
        has_biases, layers, dropout, bidirectional, batch_first = True, 1, 0.0, False, False
        options = (weights, has_biases, layers, dropout, self.training, bidirectional, batch_first)
        zeros = x.new_zeros(1, x.shape[1], self.hidden)
        y: Tensor = self._kernels(x, (zeros, zeros) if self._has_c else zeros, *options)[0]
        # These kernels go on into the padding, which changes no frame before it.
        return torch.where(ragged.valid.t()[:, :, None], y, 0.0)


def why_torch(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why recurrent layers run on torch's kernels, which a CUDA graph cannot record; None if they do not."""
    if config.cell not in _TORCH or config.backend != "auto":
        return None
    return why_not_unasked(dtype, torch.get_float32_matmul_precision()) or why_not(
        1, 1, config.hidden, dtype, device, operator_cell(config), None
    )


def make_recurrent_layer(width_in: int, config: ModelConfig) -> BaseRecurrentLayer:
    """Make the recurrent layer that ``config.cell`` names."""
    return RecurrentLayer(width_in, config) if config.cell == "rnn" else GatedRecurrentLayer(width_in, config)


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


class RecurrentModule(nn.Module):
    """A few recurrent layers, then row convolutions; if `residual`, a skip bypasses all of it (paper, Figure 7)."""

    def __init__(self, width_in: int, layers: int, row_convs: int, config: ModelConfig, *, residual: bool) -> None:
        super().__init__()
        self.hidden = config.hidden
        widths = [width_in] + [config.hidden] * (layers - 1)
        self.recurrent = nn.ModuleList(make_recurrent_layer(width, config) for width in widths)
        self.row_convs = nn.ModuleList(RowConvolution(config.hidden, config.row_conv_context) for _ in range(row_convs))
        self.residual = residual
        self.projection: nn.Linear | None = None
        if residual and width_in != config.hidden:
            self.projection = nn.Linear(width_in, config.hidden, bias=False)

    def forward(self, x: Tensor, ragged: Ragged, context: PassContext = OWN_PARAMETERS) -> Tensor:
        """Map (T, B, D) to (T, B, H), both 0 past each length."""
        y = x
        for layer in self.recurrent:
            y = layer(y, ragged, context)
        for row_conv in self.row_convs:
            y = row_conv(y, ragged, context)
        return self.join(y, x, context)

    def join(self, y: Tensor, x: Tensor, context: PassContext) -> Tensor:
        """Add the skip of the module's input (T, B, D), if there is one, to what its layers make of it, (T, B, H)."""
        if self.residual:
            y = y + (x if self.projection is None else functional.linear(x, context.weight(self.projection.weight)))
        return y

    def folded(self, delay_in: int) -> ModuleWeights:
        """Describe the module in evaluation; its input is late by so many frames."""
        return ModuleWeights(
            [layer.folded() for layer in cast(Iterable[BaseRecurrentLayer], self.recurrent)],
            [row_conv.folded() for row_conv in cast(Iterable[RowConvolution], self.row_convs)],
            self.residual,
            None if self.projection is None else self.projection.weight.detach(),
            delay_in,
        )


def _recurrent_start(config: ModelConfig) -> Tensor:
    """First values of a recurrent matrix (H, H)."""
    if config.start == "damped":
        return torch.zeros(config.hidden, config.hidden).fill_diagonal_(_RECURRENT_GAIN)
    bound: float = config.hidden**-0.5
    return torch.empty(config.hidden, config.hidden).uniform_(-bound, bound)
