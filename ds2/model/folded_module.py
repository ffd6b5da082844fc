"""A recurrent module for hearing only: what it makes of a block of streams, and what these carry to the next one.

Shapes: B streams in a batch, D width of the input, H hidden, T frames, R rows that a stream carries.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from ds2_ops.recurrent.layer import projected
from ds2_ops.row_convolution.chain import lookahead_chain
from torch import Tensor

from ds2.model.acoustic import RecurrentModule
from ds2.model.convolution import RowConvolution
from ds2.model.folded import Carry, FoldedLstm, FoldedRecurrence
from ds2.model.recurrent import GatedRecurrentLayer, RecurrentLayer


class FoldedModule:
    """Recurrent layers, then row convolutions, and the skip around both.

    Args:
        module: as trained.
        delay: frames that its input is late.
        dtype: of weights and activations.
    """

    def __init__(self, module: RecurrentModule, delay: int, dtype: torch.dtype) -> None:
        self.layers = [
            FoldedRecurrence(layer, dtype) if isinstance(layer, RecurrentLayer) else FoldedLstm(layer, dtype)
            for layer in cast(Iterable[RecurrentLayer | GatedRecurrentLayer], module.recurrent)
        ]
        weights = [conv.weight.detach().to(dtype).t() for conv in cast(Iterable[RowConvolution], module.row_convs)]
        self.taps = torch.stack(weights) if weights else None  # (N, tau + 1, H)
        self.projection: tuple[Tensor, Tensor] | None = None
        if module.projection is not None:
            weight = module.projection.weight.detach().to(dtype)
            self.projection = weight, weight.new_zeros(len(weight))
        self.residual, self.delay = module.residual, delay
        self.ahead = sum(len(weight) - 1 for weight in weights)  # frames that its output is later
        # Rows that a stream carries beside its states: what the convolutions heard last, frames that wait for these.
        self.rows = self.ahead * (1 + self.residual)


class Passage:
    """A module's way through a block, piece by piece.

    Args:
        module: the module.
        states: what each layer carries.
        rows: (R, N, H) what streams of N places carry beside these; updated.
        places: (B,) int64 those of the batch.
        edges: first frames and lengths, (C, B) int32 each, of the streams in each piece; None where all are amid.
    """

    def __init__(
        self,
        module: FoldedModule,
        states: Sequence[Carry],
        rows: Tensor,
        places: Tensor,
        edges: tuple[Tensor, Tensor] | None,
    ) -> None:
        self.module, self.rows, self.places, self.edges = module, rows, places, edges
        self.states = list(states)  # by now
        self._inputs: dict[int, Tensor] = {}  # of pieces that are amid the module

    def layer(self, number: int, piece: int, x: Tensor, aside: torch.cuda.Stream | None) -> Tensor:
        """Map a piece (T, B, D) through one layer, and through what closes the module if it is the last; (T, B, H).

        Args:
            number: of the layer in the module.
            piece: its number.
            x: the piece.
            aside: of a layer that has others beside it, as of `ds2.model.wavefront.run`.
        """
        module, layer = self.module, self.module.layers[number]
        begin, lengths = (None, None) if self.edges is None else (part[piece] for part in self.edges)
        if number == 0:
            self._inputs[piece] = x
        y, self.states[number] = layer(x, self.states[number], lengths, begin, aside=aside)
        if number + 1 < len(module.layers):
            return y
        x = self._inputs.pop(piece)
        skip = None
        if module.residual:
            skip = x if module.projection is None else projected(x, *module.projection, None)
        if module.taps is None:
            return y if skip is None else y + skip
        return lookahead_chain(y, module.taps, self.rows, skip, self.places)
