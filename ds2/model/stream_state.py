"""What the acoustic model carries between the chunks of streams, and how streams share a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds2.model.recurrent import State

Maker = Callable[[list[Tensor], int], Tensor]


@dataclass
class ModuleState:
    """What a recurrent module carries between chunks."""

    recurrent: list[State]  # of each layer, tensors (B, H)
    tails: list[Tensor | None]  # of the row convolutions, (tau, B, H)
    pending: Tensor | None = None  # (T, B, H) frames whose skip waits for the row convolutions


@dataclass
class StreamState:
    """What the model carries between the chunks of a batch of streams; `AcousticModel.start` makes it."""

    streams: int  # B
    conv_tails: list[Tensor | None]  # (B, C, F, T)
    modules: list[ModuleState]
    finished: bool = False

    def signature(self) -> tuple[object, ...]:
        """What streams must have in common to share a batch: the shapes of what they carry, but for B."""
        shapes: list[object] = [self.finished]

        def note(tensors: list[Tensor], dim: int) -> Tensor:
            shapes.append(tuple(size for at, size in enumerate(tensors[0].shape) if at != dim))
            return tensors[0]

        _combined([self], note, shapes.append)
        return tuple(shapes)


def join(states: Sequence[StreamState]) -> StreamState:
    """Return the streams of states of one signature as one batch, in order."""
    return _combined(states, torch.cat)


def split(state: StreamState) -> list[StreamState]:
    """The inverse of `join`: a state a stream."""
    alone = []
    for row in range(state.streams):
        one = _combined([state], lambda tensors, dim, row=row: tensors[0].narrow(dim, row, 1))  # type: ignore[misc]
        one.streams = 1
        alone.append(one)
    return alone


def _nothing(absent: None) -> None:
    """What is said of tensors that are not there, where nobody asks."""


def _combined(states: Sequence[StreamState], make: Maker, absent: Callable[[None], None] = _nothing) -> StreamState:
    """A state whose every tensor is made from the ones at its place and the dimension B of that place."""

    def one(tensors: Sequence[Tensor | None], dim: int) -> Tensor | None:
        present = [tensor for tensor in tensors if tensor is not None]
        if not present:
            absent(None)
            return None
        return make(present, dim)

    def layer(carried: Sequence[State]) -> State:
        present = [state for state in carried if state is not None]
        if not present:
            absent(None)
            return None
        return tuple(make(list(tensors), 0) for tensors in zip(*present, strict=True))

    modules = [
        ModuleState(
            [layer(carried) for carried in zip(*(m.recurrent for m in alike), strict=True)],
            [one(tails, 1) for tails in zip(*(m.tails for m in alike), strict=True)],
            one([m.pending for m in alike], 1),
        )
        for alike in zip(*(state.modules for state in states), strict=True)
    ]
    conv_tails = [one(tails, 0) for tails in zip(*(state.conv_tails for state in states), strict=True)]
    return StreamState(sum(s.streams for s in states), conv_tails, modules, states[0].finished)
