"""Layers that run side by side: piece c of layer l starts as soon as piece c - 1 of it and piece c of layer l - 1 end.

Appleyard et al. (2016), "Optimizing Performance of Recurrent Neural Networks on GPUs", section 3.3: the tasks (layer,
piece) of a stack run along its anti-diagonals. A layer always runs on the same pair of CUDA streams. Its projection,
which needs the layer before only, has a stream of its own and does not wait for the layer's piece before.

In training, recurrent modules run so on pieces of a batch. A recurrence is bound by latency: at 4 utterances it
occupies a part of a GPU, however fast the rest is. Where no layer needs a later frame of the layer below (RMS norm, or
none), each layer runs a piece behind the layer below. Autograd runs the backward pass on the streams of the forward
pass, so it is a wavefront too. Row convolutions look ahead. Behind them, pieces are late by their context: all modules
have as many pieces, those of later modules begin and end at earlier frames, and the last one ends at the last frame of
the batch.

Shape letters: T frames, B batch, D width of a layer's input, H hidden, M modules, P pieces.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import torch
from ds2_ops.jit.launch import device_index
from ds2_ops.recurrent.backends import persistent
from ds2_ops.recurrent.calibrate import choose_tile, device_facts
from ds2_ops.recurrent.cells import CELLS
from ds2_ops.recurrent.deferred import Deferred, DeferredGradients, Factors, GradientSink, Prefetch, is_recording
from torch import Tensor

from ds2.config.schema import ModelConfig
from ds2.model.convolution import RowConvolution
from ds2.model.pass_context import PassContext
from ds2.model.ragged import Ragged
from ds2.model.recurrent import BaseRecurrentLayer, Carry, RecurrentModule, why_torch
from ds2.model.structure import operator_cell

LAYER_SMS = 16  # multiprocessors of a layer with others at its side: one cluster of the largest size
Stage = Callable[[int, Tensor, torch.cuda.Stream | None], Tensor]


class LayerStreams:
    """The streams of a layer: a stream for recurrences, and one of lower priority for the projections before them."""

    def __init__(self, device: torch.device) -> None:
        self.recurrence = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self.projection = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def tasks(stages: int, pieces: int) -> list[tuple[int, int]]:
    """All tasks (stage, piece) along the anti-diagonals, each after (stage - 1, piece) and (stage, piece - 1)."""
    return [
        (stage, diagonal - stage)
        for diagonal in range(stages + pieces - 1)
        for stage in range(max(0, diagonal - pieces + 1), min(stages, diagonal + 1))
    ]


def run_stages(
    stages: Sequence[Stage],
    pieces: Sequence[Tensor],
    streams: Sequence[LayerStreams],
    alive: list[Tensor] | None = None,
) -> list[Tensor]:
    """Run each piece through all stages, in order; return what the last stage makes of each.

    Args:
        stages: each takes the number of a piece, the output of the stage before, and the stream on which that output is
            ready (None: the current one). A stage gets its pieces in order. Its first kernel must run on that stream,
            and the current stream must wait for it.
        pieces: inputs of the first stage, of any shape, made on the current stream.
        streams: for the stages in turn; none: everything runs on the current stream. They start after the current
            stream, and it waits for them, recorded in a CUDA graph or not.
        alive: receives the tensors that other streams may still read. The caller keeps them until all streams have
            joined; where a backward pass follows, which uses the same streams, until that has ended. None: there is no
            backward pass.
    """
    values = list(pieces)
    if not streams:
        for stage, piece in tasks(len(stages), len(pieces)):
            values[piece] = stages[stage](piece, values[piece], None)
        return values
    current = torch.cuda.current_stream(streams[0].recurrence.device)
    started = current.record_event()
    for pair in streams:
        pair.recurrence.wait_event(started)
    # Referenced, since what is freed goes to new tensors of its own stream, and others may still read it.
    alive, done = [] if alive is None else alive, [started] * len(values)
    alive += values
    for stage, piece in tasks(len(stages), len(pieces)):
        pair = streams[stage % len(streams)]  # a stage's own: its pieces run one after the other
        pair.projection.wait_event(done[piece])
        with torch.cuda.stream(pair.recurrence):
            values[piece] = stages[stage](piece, values[piece], pair.projection)
            done[piece] = pair.recurrence.record_event()
        alive.append(values[piece])
    for pair in streams:
        current.wait_event(pair.recurrence.record_event())
    return values


_MAX_TIME = 0.85  # of the time of layers one after the other: pieces that take more are not worth it
# Time of a piece of a layer without the recurrence, forward and backward: a constant of norm and launches, and a part
# that grows with the products, for a million multiplications. Side by side, products have the multiprocessors that
# recurrences leave. Fitted to measured steps of 48 layers of 1152 units at 1, 4, 16 and 64 utterances.
_OVERHEAD_US = (20.0, 30.0)
_PARALLEL_US, _SERIAL_US = (0.046, 0.108), (0.0047, 0.0086)


@dataclass
class Wavefront:
    """How the recurrent modules of a model run in training: in how many pieces, on which streams."""

    layers: int  # in all
    weights: int  # numbers of a layer's recurrent matrix
    lookahead: int  # frames of all row convolutions together
    # Of a number of utterances: the times of a frame of a layer, forward and backward, first on `LAYER_SMS`
    # multiprocessors, then on the whole GPU.
    step_us: Callable[[int], Sequence[Sequence[float]]]
    streams: Sequence[LayerStreams] = ()  # of layers that run at the same time in a CUDA graph; none: the current one
    max_sms: int | None = None  # multiprocessors of a layer in pieces; None: all
    fixed: int = 0  # pieces of every batch, for tests; 0: the estimate decides

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Self:
        """The wavefront of a model on a GPU, whose products have a dtype; `why_not` of these is None."""
        index, cell = device_index(device), operator_cell(config)

        @functools.cache
        def step_us(batch: int) -> list[list[float]]:
            problems = [
                persistent.problem_of(batch, config.hidden, dtype, cell, backward) for backward in (False, True)
            ]
            return [[choose_tile(problem, index, sms).step_us for problem in problems] for sms in (LAYER_SMS, None)]

        clusters = device_facts(index).active_clusters[LAYER_SMS]
        # One more than clusters: with as many pieces as streams, no layer waits for another one's turn on its stream.
        streams = [LayerStreams(device) for _ in range(clusters + 1)]
        weights = CELLS[cell].gates * config.hidden**2
        return cls(config.depth, weights, config.row_convs * config.row_conv_context, step_us, streams, LAYER_SMS)

    def pieces(self, frames: int, batch: int) -> int:
        """Return the number of pieces in which a batch is fastest; 1: layers run one after the other."""
        max_pieces = frames // (self.lookahead + 2)
        if self.fixed:
            return min(self.fixed, max_pieces)
        if frames == 0 or batch == 0:
            return 1
        counts = range(2, min(max_pieces, len(self.streams)) + 1)
        best = min(counts, key=lambda count: self.estimated_us(frames, batch, count), default=1)
        time = self.estimated_us(frames, batch, best) / self.estimated_us(frames, batch, 1)
        return best if time < _MAX_TIME else 1

    def estimated_us(self, frames: int, batch: int, pieces: int) -> float:
        """The time of both passes of all layers in so many pieces."""
        narrow, wide = self.step_us(batch)
        steps_us, products_us = (narrow, _PARALLEL_US) if pieces > 1 else (wide, _SERIAL_US)
        millions = 1e-6 * self.weights * batch * frames / pieces  # of multiplications of a piece of a layer
        return sum(
            (self.layers + pieces - 1) * (frames / pieces * step_us + overhead_us + millions * product_us)
            for step_us, overhead_us, product_us in zip(steps_us, _OVERHEAD_US, products_us, strict=True)
        )


def why_not(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:  # noqa: PLR0911
    """Say why the layers of a model cannot run piece by piece in training; None if they can."""
    cell = operator_cell(config)
    if config.bidirectional:
        return "model.bidirectional=true: its backward layers begin at the last frame"
    if config.norm == "batch" and config.batch_norm:
        return "model.norm=batch: its statistics need all frames of a layer; model.norm=rms needs none"
    if config.intermediate:
        return f"model.intermediate={config.intermediate}: classifiers of inner modules need all of their frames"
    if device.type != "cuda":
        return f"the device is {device}, layers run side by side on a CUDA GPU"
    if config.backend not in ("auto", "persistent"):
        return f"model.backend={config.backend}: only persistent kernels leave room for other layers"
    if why_torch(config, dtype, device) is not None:
        return f"model.cell={config.cell} runs on torch's kernels"
    if reason := persistent.why_not(1, 1, config.hidden, dtype, device, cell, LAYER_SMS):
        return reason
    clusters = device_facts(device_index(device)).active_clusters.get(LAYER_SMS)
    return None if clusters else f"the GPU runs no clusters of {LAYER_SMS} multiprocessors"


def run_modules(
    modules: Sequence[RecurrentModule], x: Tensor, ragged: Ragged, context: PassContext, plan: Wavefront, count: int
) -> Tensor:
    """Run modules on a batch (T, B, D) in `count` pieces, at least 2; return (T, B, H). Both are 0 past each length."""
    for module in modules:
        for parameter in module.parameters():
            context.weight(parameter)  # copies are made on this stream, before the others start
    cuts = [len(x) * number // count for number in range(1, count)]
    spans = _spans(modules, cuts, len(x))
    first, sizes = _bounds(tuple(tuple(pieces) for inputs in spans for pieces in inputs), x.device)
    lengths = iter(torch.minimum((ragged.lengths - first).clamp_min(0), sizes).int())  # (P, B) each
    alive, pieces_context = list[Tensor](), PieceContext(context, count)
    stages = list[Stage]()
    for module, inputs in zip(modules, spans, strict=True):
        own_lengths = [next(lengths) for _ in inputs]
        starts = [start for start, _ in inputs[0]]
        run = ModulePieces(module, starts, own_lengths, ragged, pieces_context, plan.max_sms, alive)
        stages += [functools.partial(run.layer, layer) for layer in range(len(module.recurrent))]
    pieces = torch.split(x, [end - start for start, end in spans[0][0]])
    if not is_recording():
        return torch.cat(run_stages(stages, pieces, ()))
    y = torch.cat(run_stages(stages, pieces, plan.streams, alive))
    return cast(Tensor, _KeepAlive.apply(y, alive))  # type: ignore[no-untyped-call]


Span = tuple[int, int]  # of a piece: its first frame, and one past its last


def _spans(modules: Sequence[RecurrentModule], cuts: Sequence[int], frames: int) -> list[list[list[Span]]]:
    """The pieces of each module: of its layers' input, then of each row convolution's input.

    The input of the first module is cut at `cuts`. Behind a row convolution all pieces but the last end earlier, by its
    lookahead.
    """

    def late_by(delay: int) -> list[Span]:
        starts = [0, *(cut - delay for cut in cuts)]
        return list(zip(starts, [*starts[1:], frames], strict=True))

    delay, spans = 0, list[list[list[Span]]]()
    for module in modules:
        spans.append([late_by(delay)])
        for conv in cast(Iterable[RowConvolution], module.row_convs):
            lookahead = conv.weight.shape[1] - 1
            # From the second piece on, a row convolution starts with the frames that wait for their context.
            spans[-1].append([(max(0, start - lookahead), end) for start, end in late_by(delay)])
            delay += lookahead
    return spans


@functools.lru_cache(maxsize=1024)
def _bounds(spans: tuple[tuple[Span, ...], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """First frames and sizes, (N, P, 1) each; cached, as no numbers can be copied while a CUDA graph is recorded."""
    first = [[start for start, _ in row] for row in spans]
    sizes = [[end - start for start, end in row] for row in spans]
    return torch.tensor(first, device=device)[..., None], torch.tensor(sizes, device=device)[..., None]


@dataclass
class ModulePieces:
    """A module on its way through a batch, piece by piece."""

    module: RecurrentModule
    starts: Sequence[int]  # first frames of the pieces of its input
    lengths: Sequence[Tensor]  # (P, B) int32 valid frames of the pieces of its layers' inputs, then of each row conv's
    ragged: Ragged  # of the whole batch
    context: PassContext
    max_sms: int | None
    alive: list[Tensor]  # receives tensors that several streams use

    def __post_init__(self) -> None:
        self._layers = cast(Sequence[BaseRecurrentLayer], self.module.recurrent)
        self._carries: list[Carry] = [() for _ in self._layers]
        self._tails: list[Tensor | None] = [None for _ in self.module.row_convs]  # frames whose output is still to come
        self._inputs: dict[int, Tensor] = {}
        self._waiting: Tensor | None = None  # frames of the skip that row convolutions have not reached

    def layer(self, number: int, piece: int, x: Tensor, projection_stream: torch.cuda.Stream | None) -> Tensor:
        """Run a layer on a piece (T, B, D), and after the last layer the row convolutions and the skip: a stage."""
        layer, lengths = self._layers[number], self.lengths[0][piece]
        if number == 0:
            self._inputs[piece] = x
        part = replace(self.ragged, lengths=lengths, first=self.starts[piece])  # what these layers read of it
        with torch.cuda.stream(projection_stream):  # None: the current one
            z = layer.project(x, part, self.context)
        if projection_stream is not None:
            torch.cuda.current_stream(z.device).wait_stream(projection_stream)
            self.alive.append(z)
        y, self._carries[number] = layer.recur(z, self._carries[number], lengths, self.context, self.max_sms)
        if number + 1 < len(self._layers):
            return y
        for index in range(len(self._tails)):
            y = self._row_conv(index, piece, y)
        x = self._inputs.pop(piece)
        if self.module.residual and self._tails:
            x = x if self._waiting is None else torch.cat([self._waiting, x])
            x, self._waiting = torch.split(x, [len(y), len(x) - len(y)])
        return self.module.join(y, x, self.context)

    def _row_conv(self, index: int, piece: int, y: Tensor) -> Tensor:
        """Run a row convolution on the next frames (T, B, H); return those whose future frames are there."""
        conv, tail = cast(RowConvolution, self.module.row_convs[index]), self._tails[index]
        waiting = 0 if piece + 1 == len(self.starts) else conv.weight.shape[1] - 1  # frames at the end of y
        parts = [] if tail is None else [tail]
        if waiting:
            parts += torch.split(y, [len(y) - waiting, waiting])
            self._tails[index] = parts[-1]
        else:
            parts.append(y)
        part = replace(self.ragged, lengths=self.lengths[1 + index][piece])
        out: Tensor = conv(torch.cat(parts), part, self.context)
        return out[:-waiting] if waiting else out


class PieceContext:
    """The context of a pass for layers that run piece by piece, each in as many `pieces`."""

    def __init__(self, context: PassContext, pieces: int) -> None:
        self._context, self._pieces = context, pieces
        self._sinks: dict[Tensor, GradientSink | None] = {}
        self._biases: dict[tuple[Tensor, ...], Tensor] = {}

    def weight(self, parameter: Tensor) -> Tensor:
        """Return the weight of the whole pass."""
        return self._context.weight(parameter)

    def bias(self, parameters: Sequence[Tensor]) -> Tensor:
        """Return the bias of the pass, made once for all pieces, in the type that products have under autocast."""
        key = tuple(parameters)
        if key not in self._biases:
            bias = self._context.bias(parameters)
            cast = torch.is_autocast_enabled(bias.device.type)
            self._biases[key] = bias.to(torch.get_autocast_dtype(bias.device.type)) if cast else bias
        return self._biases[key]

    def sink(self, parameter: Tensor) -> GradientSink | None:
        """Return the sink of the pass; for a matrix, one for all pieces of a layer."""
        if parameter not in self._sinks:
            sink = self._context.sink(parameter)
            self._sinks[parameter] = sink if sink is None or parameter.ndim == 1 else PieceSink(sink, self._pieces)
        return self._sinks[parameter]


class PieceSink:
    """Joins the products, one a piece, that a layer adds to the gradient of a matrix in a pass: a `GradientSink`."""

    def __init__(self, sink: GradientSink, pieces: int) -> None:
        self._sink, self._pieces = sink, pieces
        self._factors: list[tuple[Tensor, Tensor]] = []
        self._taken = 0  # pieces
        self._rows: dict[tuple[int, int], PieceSink] = {}
        # For the recurrences of all pieces: they share one transpose, and other layers run beside them anyway.
        self.deferred: Deferred = _OneTranspose()

    def add_products(self, factors: Factors, biases: Sequence[GradientSink] = ()) -> None:
        """Take left (R, N) and right (N, C) of a piece; with those of the last piece, their product is added."""
        self._factors += factors
        self._taken += 1
        if self._taken == self._pieces:
            self._sink.add_products(self._factors, biases)
            self._factors, self._taken = [], 0
            self._launch()

    def add(self, make: Callable[[], Tensor]) -> None:
        """Add the tensor that `make` returns, of a piece."""
        self._sink.add(make)
        self._launch()

    def _launch(self) -> None:
        """Start what was deferred, since it need not wait for the next recurrence."""
        if isinstance(self._sink.deferred, DeferredGradients):
            self._sink.deferred.run_on_side_stream()

    def rows(self, start: int, stop: int) -> GradientSink:
        """The sink of these rows."""
        if (start, stop) not in self._rows:
            self._rows[start, stop] = PieceSink(self._sink.rows(start, stop), self._pieces)
        return self._rows[start, stop]


class _OneTranspose:
    """One `Prefetch` for all pieces of a layer, made by the first that takes it: a `Deferred`."""

    def __init__(self) -> None:
        self._first: Prefetch | None = None

    def expect_backward(self, prefetch: Prefetch) -> Prefetch:
        """Return the first that was announced."""
        self._first = self._first or prefetch
        return self._first

    def during_recurrence(self, own: Prefetch) -> AbstractContextManager[None]:
        """Run nothing."""
        return contextlib.nullcontext()


class _KeepAlive(torch.autograd.Function):
    """The identity; keeps tensors until the graph of the pass is freed, which is after its backward pass."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, alive: list[Tensor]) -> Tensor:
        ctx.alive = alive
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
