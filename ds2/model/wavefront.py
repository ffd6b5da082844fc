"""Layers that run side by side: piece c of layer l starts as soon as piece c - 1 of it and piece c of layer l - 1 end.

Appleyard et al. (2016), "Optimizing Performance of Recurrent Neural Networks on GPUs", section 3.3: the tasks (layer,
piece) of a stack run along its anti-diagonals. A layer always runs on the same pair of CUDA streams. Its projection,
which needs the layer before only, has a stream of its own and does not wait for the layer's piece before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LAYER_SMS = 16  # multiprocessors of a layer with others at its side: the largest cluster, as many fit as clusters do
Stage = Callable[[int, Tensor, torch.cuda.Stream | None], Tensor]


@dataclass(frozen=True)
class Task:
    """One piece of one stage."""

    stage: int
    piece: int
    streams: int  # which pair of streams


class LayerStreams:
    """A stream for recurrences, and one of lower priority for the projections before them."""

    def __init__(self, device: torch.device) -> None:
        self.recurrence = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self.projection = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def tasks(stages: int, pieces: int, streams: int) -> list[Task]:
    """All tasks along the anti-diagonals, each after those it needs.

    Stage s has streams s % streams, so piece c - 1 of a stage is before piece c on its streams.
    """
    return [
        Task(stage, diagonal - stage, stage % streams)
        for diagonal in range(stages + pieces - 1)
        for stage in range(max(0, diagonal - pieces + 1), min(stages, diagonal + 1))
    ]


def run(
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
        streams: for the layers; none: everything runs on the current stream. They start behind the current stream, and
            it waits for them, recorded in a CUDA graph or not.
        alive: receives what must not be freed before all streams have joined again; for a backward pass, which uses
            the streams of its forward pass, that is its end. None: nothing is needed once this returns.
    """
    values = list(pieces)
    if not streams:
        for task in tasks(len(stages), len(pieces), 1):
            values[task.piece] = stages[task.stage](task.piece, values[task.piece], None)
        return values
    current = torch.cuda.current_stream(streams[0].recurrence.device)
    started = current.record_event()
    for pair in streams:
        pair.recurrence.wait_event(started)
    # No memory is freed before the streams have joined: another stream may still read it.
    alive, done = [] if alive is None else alive, [started] * len(values)
    alive += values
    for task in tasks(len(stages), len(pieces), len(streams)):
        pair = streams[task.streams]
        pair.projection.wait_event(done[task.piece])
        with torch.cuda.stream(pair.recurrence):
            values[task.piece] = stages[task.stage](task.piece, values[task.piece], pair.projection)
            done[task.piece] = pair.recurrence.record_event()
        alive.append(values[task.piece])
    for pair in streams:
        current.wait_event(pair.recurrence.record_event())
    return values
