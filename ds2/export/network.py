"""The exported network, written once for all targets: a sound and a state in, log-probs and the next state out.

A stream comes in chunks of a fixed length. What a layer cannot know yet comes out later: every layer carries the end of
what came in, gives as many frames as came, and lags behind by its lookahead. Which of a layer's frames are real follows
from two counts, what was heard before this chunk and what came with it: frames before the start and past the end are 0
in every layer and in every recurrent state, as they were when the model was trained.

Shape letters: B batch, N samples, T frames, F bins, C channels, D, H widths, V labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from ds2.export.operations import Operations, Value
from ds2.export.weights import Cell, Conv, Module, Weights
from ds2.text.alphabet import BLANK

NEVER = -1e4
"""Log-prob of all labels but the blank in frames that are not real."""
_IMAGE, _SEQUENCE = 3, 1  # the axis of time in (B, C, F, T) and in (B, T, H)


class Carried:
    """What layers carry from chunk to chunk, side by side in a row a stream.

    Args:
        ops: of the target.
        row: (B, K) float32, 0 at the start of a stream; None: zeros, to find K.
        like: a tensor of the same B.

    Attributes:
        size: K so far.
    """

    def __init__(self, ops: Operations, row: Value | None, like: Value) -> None:
        self._ops, self._row, self._like = ops, row, like
        self._next: list[Value] = []
        self.size = 0

    def take(self, *shape: int) -> Value:
        """The next of the last chunk's numbers, as (B, *shape)."""
        start, count = self.size, prod(shape)
        self.size += count
        row = self._ops.zeros(self._like, count) if self._row is None else self._ops.cut(self._row, 1, start, self.size)
        return self._ops.reshape(row, (0, *shape))

    def give(self, x: Value) -> None:
        """Keep for the next chunk what stands in the place of what was taken, in the same order."""
        self._next.append(self._ops.reshape(x, (0, -1)))

    def row(self) -> Value:
        """The next chunk's row."""
        return self._ops.concat(self._next, 1)


@dataclass(frozen=True)
class Timeline:
    """Where a layer is in its source.

    Attributes:
        before: (B, 1) int64, frames in the chunks before this one.
        heard: (B, 1) int64, frames of the source that are known of by now.
        lag: frames by which what comes out is behind what came in.
    """

    before: Value
    heard: Value
    lag: int = 0


@dataclass(frozen=True)
class Frames:
    """What a layer gives: (B, C, F, T) or (B, T, H), 0 where `real` (B, T) is false."""

    x: Value
    time: Timeline
    real: Value


class Network:
    """A model in the operations of a target.

    Args:
        ops: of the target.
        weights: of the model.
        memory: the recurrent states of streams; None: whole utterances are heard.
        tails: the ends of what layers have heard; None likewise.
    """

    def __init__(self, ops: Operations, weights: Weights, memory: Carried | None, tails: Carried | None) -> None:
        self.ops, self.weights, self.memory, self.tails = ops, weights, memory, tails

    def energies(self, samples: Value, time: Timeline) -> tuple[Value, Timeline]:
        """Log energies (B, 1, F, T) of samples (B, N)."""
        ops, spectrum = self.ops, self.weights.spectrum
        step, window, lead = spectrum.step_samples, spectrum.window_samples, spectrum.lead_samples
        x = self._real_only(ops.reshape(samples, (0, 1, 1, -1)), time, _IMAGE).x
        mirrored = ops.flip(ops.cut(x, _IMAGE, 0, lead), _IMAGE) if lead else None
        if self.tails is not None:
            x, lag = self._with_past(x, _IMAGE, (1, 1), time, lead, window, step, mirrored)
        else:
            x, lag = x if mirrored is None else ops.concat([mirrored, x], _IMAGE), 0
        parts = ops.conv(x, ops.constant(spectrum.transform), None, (1, step), 0)
        squares, bins = parts * parts, spectrum.transform.shape[0] // 2
        power = ops.cut(squares, 1, 0, bins) + ops.cut(squares, 1, bins, None)
        if spectrum.mel is not None:
            power = ops.conv(power, ops.constant(spectrum.mel), None, (1, 1), 0)
        power = power + spectrum.floor if spectrum.adds_floor else ops.clip(power, spectrum.floor, None)
        heard = (time.heard + (lead - window + step)) // step
        return ops.transpose(ops.log(power), (0, 2, 1, 3)), Timeline(time.before // step, heard, lag)

    def log_probs(self, energies: Value, time: Timeline) -> Frames:
        """Log-probs (B, T, V) of log energies (B, 1, F, T); where frames are not real the blank is certain."""
        ops, weights = self.ops, self.weights
        normalised = energies * ops.constant(weights.scale) + ops.constant(weights.shift)
        frames = self._real_only(normalised, time, _IMAGE)
        bins = weights.scale.shape[2]
        for conv in weights.convs:
            frames = self._conv(frames, conv, bins)
            bins = -(-bins // conv.stride[0])
        x = ops.reshape(ops.transpose(frames.x, (0, 3, 1, 2)), (0, 0, -1))
        frames = Frames(x, frames.time, frames.real)
        for module in weights.modules:
            frames = self._module(frames, module)
        logits = frames.x @ ops.constant(weights.classifier) + ops.constant(weights.bias)
        blank = torch.full((len(weights.bias),), NEVER)
        blank[BLANK] = 0.0
        real = ops.reshape(frames.real, (0, -1, 1))
        found = ops.where(real, ops.log_softmax(logits), ops.constant(blank))
        return Frames(found, frames.time, frames.real)

    def _conv(self, frames: Frames, conv: Conv, bins: int) -> Frames:
        ops, time, stride = self.ops, frames.time, conv.stride[1]
        channels, kernel, window = conv.weight.shape[1:]
        past = (window - 1) // 2
        x, lag = self._with_past(frames.x, _IMAGE, (channels, bins), time, past, window, stride)
        x = ops.conv(x, ops.constant(conv.weight), ops.constant(conv.bias), conv.stride, kernel // 2)
        after = Timeline(time.before // stride, (time.heard + (stride - 1)) // stride, lag)
        return self._real_only(ops.clip(x, 0.0, conv.clip), after, _IMAGE)

    def _module(self, frames: Frames, module: Module) -> Frames:
        ops, skip = self.ops, frames.x
        for layer in module.layers:
            ways = [self._recur(frames, d.weight_ih, d.bias, d.cell, reverse=bool(way)) for way, d in enumerate(layer)]
            frames = Frames(ways[0] + ways[1] if ways[1:] else ways[0], frames.time, frames.real)
        for weight in module.row_convs:
            frames = self._row_conv(frames, weight)
        if not module.residual:
            return frames
        if module.projection is not None:
            skip = skip @ ops.constant(module.projection)
        waits = sum(len(weight) - 1 for weight in module.row_convs)
        if waits and self.tails is not None:
            joined, _ = self._with_past(skip, _SEQUENCE, (skip_width(module),), Timeline(0, 0), 0, waits + 1, 1)
            skip = ops.cut(joined, _SEQUENCE, 0, -waits)
        return Frames(frames.x + skip, frames.time, frames.real)

    def _row_conv(self, frames: Frames, weight: torch.Tensor) -> Frames:
        """r_t = sum_j w_j x_(t+j), j from 0 to tau, of weights (tau + 1, H)."""
        ops, (taps, hidden) = self.ops, weight.shape
        x, lag = self._with_past(frames.x, _SEQUENCE, (hidden,), frames.time, 0, taps, 1)
        total = None
        for tap in range(taps):
            term = ops.cut(x, _SEQUENCE, tap, tap + 1 - taps or None) * ops.constant(weight[tap])
            total = term if total is None else total + term
        return self._real_only(total, Timeline(frames.time.before, frames.time.heard, lag), _SEQUENCE)

    def _recur(
        self, frames: Frames, weight_ih: torch.Tensor, bias: torch.Tensor, cell: Cell, *, reverse: bool
    ) -> Value:
        ops, hidden = self.ops, cell.hidden
        z = frames.x @ ops.constant(weight_ih) + ops.constant(bias)
        real = ops.to_float(ops.reshape(frames.real, (0, -1, 1)))
        weight_hh = ops.constant(cell.weight_hh)
        bias_hn = None if cell.bias_hn is None else ops.constant(cell.bias_hn)
        count = 2 if cell.kind == "lstm" else 1
        states = [ops.zeros(z, hidden) if self.memory is None else self.memory.take(hidden) for _ in range(count)]

        def simple(states: Sequence[Value], inputs: Sequence[Value]) -> list[Value]:
            pre = inputs[0] + states[0] @ weight_hh
            return [(ops.tanh(pre) if cell.tanh else ops.clip(pre, 0.0, cell.high)) * inputs[1]]

        def lstm(states: Sequence[Value], inputs: Sequence[Value]) -> list[Value]:
            i, f, g, o = ops.split(inputs[0] + states[0] @ weight_hh, 4)
            c = (ops.sigmoid(f) * states[1] + ops.sigmoid(i) * ops.tanh(g)) * inputs[1]
            return [ops.sigmoid(o) * ops.tanh(c), c]

        def gru(states: Sequence[Value], inputs: Sequence[Value]) -> list[Value]:
            of_r, of_z, of_n = ops.split(inputs[0], 3)
            from_r, from_z, from_n = ops.split(states[0] @ weight_hh, 3)
            n = ops.tanh(of_n + ops.sigmoid(of_r + from_r) * (from_n + bias_hn))
            kept = ops.sigmoid(of_z + from_z)
            return [(n + kept * (states[0] - n)) * inputs[1]]

        step = {"rnn": simple, "lstm": lstm, "gru": gru}[cell.kind]
        y, last = ops.scan(step, states, [z, real], reverse=reverse)
        if self.memory is not None:
            for state in last:
                self.memory.give(state)
        return y

    def _real_only(self, x: Value, time: Timeline, axis: int) -> Frames:
        """Set to 0 what is before the start or past the end."""
        at = self.ops.steps(x, axis) + (time.before - time.lag)
        real = (at >= 0) & (at < time.heard)
        sizes = (0, 1, 1, -1) if axis == _IMAGE else (0, -1, 1)
        return Frames(self.ops.where(self.ops.reshape(real, sizes), x, 0.0), time, real)

    def _with_past(
        self,
        x: Value,
        axis: int,
        sizes: Sequence[int],
        time: Timeline,
        past: int,
        window: int,
        stride: int,
        mirrored: Value | None = None,
    ) -> tuple[Value, int]:
        """Put before a chunk what its windows see of the last ones; around a whole utterance, zeros.

        Window m of the source begins `past` frames before frame m stride. With `held` frames before it, a chunk has as
        many windows as strides if window - stride <= held < window; its first begins at the source's frame
        -lag - held, and is window -(new lag) if held = past + (new lag) stride - lag. One new lag fulfils both.

        Args:
            sizes: of the axes but batch and time.
            mirrored: what stands before the first frame, `past` long; None: zeros.

        Returns:
            What to put windows over, and the new lag.
        """
        ops = self.ops
        if self.tails is None:
            return ops.pad(x, axis, past, window - 1 - past), 0
        lag = -((past + stride - window - time.lag) // stride)
        held = past + lag * stride - time.lag
        if not held:
            return x, lag
        tail = self.tails.take(*sizes, held) if axis == _IMAGE else self.tails.take(held, *sizes)
        if mirrored is not None:
            begun = ops.reshape(time.before >= 1, (0, 1, 1, 1))
            tail = ops.where(begun, tail, ops.pad(mirrored, axis, held - past, 0))
        joined = ops.concat([tail, x], axis)
        self.tails.give(ops.cut(joined, axis, -held, None))
        return joined, lag


def skip_width(module: Module) -> int:
    """H: of a module's residual skip."""
    return module.layers[0][0].cell.hidden
