"""How a model hears the blocks of sessions: in batches of one shape, or chunk by chunk as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ds2.model.stream_state import StreamState, join, split
from ds2.recognition.graphed import GraphedBlocks
from ds2.recognition.parts import Parts, Said


class Hearing(Protocol):
    """A model that hears any number of streams, those it is given in one batch."""

    def prepare(self, streams: int) -> None:
        """Do now what so many streams at once would else wait for."""

    def start(self) -> Any:
        """Begin a stream.

        Raises:
            ConfigError: a bidirectional model.
        """

    def step(self, streams: Sequence[Any], blocks: Sequence[NDArray[np.float32]]) -> Iterator[Said]:
        """Hear the samples of each stream's next block."""
        ...

    def finish(self, stream: Any, rest: NDArray[np.float32]) -> Iterator[Said]:
        """Hear the samples that are left and end a stream."""
        ...


def hearing(parts: Parts, block_frames: int) -> Hearing:
    """The fastest way in which a model can hear on its device; one for all sessions with the same blocks."""
    found: Hearing | None = parts.hearings.get(block_frames)
    if found is None:
        blocks = GraphedBlocks.why_not(parts, block_frames) is None
        found = GraphedBlocks(parts, block_frames) if blocks else Chunks(parts)
        parts.hearings[block_frames] = found
    return found


@dataclass
class Stream:
    """What the model carries of a stream."""

    state: StreamState


class Chunks:
    """The model as it is: streams that carry alike share a batch."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def prepare(self, streams: int) -> None:
        """Nothing waits."""

    def start(self) -> Stream:
        """See `Hearing`."""
        return Stream(self.parts.model.start())

    @torch.inference_mode()
    def step(self, streams: Sequence[Stream], blocks: Sequence[NDArray[np.float32]]) -> Iterator[Said]:
        """See `Hearing`."""
        features = self.parts.heard(blocks)

        def signature(row: int) -> str:
            return str(streams[row].state.signature())

        for _, alike in groupby(sorted(range(len(streams)), key=signature), key=signature):
            rows = list(alike)
            state = join([streams[row].state for row in rows])
            with self.parts.running():
                logits = self.parts.model.step(features if len(rows) == len(streams) else features[rows], state)
            for row, own in zip(rows, split(state), strict=True):
                streams[row].state = own
            yield Said(rows, logits, [len(logits)] * len(rows))

    @torch.inference_mode()
    def finish(self, stream: Stream, rest: NDArray[np.float32]) -> Iterator[Said]:
        """See `Hearing`."""
        if self.parts.features.windows(len(rest)):
            yield from self.step([stream], [rest])
        with self.parts.running():
            logits = self.parts.model.finish(stream.state)
        yield Said([0], logits, [len(logits)])
