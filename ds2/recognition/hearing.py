"""How a model hears the blocks of sessions: in batches of one shape, or chunk by chunk as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds2.model.stream_state import StreamState, join, split
from ds2.recognition.graphed import GraphedBlocks
from ds2.recognition.pipeline import Pipeline, Said


class Hearing(Protocol):
    """A model that hears any number of streams, those it is given in one batch."""

    def prepare(self, streams: int) -> None:
        """Do now what so many streams at once would else wait for."""

    def start(self) -> Any:
        """Begin a stream.

        Raises:
            ConfigError: a bidirectional model.
        """

    def room(self, stream: Any, number: int) -> NDArray[np.float32]:
        """Where the samples (N,) of a stream's block by its number are best written."""
        ...

    def step(self, streams: Sequence[Any], blocks: Sequence[NDArray[np.float32]]) -> Iterator[Said]:
        """Hear the samples (N,) float32 in [-1, 1] of each stream's next block."""
        ...

    def last(self, stream: Any, rest: NDArray[np.float32], waiting: int) -> list[NDArray[np.float32]]:
        """End a stream.

        Args:
            stream: gets no others than these blocks.
            rest: its last samples (N,), fewer than a block's.
            waiting: blocks that it has not heard yet, before these.

        Returns:
            What is left for `step`; with empty blocks it hears what waited for its future.
        """
        ...


def hearing(parts: Pipeline, block_frames: int) -> Hearing:
    """The fastest way in which a model can hear on its device; one for all sessions with the same blocks."""
    found: Hearing | None = parts.hearings.get(block_frames)
    if found is None:
        blocks = GraphedBlocks.why_not(parts, block_frames) is None
        found = GraphedBlocks(parts, block_frames) if blocks else Chunks(parts, block_frames)
        parts.hearings[block_frames] = found
    return found


@dataclass
class Stream:
    """What the model carries of a stream."""

    state: StreamState


class Chunks:
    """The model as it is: streams that carry alike share a batch."""

    def __init__(self, parts: Pipeline, block_frames: int) -> None:
        self.parts = parts
        self.samples = parts.features.span(block_frames)

    def prepare(self, streams: int) -> None:
        """Nothing waits."""

    def start(self) -> Stream:
        """See `Hearing`."""
        return Stream(self.parts.model.start())

    def room(self, stream: Stream, number: int) -> NDArray[np.float32]:
        """See `Hearing`."""
        return np.empty(self.samples, np.float32)

    @torch.inference_mode()
    def step(self, streams: Sequence[Stream], blocks: Sequence[NDArray[np.float32]]) -> Iterator[Said]:
        """See `Hearing`."""

        def alike(row: int) -> tuple[int, str]:
            return len(blocks[row]), str(streams[row].state.signature()) if len(blocks[row]) else str(row)

        for (samples, _), found in groupby(sorted(range(len(streams)), key=alike), key=alike):
            rows = list(found)
            with self.parts.autocast():
                if samples:
                    logits = self._next([streams[row] for row in rows], [blocks[row] for row in rows])
                else:
                    logits = self.parts.model.finish(streams[rows[0]].state)
            yield Said(rows, logits, [len(logits)] * len(rows))

    def _next(self, streams: Sequence[Stream], blocks: Sequence[NDArray[np.float32]]) -> Tensor:
        state = join([stream.state for stream in streams])
        logits = self.parts.model.step(self.parts.block_features(blocks), state)
        for stream, own in zip(streams, split(state), strict=True):
            stream.state = own
        return logits

    def last(self, stream: Stream, rest: NDArray[np.float32], waiting: int) -> list[NDArray[np.float32]]:
        """See `Hearing`."""
        return [rest, rest[:0]] if self.parts.features.windows(len(rest)) else [rest[:0]]
