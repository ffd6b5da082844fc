"""The exported model, written once for all targets: a signal and a state in, log-probs and the next state out.

First its layers, then the function of inputs and outputs, for chunks of streams or whole utterances. A stream comes in
chunks of a fixed length. Every layer carries the end of its input, gives as many frames as come in and is delayed by
its lookahead: `ds2.model.structure.TimeWindow` says how many. Which of a layer's frames are valid follows from two
counts, the frames before this chunk and with it: frames before the start and past the end are 0 in every layer and in
every recurrent state, as they were when the model was trained.

Shape letters: B batch, N samples, T frames, F bins, C channels, D, H widths, V labels, W samples of a window, M mels.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

import torch
from ds2_ops.recurrent.cells import CELLS
from torch import Tensor, nn

from ds2.audio.features import MIN_ENERGY, POWER_FLOOR, Features, preemphasise
from ds2.export.operations import TorchOperations, Value
from ds2.model.acoustic import NetworkWeights
from ds2.model.checkpoint import LoadedModel
from ds2.model.convolution import ConvWeights
from ds2.model.recurrent import DirectionWeights, ModuleWeights, RecurrentWeights
from ds2.model.structure import TimeWindow
from ds2.system import UserError
from ds2.text.alphabet import BLANK

if TYPE_CHECKING:
    from ds2.export.onnx_operations import OnnxOperations

    Operations = TorchOperations | OnnxOperations
NEVER = -1e4
"""Log-prob of all labels but the blank in frames that are not valid."""
_IMAGE, _SEQUENCE = 3, 1  # the axis of time in (B, C, F, T) and in (B, T, H)


@dataclass(frozen=True)
class FeatureWeights:
    """Samples to normalised features: two products a bin, the sum of their squares, filters, a floor, a logarithm."""

    transform: Tensor  # (2 F, 1, 1, W): cosines, then sines
    mel: Tensor | None  # (M, F, 1, 1)
    floor: float
    adds_floor: bool  # true: the floor is added; false: lower energies are raised to it
    window: TimeWindow  # in samples
    scale: Tensor  # (1, 1, F, 1): 1 / deviation
    shift: Tensor  # ... - mean / deviation


def _feature_weights(features: Features) -> FeatureWeights:
    """The transform as one product: all that Kaldi does to a window before it is linear, removal of the mean too."""
    length = features.window_samples
    samples = torch.arange(length, dtype=torch.float64)
    bins = torch.arange(features.fft_samples // 2 + 1, dtype=torch.float64)
    phase = 2 * math.pi / features.fft_samples * torch.outer(bins, samples)
    transform = torch.cat([phase.cos(), phase.sin()]) * features.window.double()
    if features.preemphasis:
        transform = transform @ preemphasise(torch.eye(length, dtype=torch.float64), features.remove_mean).t()
    mel, scale = features.mel_weights, 1.0 / features.std.double()
    return FeatureWeights(
        transform[:, None, None, :],
        None if mel is None else mel.t()[:, :, None, None],
        MIN_ENERGY if features.preemphasis else POWER_FLOOR,
        not features.preemphasis,
        TimeWindow(length, features.lead_samples, features.step_samples, 0),
        scale.view(1, 1, -1, 1),
        (-features.mean.double() * scale).view(1, 1, -1, 1),
    )


class StateRow:
    """The states that layers carry from chunk to chunk, side by side in one row per stream.

    Args:
        row: (B, K) float32, 0 at the start of a stream; None: zeros, to find K.
        like: a tensor of the same B.
    """

    def __init__(self, ops: Operations, row: Value | None, like: Value) -> None:
        self._ops, self._row, self._like = ops, row, like
        self._next: list[Value] = []
        self.size = 0  # K so far

    def read(self, *shape: int) -> Value:
        """Return the next numbers of the row, which the last chunk wrote, as (B, *shape)."""
        ops, start = self._ops, self.size
        self.size += prod(shape)
        row = ops.zeros(self._like, prod(shape)) if self._row is None else ops.slice(self._row, 1, start, self.size)
        return ops.reshape(row, (0, *shape))

    def write(self, x: Value) -> None:
        """Append (B, ...) to the next chunk's row; reads and writes have the same order and sizes."""
        self._next.append(self._ops.reshape(x, (0, -1)))

    def row(self) -> Value:
        """Return the next chunk's row (B, K)."""
        return self._ops.concat(self._next, 1)


@dataclass(frozen=True)
class SourcePosition:
    """The position of a layer in its source."""

    before: Value  # (B, 1) int64, frames in the chunks before this one
    known: Value  # (B, 1) int64, frames of the source so far, this chunk's included
    delay: int = 0  # frames by which the output is later than the input


@dataclass(frozen=True)
class LayerFrames:
    """Output of a layer: (B, C, F, T) or (B, T, H), 0 where `valid` (B, T) is false."""

    x: Value
    at: SourcePosition
    valid: Value


class Network:
    """A model in the operations of a target.

    Args:
        memory: recurrent states of streams; None: whole utterances.
        tails: ends of the layers' inputs; None: whole utterances.
    """

    def __init__(self, ops: Operations, exported: Exported, memory: StateRow | None, tails: StateRow | None) -> None:
        self.ops, self.features, self.weights = ops, exported.features, exported.network
        self.memory, self.tails = memory, tails

    def energies(self, samples: Value, at: SourcePosition) -> tuple[Value, SourcePosition]:
        """Return log energies (B, 1, F, T) of samples (B, N), and their position."""
        ops, signal, window = self.ops, self.features, self.features.window
        x = self._masked(ops.reshape(samples, (0, 1, 1, -1)), at, _IMAGE).x
        mirrored = ops.slice(x, _IMAGE, 0, window.past).flip(_IMAGE) if window.past else None
        if self.tails is None:
            x = x if mirrored is None else ops.concat([mirrored, x], _IMAGE)
        else:
            x = self._with_past(x, _IMAGE, (1, 1), window, at.before, mirrored)
        parts = ops.conv(x, ops.constant(signal.transform), None, (1, window.stride), 0)
        squares, bins = parts * parts, signal.transform.shape[0] // 2
        power = ops.slice(squares, 1, 0, bins) + ops.slice(squares, 1, bins, None)
        if signal.mel is not None:
            power = ops.conv(power, ops.constant(signal.mel), None, (1, 1), 0)
        power = power + signal.floor if signal.adds_floor else power.clamp(signal.floor, None)
        known = (at.known + (window.past - window.length + window.stride)) // window.stride
        after = SourcePosition(at.before // window.stride, known, self._delay(window))
        return power.log().permute(0, 2, 1, 3), after

    def log_probs(self, energies: Value, at: SourcePosition) -> LayerFrames:
        """Return log-probs (B, T, V) of log energies (B, 1, F, T); invalid frames have a certain blank."""
        ops, signal, network = self.ops, self.features, self.weights
        normalised = energies * ops.constant(signal.scale) + ops.constant(signal.shift)
        frames = self._masked(normalised, at, _IMAGE)
        for conv in network.convs:
            frames = self._conv(frames, conv)
        frames = replace(frames, x=ops.reshape(frames.x.permute(0, 3, 1, 2), (0, 0, -1)))
        for module in network.modules:
            frames = self._module(frames, module)
        x = self._rms_norm(frames.x, network.rms_eps)
        logits = self._product(x, network.classifier) + ops.constant(network.bias)
        blank = torch.full((len(network.bias),), NEVER)
        blank[BLANK] = 0.0
        valid = ops.reshape(frames.valid, (0, -1, 1))
        return replace(frames, x=ops.where(valid, logits.log_softmax(-1), ops.constant(blank)))

    def _conv(self, frames: LayerFrames, conv: ConvWeights) -> LayerFrames:
        ops, at, window = self.ops, frames.at, conv.window
        x = self._with_past(frames.x, _IMAGE, (conv.weight.shape[1], conv.bins), window)
        bins = conv.weight.shape[2] // 2
        x = ops.conv(x, ops.constant(conv.weight), ops.constant(conv.bias), conv.stride, bins)
        stride = window.stride
        after = SourcePosition(at.before // stride, (at.known + (stride - 1)) // stride, self._delay(window))
        return self._masked(x.clamp(0.0, conv.clip), after, _IMAGE)

    def _module(self, frames: LayerFrames, module: ModuleWeights) -> LayerFrames:
        ops, skip = self.ops, frames.x
        for layer in module.layers:
            outputs = [
                self._recur(frames, layer, direction, reverse=bool(number))
                for number, direction in enumerate(layer.directions)
            ]
            frames = replace(frames, x=functools.reduce(operator.add, outputs))
        for weight in module.row_convs:
            frames = self._row_conv(frames, weight)
        if not module.residual:
            return frames
        if module.projection is not None:
            skip = self._product(skip, module.projection)
        if module.lookahead and self.tails is not None:
            waiting = TimeWindow(module.lookahead + 1, 0, 1, 0)
            joined = self._with_past(skip, _SEQUENCE, (module.layers[0].hidden,), waiting)
            skip = ops.slice(joined, _SEQUENCE, 0, -waiting.cached)
        return replace(frames, x=frames.x + skip)

    def _row_conv(self, frames: LayerFrames, weight: Tensor) -> LayerFrames:
        """r_t = sum_j w_j x_(t+j), j from 0 to tau, of weights (tau + 1, H)."""
        ops, (taps, hidden) = self.ops, weight.shape
        window = TimeWindow(taps, 0, 1, frames.at.delay)
        x = self._with_past(frames.x, _SEQUENCE, (hidden,), window)
        terms = (
            ops.slice(x, _SEQUENCE, tap, tap + 1 - taps or None) * ops.constant(weight[tap]) for tap in range(taps)
        )
        total = functools.reduce(operator.add, terms)
        return self._masked(total, SourcePosition(frames.at.before, frames.at.known, self._delay(window)), _SEQUENCE)

    def _product(self, x: Value, weight: Tensor) -> Value:
        """Return x (B, T, K) times a matrix (N, K).

        Where a norm is folded into the matrix, its inputs may differ in size by hundreds, and the small ones would be
        lost in 8 bits. Powers of two, which round nothing, move the sizes of the columns to the inputs.
        """
        sizes = weight.double().square().mean(0).sqrt().clamp(2.0**-40, 2.0**40).log2().round().exp2().to(weight)
        return (x * self.ops.constant(sizes)) @ self.ops.constant((weight / sizes).t())

    def _recur(
        self, frames: LayerFrames, layer: RecurrentWeights, direction: DirectionWeights, *, reverse: bool
    ) -> Value:
        ops, hidden, row = self.ops, layer.hidden, CELLS[layer.cell]
        x = self._rms_norm(frames.x, layer.rms_eps)
        z = self._product(x, direction.weight_ih) + ops.constant(direction.bias)
        valid = ops.reshape(frames.valid, (0, -1, 1)).float()
        weight_t = ops.constant(direction.weight_hh.t())
        bias_hn = None if direction.bias_hn is None else ops.constant(direction.bias_hn)
        states = [
            ops.zeros(z, hidden) if self.memory is None else self.memory.read(hidden) for _ in range(1 + row.carries_c)
        ]

        def step(states: Sequence[Value], inputs: Sequence[Value]) -> list[Value]:
            (x, is_valid), (h, c) = inputs, (*states, None)[:2]
            if row.forward is not None:
                new = row.forward(x, weight_t, bias_hn, h, c, x.dtype)[: len(states)]
            else:
                assert row.activate_ is not None
                new = (row.activate_(x.addmm(h, weight_t), layer.clip),)
            return [state * is_valid for state in new]

        y, last = ops.scan(step, states, [z, valid], reverse=reverse)
        if self.memory is not None:
            for state in last:
                self.memory.write(state)
        return y

    def _rms_norm(self, x: Value, eps: float | None) -> Value:
        """x / sqrt(mean(x^2) + eps) over the last axis of (B, T, H); as it is without an eps."""
        return x if eps is None else self.ops.rms_norm(x, eps)

    def _delay(self, window: TimeWindow) -> int:
        return 0 if self.tails is None else window.delay

    def _masked(self, x: Value, at: SourcePosition, axis: int) -> LayerFrames:
        """Set to 0 what is before the start or past the end."""
        position = self.ops.arange(x, axis) + (at.before - at.delay)
        valid = (position >= 0) & (position < at.known)
        sizes = (0, 1, 1, -1) if axis == _IMAGE else (0, -1, 1)
        return LayerFrames(self.ops.where(self.ops.reshape(valid, sizes), x, 0.0), at, valid)

    def _with_past(
        self,
        x: Value,
        axis: int,
        sizes: Sequence[int],
        window: TimeWindow,
        before: Value = None,
        mirrored: Value | None = None,
    ) -> Value:
        """Put the cached frames before a chunk; around a whole utterance, zeros.

        Args:
            sizes: of the axes but batch and time.
            before: (B, 1) frames before this chunk; needed with `mirrored`.
            mirrored: frames before the first one, `window.past` of them; None: zeros.
        """
        ops = self.ops
        if self.tails is None:
            return ops.pad(x, axis, window.past, window.length - 1 - window.past)
        if not window.cached:
            return x
        tail = self.tails.read(*sizes, window.cached) if axis == _IMAGE else self.tails.read(window.cached, *sizes)
        if mirrored is not None:
            started = ops.reshape(before >= 1, (0, 1, 1, 1))
            tail = ops.where(started, tail, ops.pad(mirrored, axis, window.cached - window.past, 0))
        joined = ops.concat([tail, x], axis)
        self.tails.write(ops.slice(joined, axis, -window.cached, None))
        return joined


STATES = ("cache_last_channel", "cache_last_time", "cache_last_channel_len")
"""Inputs of a stream after the signal and its length: recurrent states, tails, and the frames so far."""


@dataclass(frozen=True)
class Exported:
    """A model as a function.

    Of a stream: signal, length (B,) int64 and three states, all 0 at its start, to log-probs (B, T, V), how many of
    their frames are valid (B,) int64, and the next states. A length below the chunk's ends the stream; chunks of length
    0 then give the frames that waited for their lookahead. Of whole utterances: signal and length to log-probs and
    frames.
    """

    features: FeatureWeights  # float64 on the CPU
    network: NetworkWeights  # float64 on the CPU
    from_samples: bool  # the signal is samples (B, N) in [-1, 1], else log energies (B, F, T)
    chunk: int  # samples or frames of a chunk; 0: whole utterances of any length
    bins: int  # F

    @classmethod
    def of(cls, loaded: LoadedModel, *, from_samples: bool, chunk_s: float) -> Exported:
        """Make it of a model, in chunks of `chunk_s` or a little less; of a bidirectional one, for whole utterances.

        Raises:
            UserError: a chunk of less than an output frame.
        """
        features, model = loaded.features, loaded.model
        frames = int(chunk_s / loaded.frame_s + 1e-6) * model.time_stride
        if frames < 1:
            raise UserError(
                f"a chunk of {1000 * chunk_s:g} ms is less than an output frame of {1000 * loaded.frame_s:g} ms: give "
                "a multiple of that"
            )
        chunk = frames * (features.step_samples if from_samples else 1)
        if model.config.bidirectional:
            chunk = 0
        elif from_samples and chunk < features.lead_samples:
            raise UserError(f"a chunk of {1000 * chunk_s:g} ms is less than half a window: give a longer one")
        with torch.no_grad():
            weights = _feature_weights(features)
            network = model.folded(weights.window.delay if from_samples else 0)  # log energies are not delayed
        return cls(weights, network, from_samples, chunk, features.bins)

    def write(self, ops: Operations, inputs: Mapping[str, Value]) -> tuple[dict[str, Value], int]:
        """Compute the outputs by name, of inputs by name, and the frames by which they are later than the signal."""
        signal, length = inputs["signal"], ops.reshape(inputs["length"], (0, 1))
        if not self.chunk:
            return self._outputs(ops, Network(ops, self, None, None), signal, SourcePosition(length - length, length))
        rows = [None if inputs.get(name) is None else ops.reshape(inputs[name], (0, -1)) for name in STATES]
        memory, tails = (StateRow(ops, row, signal) for row in rows[:2])
        before = length - length if rows[2] is None else rows[2]
        past_end = tails.read(1).long()  # frames past the stream's end in the chunks so far
        length = ops.where(past_end >= 1, 0, length)
        tails.write((past_end + self.chunk - length).float())
        at = SourcePosition(before + past_end, before + length)
        outputs, delay = self._outputs(ops, Network(ops, self, memory, tails), signal, at)
        for name, state in zip(STATES, (memory, tails), strict=False):
            outputs[f"next_{name}"] = ops.reshape(state.row(), (0, 1, 1, state.size))
        outputs[f"next_{STATES[2]}"] = ops.reshape(before + length, (-1,))
        return outputs, delay

    def _outputs(
        self, ops: Operations, network: Network, signal: Value, at: SourcePosition
    ) -> tuple[dict[str, Value], int]:
        if self.from_samples:
            energies, at = network.energies(signal, at)
        else:
            energies = ops.reshape(signal, (0, 1, self.bins, -1))
        output = network.log_probs(energies, at)
        return {"log_probs": output.x, "frames": output.valid.long().sum(1)}, output.at.delay

    def example(self, batch: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Inputs by name: signal (B, N) or (B, F, T) of zeros, length (B,) int64, states (B, ...) of new streams."""
        count = self.chunk or 16000
        sizes = (batch, count) if self.from_samples else (batch, self.bins, count)
        inputs = {"signal": torch.zeros(sizes, dtype=dtype), "length": torch.full((batch,), count)}
        if self.chunk:
            outputs, _ = self.write(TorchOperations(nn.Module(), dtype), inputs)
            inputs |= {name: torch.zeros_like(outputs[f"next_{name}"]) for name in STATES}
        return inputs


class TorchModel(nn.Module):
    """An exported model in torch, to trace or to run; `dtype` is that of its weights and signals.

    Attributes:
        delay: output frames by which log-probs are later than the signal.
    """

    def __init__(self, exported: Exported, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self._exported, self._dtype = exported, dtype
        _, self.delay = exported.write(TorchOperations(self, dtype), exported.example(1, dtype))

    def forward(
        self,
        signal: Tensor,
        length: Tensor,
        cache_last_channel: Tensor | None = None,
        cache_last_time: Tensor | None = None,
        cache_last_channel_len: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Inputs and outputs in the order of `Exported`."""
        states = (cache_last_channel, cache_last_time, cache_last_channel_len)
        inputs = {"signal": signal, "length": length, **dict(zip(STATES, states, strict=True))}
        outputs, _ = self._exported.write(TorchOperations(self, self._dtype), inputs)
        return tuple(outputs.values())
