"""The recurrent layers of the acoustic model: simple ones, LSTM and both kinds of GRU.

Shape letters: T frames, B batch, H hidden, G gates, D width of a layer's input.

Invariant: between layers, frames past an utterance's length are exactly 0, and no layer reads a gradient there.
"""

import math
from typing import Any, cast

import torch
from ds2_ops import bidirectional, gru, lstm, recurrence
from ds2_ops.checks import reverse_time
from ds2_ops.recurrent.backends.choose import why_not_unasked
from ds2_ops.recurrent.backends.persistent import why_not
from torch import Tensor, nn
from torch.nn import functional

from ds2.config.schema import ModelConfig
from ds2.model.dropout import UtteranceDropout
from ds2.model.folded import DirectionWeights, RecurrentWeights
from ds2.model.norm import RmsNorm, SequenceBatchNorm, folded_before, folded_behind, make_norm, rms_eps
from ds2.model.pass_context import OWN_PARAMETERS, PassContext, linear, sinks_of
from ds2.model.ragged import Ragged
from ds2.model.structure import operator_cell

_RECURRENT_GAIN = 0.5


class RecurrentLayer(nn.Module):
    """Simple recurrent layer h_t = f(BN(W x_t) + U h_(t-1)) (paper, section 5.2; Deep Speech 2, section 3.2).

    With ``config.norm`` rms it is h_t = f(W RMS(x_t) + b + U h_(t-1)). Bidirectional layers share W and the norm, have
    a U each, and sum both directions, as Deep Speech 2 does.

    U starts as the identity times 0.5: each unit begins as a leaky sum of its own input, so the gradient reaches a few
    frames back and the state stays far below the clip (compared with others: docs/design/network.md). With
    ``config.start`` plain it is drawn evenly from +-1 / sqrt(H), as torch.nn does.

    Args:
        width_in: D.
        config: hidden, nonlinearity, clip, batch norm, bidirectional, dropout, backend.
    """

    def __init__(self, width_in: int, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.hidden
        self.nonlinearity, self.clip, self.backend = config.nonlinearity, config.clip, config.backend
        self.dropout = UtteranceDropout(config.dropout)
        self.norm = make_norm(width_in if config.norm == "rms" else hidden, config)
        self.weight_ih = nn.Parameter(torch.empty(hidden, width_in))
        # Both norms start pre-activations with a variance of 1: batch norm behind W, RMS norm by inputs of that size.
        nn.init.kaiming_normal_(self.weight_ih, nonlinearity="linear" if config.norm == "rms" else "relu")
        self.bias = None if isinstance(self.norm, SequenceBatchNorm) else nn.Parameter(torch.zeros(hidden))
        self.weight_hh = nn.Parameter(_recurrent_start(config))
        self.weight_hh_reverse = nn.Parameter(_recurrent_start(config)) if config.bidirectional else None

    def forward(self, x: Tensor, ragged: Ragged, context: PassContext = OWN_PARAMETERS) -> Tensor:
        """Run the layer over whole utterances.

        Args:
            x: (T, B, D), 0 past each length.
            ragged: lengths of ``x``, keys of its dropout.
            context: of the pass.

        Returns:
            (T, B, H), 0 past each length.
        """
        if isinstance(self.norm, RmsNorm):
            x = self.norm(x, None, context)
        x = self.dropout(x, ragged.keys, ragged.share)
        bias = None if self.bias is None else context.weight(self.bias)
        z = linear(x, [self.weight_ih], bias, context)
        if isinstance(self.norm, SequenceBatchNorm):
            z = self.norm(z, ragged.count, context)
        if self.weight_hh_reverse is not None:
            both = z[:, :, None].expand(-1, -1, 2, -1)
            parameters = [self.weight_hh, self.weight_hh_reverse]
            ways = bidirectional(
                self.nonlinearity,
                both,
                torch.stack([context.weight(parameter) for parameter in parameters]),
                None,
                ragged.lengths,
                clip=self.clip,
                backend=self.backend,
                weight_sink=sinks_of(parameters, context),
            )
            return ways.sum(2)
        y, _ = recurrence(
            z,
            context.weight(self.weight_hh),
            None,
            ragged.lengths,
            nonlinearity=self.nonlinearity,
            clip=self.clip,
            backend=self.backend,
            weight_sink=context.sink(self.weight_hh),
        )
        return y

    def folded(self) -> RecurrentWeights:
        """Describe the layer in evaluation."""
        if isinstance(self.norm, SequenceBatchNorm):
            weight, bias = folded_behind(self.weight_ih, None, self.norm)
        else:
            weight, bias = folded_before(self.weight_ih, cast(Tensor, self.bias), self.norm)
        matrices = [matrix.detach() for matrix in (self.weight_hh, self.weight_hh_reverse) if matrix is not None]
        directions = [DirectionWeights(weight, bias, matrix, None) for matrix in matrices]
        return RecurrentWeights(self.nonlinearity, self.clip, rms_eps(self.norm), directions)


class GatedRecurrentLayer(nn.Module):
    """LSTM or GRU layer: on the operators of ds2_ops where their fast kernels run, else on torch's fused kernels.

    The cell gru_before, whose reset gate acts before the recurrent product (Cho et al. 2014), has no kernel in torch:
    it always runs on the operators.

    Weights are those of torch.nn's modules, under their names. The gates' biases leave no room for batch norm on the
    projection as torch's kernels compute it, so all norms act on the layer's input. Directions are summed, as in
    :class:`RecurrentLayer`. Arguments, shapes and returns are those of :class:`RecurrentLayer`.
    """

    def __init__(self, width_in: int, config: ModelConfig) -> None:
        super().__init__()
        make = nn.LSTM if config.cell == "lstm" else nn.GRU
        self.operator, self.hidden, self.backend = operator_cell(config), config.hidden, config.backend
        self.dropout = UtteranceDropout(config.dropout)
        self.norm = make_norm(width_in, config)
        self.cell: nn.LSTM | nn.GRU = make(width_in, config.hidden)
        self.cell_reverse: nn.LSTM | nn.GRU | None = make(width_in, config.hidden) if config.bidirectional else None

    def forward(self, x: Tensor, ragged: Ragged, context: PassContext = OWN_PARAMETERS) -> Tensor:
        """See :meth:`RecurrentLayer.forward`."""
        if self.norm is not None:
            x = self.norm(x, ragged.count, context)
        x = self.dropout(x, ragged.keys, ragged.share)
        if self._on_torch(x):
            y = self._torch_forward(self.cell, x, ragged, context)
            if self.cell_reverse is None:
                return y
            backward = self._torch_forward(self.cell_reverse, reverse_time(x, ragged.lengths), ragged, context)
            return y + reverse_time(backward, ragged.lengths)
        cells = [self.cell] if self.cell_reverse is None else [self.cell, self.cell_reverse]
        biases = [self._biases(cell, context) for cell in cells]
        input_biases = [input_bias for input_bias, _ in biases]
        bias = input_biases[0] if len(cells) == 1 else torch.cat(input_biases)
        z = linear(x, [_parameter(cell, "weight_ih_l0") for cell in cells], bias, context)
        recurrent = [_parameter(cell, "weight_hh_l0") for cell in cells]
        weights = [context.weight(parameter) for parameter in recurrent]
        sinks = sinks_of(recurrent, context)
        if self.cell_reverse is None:
            options: dict[str, Any] = {"backend": self.backend, "weight_sink": None if sinks is None else sinks[0]}
            if self.operator == "lstm":
                return lstm(z, weights[0], None, None, ragged.lengths, **options)[0]
            reset_after = self.operator == "gru_after"
            return gru(z, weights[0], biases[0][1], None, ragged.lengths, reset_after=reset_after, **options)[0]
        ways = bidirectional(
            self.operator,
            z.view(*z.shape[:2], 2, -1),
            torch.stack(weights),
            torch.stack([cast(Tensor, bias_hn) for _, bias_hn in biases]) if self.operator == "gru_after" else None,
            ragged.lengths,
            backend=self.backend,
            weight_sink=sinks,
        )
        return ways.sum(2)

    def folded(self) -> RecurrentWeights:
        """Describe the layer in evaluation; the recurrent bias joins the other, but for gru's last gate."""
        cells = [self.cell] if self.cell_reverse is None else [self.cell, self.cell_reverse]
        directions = []
        for cell in cells:
            names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
            weight, weight_hh, bias, bias_hh = (_parameter(cell, name).detach() for name in names)
            bias, bias_hh, bias_hn = bias.double(), bias_hh.double(), None
            if self.operator == "gru_after":
                bias_hn = bias_hh[2 * self.hidden :]
                bias_hh = functional.pad(bias_hh[: 2 * self.hidden], (0, self.hidden))
            weight, bias = folded_before(weight, bias + bias_hh, self.norm)
            directions.append(DirectionWeights(weight, bias, weight_hh, bias_hn))
        return RecurrentWeights(self.operator, math.inf, rms_eps(self.norm), directions)

    def _on_torch(self, x: Tensor) -> bool:
        if self.backend != "auto":
            return False
        device = x.device
        dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else x.dtype
        return x.numel() == 0 or why_torch(self.operator, self.hidden, dtype, device) is not None

    def _biases(self, cell: nn.LSTM | nn.GRU, context: PassContext) -> tuple[Tensor, Tensor | None]:
        """The bias of the input's product (G H,), and that inside the product with a GRU's reset gate (H,)."""
        bias_ih, bias_hh = (context.weight(_parameter(cell, name)) for name in ("bias_ih_l0", "bias_hh_l0"))
        if self.operator != "gru_after":
            return bias_ih + bias_hh, None
        gates = 2 * self.hidden
        return bias_ih + functional.pad(bias_hh[:gates], (0, self.hidden)), bias_hh[gates:]

    def _torch_forward(self, cell: nn.LSTM | nn.GRU, x: Tensor, ragged: Ragged, context: PassContext) -> Tensor:
        """Run one direction on torch's kernels."""
        names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
        weights = [context.weight(_parameter(cell, name)) for name in names]
        has_biases, layers, dropout, bidirectional, batch_first = True, 1, 0.0, False, False
        options = (weights, has_biases, layers, dropout, self.training, bidirectional, batch_first)
        zeros = x.new_zeros(1, x.shape[1], self.hidden)
        y = torch.lstm(x, (zeros, zeros), *options)[0] if self.operator == "lstm" else torch.gru(x, zeros, *options)[0]
        # These kernels go on into the padding, which changes no frame before it.
        return torch.where(ragged.valid.t()[:, :, None], y, 0.0)


def why_torch(cell: str, hidden: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a layer with gates runs on torch's kernels, which a CUDA graph cannot record; None if it does not.

    Args:
        cell: as ds2_ops names it.
        hidden: H.
        dtype: of its products.
        device: where it runs.
    """
    if cell == "gru_before":
        return None
    return why_not_unasked(dtype, torch.get_float32_matmul_precision()) or why_not(
        1, 1, hidden, dtype, device, cell, None
    )


def make_recurrent_layer(width_in: int, config: ModelConfig) -> nn.Module:
    """Make the recurrent layer that ``config.cell`` names."""
    return RecurrentLayer(width_in, config) if config.cell == "rnn" else GatedRecurrentLayer(width_in, config)


def _parameter(module: nn.Module, name: str) -> Tensor:
    return cast(Tensor, getattr(module, name))


def _recurrent_start(config: ModelConfig) -> Tensor:
    if config.start == "damped":
        return torch.zeros(config.hidden, config.hidden).fill_diagonal_(_RECURRENT_GAIN)
    bound: float = config.hidden**-0.5
    return torch.empty(config.hidden, config.hidden).uniform_(-bound, bound)
