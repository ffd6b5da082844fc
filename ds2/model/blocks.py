"""The model for many streams in blocks of one length: what a stream carries has one shape from first block to last.

`AcousticModel.step` holds back what has no future yet, so its first chunks give less, and so does what it carries. Here
a stream starts with zeros in place of what it would have carried, and every block gives as many frames as any other:
those before the stream's start, and after its end, mean nothing, and are kept from the others by masks. So one CUDA
graph of a batch size serves all streams at all times; what they carry lies in tables that it reads and writes itself.

Block k of a level with T frames a block and a delay of d gives its frames k T - d .. (k + 1) T - d - 1.
Shapes: N streams with a place, B in a batch, C channels, F bins, H hidden, T frames, R rows that a stream carries.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
from ds2_ops.classifier.op import classify
from ds2_ops.convolution.carried import Given, flattened
from ds2_ops.convolution.kernels import CHANNELS
from ds2_ops.recurrent.backends import why_not_unasked
from ds2_ops.recurrent.layer import why_not_beside
from torch import Tensor

from ds2.config.schema import ConfigError
from ds2.model import wavefront
from ds2.model.acoustic import AcousticModel, RecurrentModule
from ds2.model.convolution import MaskedConv
from ds2.model.folded import WAVE_SMS, FoldedConv, FoldedLstm, StreamedConv, before
from ds2.model.folded_module import FoldedModule, Passage
from ds2.model.structure import frames_after

WAVE_LANES = 7  # layers beside each other: as many clusters of 16 multiprocessors as an H200 holds
MOST_STREAMS_IN_WAVES = 16  # that a cluster runs at once
FOR_EVER = 2**62  # feature frames of a stream whose end is not known


@dataclass(frozen=True)
class ConvLevel:
    """What a convolution gives in a block."""

    conv: FoldedConv | StreamedConv
    frames: int  # T of the output
    delay: int
    tail: int  # input frames that are carried
    needed: int  # of the carried and the new ones together


@dataclass
class Carried:
    """What streams carry from block to block."""

    convs: list[Tensor]  # (N, F, T, C) a convolution
    states: Tensor  # (L, N, H) h of the recurrent layers
    cells: Tensor  # (L, N, H) c of them, in float32 at least; of none but LSTM layers
    rows: Tensor  # (R, N, H): tails of row convolutions and frames that wait for them, module by module


class BlockModel:
    """A model that hears streams in blocks of `block_frames` feature frames.

    Args:
        model: unidirectional, of simple recurrent or LSTM layers, in evaluation mode; what it learns later is not seen.
        block_frames: a multiple of the model's stride in time.
        dtype: of weights and activations; the classifier's are float32 at least.
        piece_frames: feature frames of a piece, a multiple of the stride: recurrent layers run the block piece by
            piece, on a GPU those of few streams beside each other (`ds2.model.wavefront`). None: all at once.

    Raises:
        ConfigError: a model that cannot be heard so.
        ValueError: blocks that are no multiple of the stride.
    """

    @torch.no_grad()
    def __init__(
        self, model: AcousticModel, block_frames: int, dtype: torch.dtype, piece_frames: int | None = None
    ) -> None:
        if reason := why_not(model):
            raise ConfigError(reason)
        if block_frames < 1 or block_frames % model.time_stride:
            raise ValueError(f"block_frames={block_frames} is no multiple of the model's stride, {model.time_stride}")
        self.piece, self._lanes = (piece_frames or block_frames) // model.time_stride, list[wavefront.Lane]()
        self.lanes, self.waves = WAVE_LANES, runs_waves(model, dtype)
        self.block_frames, self.dtype, self.bins, self.hidden = block_frames, dtype, model.bins, model.config.hidden
        self.strides = [conv.stride[1] for conv in model.config.convs]
        self.device = model.classifier.weight.device
        self.convs: list[ConvLevel] = []
        self._conv_shapes: list[tuple[int, int, int]] = []
        frames, delay, channels, bins = block_frames, 0, 1, model.bins
        self._channels = channels
        for conv in cast(Iterable[MaskedConv], model.convs):
            kernel, stride = conv.kernel[1], conv.stride[1]
            reach, before_it = (kernel - 1) // 2, delay
            delay = -(-(reach + before_it + 1) // stride) - 1
            tail = delay * stride + reach - before_it
            folded = _folded(conv, channels, bins, dtype)
            self._conv_shapes.append((bins, tail, folded.channels))
            frames //= stride
            self.convs.append(ConvLevel(folded, frames, delay, tail, (frames - 1) * stride + kernel))
            channels = CHANNELS if isinstance(folded, StreamedConv) else conv.weight.shape[0]
            bins, self._channels = conv.output_bins(bins), conv.weight.shape[0]
        self.frames = frames
        self.modules: list[FoldedModule] = []
        for module in cast(Iterable[RecurrentModule], model.recurrent_modules):
            self.modules.append(FoldedModule(module, delay, dtype))
            delay += self.modules[-1].ahead
        self.delay = delay
        starts = torch.arange(0, self.frames, self.piece, device=self.device)
        delays = torch.tensor([module.delay for module in self.modules], device=self.device)
        self._first = (starts - delays[:, None])[..., None]  # (M, C, 1): a block's first frame of each module and piece
        self._long = (self.frames - starts).clamp_max(self.piece)[:, None]
        weight, bias = before(model.classifier.weight, model.classifier.bias, model.norm)
        self.wide = torch.promote_types(dtype, torch.float32)
        self._classifier = weight.to(self.wide), bias.to(self.wide)

    def start(self, places: int) -> Carried:
        """Places for streams; what is in them does not matter before a stream's first block."""
        convs = [torch.zeros(places, *shape, dtype=self.dtype, device=self.device) for shape in self._conv_shapes]
        layers = [layer for module in self.modules for layer in module.layers]
        cells = sum(isinstance(layer, FoldedLstm) for layer in layers)
        rows = sum(module.rows for module in self.modules)
        tables = (
            torch.zeros(count, places, self.hidden, dtype=dtype, device=self.device)
            for count, dtype in ((len(layers), self.dtype), (cells, self.wide), (rows, self.dtype))
        )
        return Carried(convs, *tables)

    def output_frames(self, frames: int) -> int:
        """Output frames of a stream of so many feature frames."""
        for stride in self.strides:
            frames = frames_after(frames, stride)
        return frames

    def given(self, block: int, ends: int = FOR_EVER) -> tuple[int, int]:
        """The first and one past the last frame of a block's output that belong to the stream."""
        at = block * self.frames - self.delay
        return min(self.frames, max(0, -at)), max(0, min(self.frames, self.output_frames(ends) - at))

    @torch.no_grad()
    def run(
        self, features: Tensor, carried: Carried, places: Tensor, blocks: Tensor, ends: Tensor, *, edges: bool
    ) -> Tensor:
        """Hear the next block of a batch of streams; what they carry is updated in its places.

        Args:
            features: (B, F, T), 0 past a stream's end.
            carried: of all streams.
            places: (B,) int64 which of them, all different.
            blocks: (B,) int64 blocks that each has heard.
            ends: (B,) int64 feature frames of each, FOR_EVER while that is not known.
            edges: whether a stream may be within its first blocks or past its end; else all are taken to be amid.

        Returns:
            Logits (T', B, V), of which `given` says what belongs to a stream.
        """
        clock = (blocks, ends, 0) if edges else ()
        given = Given(features[..., None], self.dtype, None, 0.0, *clock)
        for level, table, stride in zip(self.convs, carried.convs, self.strides, strict=True):
            x = level.conv.hear(given, table, places, level.needed)
            if edges:
                ends = frames_after(ends, stride)
                clock = blocks, ends, level.delay
            given = Given(x, self.dtype, *level.conv.left, *clock)
        if edges:
            for table in (carried.states, carried.cells, carried.rows):
                table.index_copy_(1, places, table.index_select(1, places) * (blocks > 0)[:, None])
        x = flattened(given.first(self._channels))
        return classify(self.layers(x, carried, places, blocks, ends, edges=edges), *self._classifier)

    @torch.no_grad()
    def layers(
        self, x: Tensor, carried: Carried, places: Tensor, blocks: Tensor, ends: Tensor, *, edges: bool
    ) -> Tensor:
        """Run all recurrent modules on a block (T, B, D), piece by piece.

        Args:
            x: what the convolutions made of the block.
            carried, places, blocks, ends, edges: as of `run`, `ends` in output frames.

        Returns:
            (T, B, H).
        """
        pieces = torch.split(x, self.piece)
        lanes = self._lanes_for(x.shape[1]) if len(pieces) > 1 else []
        begins = lengths = None
        if edges:  # a state stays 0 until its stream begins, and nothing is heard past the end
            first = blocks * self.frames + self._first  # (M, C, B): of each module and piece
            begins = (-first).clamp_min(0).int()
            lengths = torch.minimum((ends - first).clamp_min(0), self._long).int()
        states, cells = (iter(table.index_select(1, places)) for table in (carried.states, carried.cells))
        rows = iter(torch.split(carried.rows, [module.rows for module in self.modules]))
        stages, passages = list[wavefront.Stage](), list[Passage]()
        for number, module in enumerate(self.modules):
            edge = None if begins is None or lengths is None else (begins[number], lengths[number])
            own = [(next(states), *itertools.islice(cells, 1)) for _ in module.layers]
            passages.append(Passage(module, own, next(rows), places, edge))
            stages += [functools.partial(passages[-1].layer, layer) for layer in range(len(module.layers))]
        values = wavefront.run(stages, pieces, lanes)
        carries = [carry for passage in passages for carry in passage.states]
        for number, table in enumerate((carried.states, carried.cells)):
            if len(table):
                table.index_copy_(1, places, torch.stack([carry[number] for carry in carries]))
        return torch.cat(values) if len(values) > 1 else values[0]

    def _lanes_for(self, batch: int) -> list[wavefront.Lane]:
        """Lanes for a batch whose layers take so few multiprocessors that several fit beside each other."""
        if not self.waves or batch > MOST_STREAMS_IN_WAVES:
            return []
        while len(self._lanes) < self.lanes:
            self._lanes.append(wavefront.Lane(self.device))
        return self._lanes[: self.lanes]


def why_not(model: AcousticModel) -> str | None:
    """Why a model cannot be heard in blocks of one shape; None if it can."""
    if model.config.bidirectional:
        return "model.bidirectional=true hears an utterance from its end too"
    if model.config.cell == "gru":
        return "model.cell=gru does not stay at zero until a stream begins: it is heard chunk by chunk"
    return None


def runs_waves(model: AcousticModel, dtype: torch.dtype) -> bool:
    """Whether several layers of a model of this type fit on its GPU beside each other."""
    config, device = model.config, model.classifier.weight.device
    if device.type != "cuda" or why_not(model) or config.backend not in ("auto", "persistent"):
        return False
    unasked = config.backend == "auto" and why_not_unasked(dtype, torch.get_float32_matmul_precision())
    size = (config.hidden, dtype, device, config.nonlinearity if config.cell == "rnn" else config.cell, WAVE_SMS)
    return not (unasked or any(why_not_beside(batch, *size) for batch in (1, MOST_STREAMS_IN_WAVES)))


def _folded(conv: MaskedConv, channels: int, bins: int, dtype: torch.dtype) -> FoldedConv | StreamedConv:
    """A layer that takes (B, F, T, C) of so many bins and channels, some of which may be 0."""
    if StreamedConv.why_not(conv, channels, dtype) is None:
        return StreamedConv(conv, channels, dtype)
    # Frames up to which a GPU convolves faster by one product.
    dense_frames = 0 if not conv.weight.is_cuda else 1 << 30 if channels == 1 else 80
    return FoldedConv(conv, bins, dtype, dense_frames)
