"""The recurrent layers of the acoustic model: ours, and torch's cells with gates.

Every layer has one forward for whole utterances and for streams, so that both run the same arithmetic.
Shape letters: T frames, B batch, H hidden, D width of a layer's input.

Invariant: between layers, frames past an utterance's length are exactly 0, and no layer reads a gradient there.
"""

import torch
from ds2_ops import recurrence
from torch import Tensor, nn
from torch.nn import functional

from ds2.config.schema import ModelConfig
from ds2.model.dropout import UtteranceDropout
from ds2.model.norm import SequenceBatchNorm
from ds2.model.ragged import Ragged, reverse

State = tuple[Tensor, ...] | None
_RECURRENT_GAIN = 0.5


class RecurrentLayer(nn.Module):
    """Simple recurrent layer h_t = f(BN(W x_t) + U h_(t-1)) (paper, section 5.2; Deep Speech 2, section 3.2).

    Bidirectional layers share W and its batch norm, have a U each, and sum both directions, as Deep Speech 2 does.

    U starts as the identity times 0.5: each unit begins as a leaky sum of its own input, so the gradient reaches a few
    frames back and the state stays far below the clip (tried beside others: recipes/initialisation.md). With
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

    def forward(self, x: Tensor, ragged: Ragged, state: State = None) -> tuple[Tensor, State]:
        """Run the layer over whole utterances, or over the next chunk of streams.

        Args:
            x: (T, B, D), 0 past each length.
            ragged: lengths of ``x``, keys of its dropout.
            state: one (B, H) tensor, h before frame 0; zeros when None.

        Returns:
            (T, B, H), 0 past each length, and the state after each utterance's last frame.
        """
        x = self.dropout(x, ragged.keys)
        z = functional.linear(x, self.weight_ih, self.bias)
        if self.norm is not None:
            z = self.norm(z, ragged.count)
        y, h_n = self._recur(z, self.weight_hh, None if state is None else state[0], ragged)
        if self.weight_hh_reverse is not None:
            flipped, _ = self._recur(reverse(z, ragged), self.weight_hh_reverse, None, ragged)
            y = y + reverse(flipped, ragged)
        return y, (h_n,)

    def _recur(self, z: Tensor, weight_hh: Tensor, h0: Tensor | None, ragged: Ragged) -> tuple[Tensor, Tensor]:
        return recurrence(
            z, weight_hh, h0, ragged.lengths, nonlinearity=self.nonlinearity, clip=self.clip, backend=self.backend
        )


class TorchRecurrentLayer(nn.Module):
    """LSTM or GRU layer through torch's fused kernels, which hold the input projection.

    Batch norm therefore acts on the layer's input instead of on its projection: an identity projection behind a
    normalised one would cost a product as large as the recurrence. Directions are summed, as in
    :class:`RecurrentLayer`. Arguments, shapes and returns are those of :class:`RecurrentLayer`, the state of an LSTM
    being (h, c).
    """

    def __init__(self, width_in: int, config: ModelConfig) -> None:
        super().__init__()
        make = {"lstm": nn.LSTM, "gru": nn.GRU}[config.cell]
        self.dropout = UtteranceDropout(config.dropout)
        self.norm = SequenceBatchNorm(width_in, config.batch_norm_momentum) if config.batch_norm else None
        self.cell = make(width_in, config.hidden)
        self.cell_reverse = make(width_in, config.hidden) if config.bidirectional else None

    def forward(self, x: Tensor, ragged: Ragged, state: State = None) -> tuple[Tensor, State]:
        """See :meth:`RecurrentLayer.forward`."""
        if self.norm is not None:
            x = self.norm(x, ragged.count)
        x = self.dropout(x, ragged.keys)
        carried = None if state is None else tuple(s[None] for s in state)
        y, last = self.cell(x, carried[0] if carried is not None and len(carried) == 1 else carried)
        if self.cell_reverse is not None:
            flipped, _ = self.cell_reverse(reverse(x, ragged))
            y = y + reverse(flipped, ragged)
        # torch runs on into the padding: frames before it never see that, and its output ends here
        y = torch.where(ragged.valid.t()[:, :, None], y, 0.0)
        return y, tuple(s[0] for s in (last if isinstance(last, tuple) else (last,)))


def _recurrent_start(config: ModelConfig) -> Tensor:
    if config.start == "damped":
        return _RECURRENT_GAIN * torch.eye(config.hidden)
    reach: float = config.hidden**-0.5
    return torch.empty(config.hidden, config.hidden).uniform_(-reach, reach)


def make_recurrent_layer(width_in: int, config: ModelConfig) -> nn.Module:
    """Make the recurrent layer that ``config.cell`` names."""
    return RecurrentLayer(width_in, config) if config.cell == "rnn" else TorchRecurrentLayer(width_in, config)
