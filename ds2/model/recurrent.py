"""The recurrent layers of the acoustic model: simple ones, LSTM and GRU.

Shape letters: T frames, B batch, H hidden, D width of a layer's input.

Invariant: between layers, frames past an utterance's length are exactly 0, and no layer reads a gradient there.
"""

import torch
from ds2_ops import bidirectional, gru, lstm, recurrence
from ds2_ops.lengths import turned
from ds2_ops.recurrent.backends.choose import why_not_unasked
from ds2_ops.recurrent.backends.persistent import why_not
from torch import Tensor, nn
from torch.nn import functional

from ds2.config.schema import ModelConfig
from ds2.model.dropout import UtteranceDropout
from ds2.model.norm import SequenceBatchNorm
from ds2.model.pass_context import OWN_PARAMETERS, PassContext, linear, sinks_of
from ds2.model.ragged import Ragged

_RECURRENT_GAIN = 0.5


class RecurrentLayer(nn.Module):
    """Simple recurrent layer h_t = f(BN(W x_t) + U h_(t-1)) (paper, section 5.2; Deep Speech 2, section 3.2).

    Bidirectional layers share W and its batch norm, have a U each, and sum both directions, as Deep Speech 2 does.

    U starts as the identity times 0.5: each unit begins as a leaky sum of its own input, so the gradient reaches a few
    frames back and the state stays far below the clip (tried beside others: docs/design/network.md). With
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
        self.weight_ih = nn.Parameter(torch.empty(hidden, width_in))
        nn.init.kaiming_normal_(self.weight_ih, nonlinearity="relu")
        self.norm = SequenceBatchNorm(hidden, config.batch_norm_momentum) if config.batch_norm else None
        self.bias = None if config.batch_norm else nn.Parameter(torch.zeros(hidden))
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
        x = self.dropout(x, ragged.keys, ragged.share)
        bias = None if self.bias is None else context.weight(self.bias)
        z = linear(x, [self.weight_ih], bias, context)
        if self.norm is not None:
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
        return recurrence(
            z,
            context.weight(self.weight_hh),
            None,
            ragged.lengths,
            nonlinearity=self.nonlinearity,
            clip=self.clip,
            backend=self.backend,
            weight_sink=context.sink(self.weight_hh),
        )[0]


class GatedRecurrentLayer(nn.Module):
    """LSTM or GRU layer: on the persistent kernels where they run, else through torch's own fused ones.

    Weights are those of torch.nn's modules, under their names. The gates' biases leave no room for batch norm on the
    projection as torch's kernels compute it, so it acts on the layer's input. Directions are summed, as in
    :class:`RecurrentLayer`. Arguments, shapes and returns are those of :class:`RecurrentLayer`.
    """

    def __init__(self, width_in: int, config: ModelConfig) -> None:
        super().__init__()
        make = {"lstm": _Lstm, "gru": _Gru}[config.cell]
        self.backend = config.backend
        self.dropout = UtteranceDropout(config.dropout)
        self.norm = SequenceBatchNorm(width_in, config.batch_norm_momentum) if config.batch_norm else None
        self.cell = make(width_in, config.hidden)
        self.cell_reverse = make(width_in, config.hidden) if config.bidirectional else None

    def forward(self, x: Tensor, ragged: Ragged, context: PassContext = OWN_PARAMETERS) -> Tensor:
        """See :meth:`RecurrentLayer.forward`."""
        if self.norm is not None:
            x = self.norm(x, ragged.count, context)
        x = self.dropout(x, ragged.keys, ragged.share)
        if self.cell_reverse is None:
            y: Tensor = self.cell(x, ragged, self.backend, context)
            return y
        cells = (self.cell, self.cell_reverse)
        if not self.cell.ours(x, self.backend):
            y = self.cell(x, ragged, self.backend, context)
            flipped = self.cell_reverse(turned(x, ragged.lengths), ragged, self.backend, context)
            return y + turned(flipped, ragged.lengths)
        bias = torch.cat([cell.bias_of_input(context) for cell in cells])
        z = linear(x, [cell.weight_ih_l0 for cell in cells], bias, context)
        parameters = [cell.weight_hh_l0 for cell in cells]
        ways = bidirectional(
            self.cell.name,
            z.view(*z.shape[:2], 2, -1),
            torch.stack([context.weight(parameter) for parameter in parameters]),
            None if isinstance(self.cell, _Lstm) else torch.stack([cell.bias_hn(context) for cell in cells]),
            ragged.lengths,
            backend=self.backend,
            weight_sink=sinks_of(parameters, context),
        )
        return ways.sum(2)


class _Lstm(nn.LSTM):
    """torch.nn's, with another forward."""

    name = "lstm"
    weight_ih_l0: Tensor
    weight_hh_l0: Tensor
    bias_ih_l0: Tensor
    bias_hh_l0: Tensor

    def ours(self, x: Tensor, backend: str) -> bool:
        """Whether the operators of ds2_ops run it."""
        return _ours(self.name, self.hidden_size, x, backend)

    def bias_of_input(self, context: PassContext = OWN_PARAMETERS) -> Tensor:
        """(4 H,) to be added to the input's product."""
        return context.weight(self.bias_ih_l0) + context.weight(self.bias_hh_l0)

    def forward(  # type: ignore[override]
        self, x: Tensor, ragged: Ragged, backend: str, context: PassContext
    ) -> Tensor:
        if not self.ours(x, backend):
            state = _zero_state(x, self.hidden_size)
            return _cut(torch.lstm(x, (state, state), *_torch_arguments(self, context))[0], ragged)
        z = linear(x, [self.weight_ih_l0], self.bias_of_input(context), context)
        weight, sink = context.weight(self.weight_hh_l0), context.sink(self.weight_hh_l0)
        return lstm(z, weight, None, None, ragged.lengths, backend=backend, weight_sink=sink)[0]


class _Gru(nn.GRU):
    """torch.nn's, with another forward."""

    name = "gru_after"
    weight_ih_l0: Tensor
    weight_hh_l0: Tensor
    bias_ih_l0: Tensor
    bias_hh_l0: Tensor

    def ours(self, x: Tensor, backend: str) -> bool:
        """Whether the operators of ds2_ops run it."""
        return _ours(self.name, self.hidden_size, x, backend)

    def bias_of_input(self, context: PassContext = OWN_PARAMETERS) -> Tensor:
        """(3 H,) to be added to the input's product."""
        gates = context.weight(self.bias_hh_l0)[: 2 * self.hidden_size]
        return context.weight(self.bias_ih_l0) + functional.pad(gates, (0, self.hidden_size))

    def bias_hn(self, context: PassContext = OWN_PARAMETERS) -> Tensor:
        """(H,) of the last gate's recurrent product."""
        return context.weight(self.bias_hh_l0)[2 * self.hidden_size :]

    def forward(  # type: ignore[override]
        self, x: Tensor, ragged: Ragged, backend: str, context: PassContext
    ) -> Tensor:
        if not self.ours(x, backend):
            return _cut(torch.gru(x, _zero_state(x, self.hidden_size), *_torch_arguments(self, context))[0], ragged)
        z = linear(x, [self.weight_ih_l0], self.bias_of_input(context), context)
        weight, sink = context.weight(self.weight_hh_l0), context.sink(self.weight_hh_l0)
        return gru(z, weight, self.bias_hn(context), None, ragged.lengths, backend=backend, weight_sink=sink)[0]


def _ours(cell: str, hidden: int, x: Tensor, backend: str) -> bool:
    dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    return backend != "auto" or (x.numel() > 0 and why_torch(cell, hidden, dtype, x.device) is None)


def why_torch(cell: str, hidden: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a layer with gates runs through torch's kernels, which a CUDA graph cannot hold; None if it does not.

    Args:
        cell: "lstm" or "gru_after", as ds2_ops names them.
        hidden: H.
        dtype: of its products.
        device: where it runs.
    """
    return why_not_unasked(dtype, torch.get_float32_matmul_precision()) or why_not(
        1, 1, hidden, dtype, device, cell, None
    )


def _torch_arguments(
    cell: nn.LSTM | nn.GRU, context: PassContext
) -> tuple[list[Tensor], bool, int, float, bool, bool, bool]:
    """What torch.lstm and torch.gru take behind input and state, for one layer in one direction."""
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    weights = [context.weight(getattr(cell, name)) for name in names]
    has_biases, layers, dropout, bidirectional, batch_first = True, 1, 0.0, False, False
    return weights, has_biases, layers, dropout, cell.training, bidirectional, batch_first


def _zero_state(x: Tensor, hidden: int) -> Tensor:
    return x.new_zeros(1, x.shape[1], hidden)


def _cut(y: Tensor, ragged: Ragged) -> Tensor:
    # torch runs on into the padding: frames before it never see that, and its output ends here
    return torch.where(ragged.valid.t()[:, :, None], y, 0.0)


def _recurrent_start(config: ModelConfig) -> Tensor:
    if config.start == "damped":
        return _RECURRENT_GAIN * torch.eye(config.hidden)
    reach: float = config.hidden**-0.5
    return torch.empty(config.hidden, config.hidden).uniform_(-reach, reach)


def make_recurrent_layer(width_in: int, config: ModelConfig) -> nn.Module:
    """Make the recurrent layer that ``config.cell`` names."""
    return RecurrentLayer(width_in, config) if config.cell == "rnn" else GatedRecurrentLayer(width_in, config)
