"""The exported model as a function: its inputs and outputs, for chunks of streams or whole utterances."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ds2.export.network import ExportWeights, Network, SourcePosition, StateRow, collect
from ds2.export.operations import Operations, TorchOperations, Value
from ds2.model.checkpoint import LoadedModel
from ds2.system.errors import UserError

STATES = ("cache_last_channel", "cache_last_time", "cache_last_channel_len")
"""Inputs of a stream after the signal and its length: recurrent states, tails, and the frames so far."""


class ExportError(UserError):
    """A model that cannot be exported like this; the message says why, and the way out."""


@dataclass(frozen=True)
class Exported:
    """A model as a function.

    Of a stream: signal, length (B,) int64 and three states, all 0 at its start, to log-probs (B, T, V), how many of
    their frames are valid (B,) int64, and the next states. A length below the chunk's ends the stream; chunks of length
    0 then give the frames that waited for their lookahead. Of whole utterances: signal and length to log-probs and
    frames.

    Attributes:
        weights: of the model.
        from_samples: the signal is samples (B, N) in [-1, 1], else log energies (B, F, T).
        chunk: samples or frames of a chunk; 0: whole utterances of any length.
        bins: F.
    """

    weights: ExportWeights
    from_samples: bool
    chunk: int
    bins: int

    @classmethod
    def of(cls, loaded: LoadedModel, *, from_samples: bool, chunk_s: float) -> Exported:
        """Of a model, in chunks of `chunk_s` or a little less; of a bidirectional one, whole utterances.

        Raises:
            ExportError: a chunk of less than an output frame.
        """
        features, model = loaded.features, loaded.model
        frames = int(chunk_s / loaded.frame_s + 1e-6) * model.time_stride
        if frames < 1:
            raise ExportError(
                f"a chunk of {1000 * chunk_s:g} ms is less than an output frame of {1000 * loaded.frame_s:g} ms: give "
                "a multiple of that"
            )
        chunk = frames * (features.step_samples if from_samples else 1)
        if model.config.bidirectional:
            chunk = 0
        elif from_samples and chunk < features.lead_samples:
            raise ExportError(f"a chunk of {1000 * chunk_s:g} ms is less than half a window: give a longer one")
        return cls(collect(model, features, from_samples=from_samples), from_samples, chunk, features.bins)

    def write(self, ops: Operations, inputs: Mapping[str, Value]) -> tuple[dict[str, Value], int]:
        """Compute the outputs by name, of inputs by name, and the frames by which they are later than the signal."""
        signal, length = inputs["signal"], ops.reshape(inputs["length"], (0, 1))
        if not self.chunk:
            return self._outputs(
                ops, Network(ops, self.weights, None, None), signal, SourcePosition(length - length, length)
            )
        rows = [None if inputs.get(name) is None else ops.reshape(inputs[name], (0, -1)) for name in STATES]
        memory, tails = (StateRow(ops, row, signal) for row in rows[:2])
        before = length - length if rows[2] is None else rows[2]
        past_end = ops.to_int(tails.read(1))  # frames past the stream's end in the chunks so far
        length = ops.where(past_end >= 1, 0, length)
        tails.write(ops.to_float(past_end + self.chunk - length))
        at = SourcePosition(before + past_end, before + length)
        outputs, delay = self._outputs(ops, Network(ops, self.weights, memory, tails), signal, at)
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
        frames = ops.total(ops.to_int(output.valid), 1)
        return {"log_probs": output.x, "frames": frames}, output.at.delay

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
    """An exported model in torch, to trace or to run.

    Args:
        exported: the model.
        dtype: of its weights; signals must have it too.

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
