"""Layers that overlap: piece c of layer l runs as soon as piece c - 1 of it and piece c of layer l - 1 are there.

Appleyard et al. (2016), "Optimizing Performance of Recurrent Neural Networks on GPUs", section 3.3: the cells (layer,
piece) of a stack are run along its anti-diagonals. Here a lane is two CUDA streams, and a layer stays on its lane: what
needs only the layer before, its projection, goes aside, and need not wait for the layer's piece before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Stage = Callable[[int, Tensor, torch.cuda.Stream | None], Tensor]


@dataclass(frozen=True)
class Task:
    """One piece of one stage."""

    stage: int
    piece: int
    lane: int


class Lane:
    """A stream for recurrences, and one aside for projections, which wait where both want the same multiprocessors."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self.aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def tasks(stages: int, pieces: int, lanes: int) -> list[Task]:
    """All tasks in an order in which each may be queued: after those it needs, and along the anti-diagonals.

    Stage s has lane s % lanes, so piece c - 1 of a stage is before piece c on its lane.
    """
    found = []
    for diagonal in range(stages + pieces - 1):
        for stage in range(max(0, diagonal - pieces + 1), min(stages, diagonal + 1)):
            found.append(Task(stage, diagonal - stage, stage % lanes))
    return found


def run(stages: Sequence[Stage], pieces: Sequence[Tensor], lanes: Sequence[Lane]) -> list[Tensor]:
    """Give each piece to the first stage, what it makes of it to the second one, and so on; return the last one's.

    Args:
        stages: each takes the number of a piece, what the stage before made of it, and the stream on which that is
            there, None for the current one; and is given pieces in order. Its first kernel runs on that stream, and the
            current one goes on behind it.
        pieces: inputs of the first stage, of whatever shape it takes, made on the current stream.
        lanes: none: everything on the current stream. Recorded or not, they begin behind the current stream and it
            goes on behind them.
    """
    values = list(pieces)
    if not lanes:
        for task in tasks(len(stages), len(pieces), 1):
            values[task.piece] = stages[task.stage](task.piece, values[task.piece], None)
        return values
    here = torch.cuda.current_stream(lanes[0].stream.device)
    begun = here.record_event()
    for lane in lanes:
        lane.stream.wait_event(begun)
    # Nothing is given back before the lanes have come together: another lane may still read it.
    held, done = list(values), [begun] * len(values)
    for task in tasks(len(stages), len(pieces), len(lanes)):
        lane = lanes[task.lane]
        lane.aside.wait_event(done[task.piece])
        with torch.cuda.stream(lane.stream):
            values[task.piece] = stages[task.stage](task.piece, values[task.piece], lane.aside)
            done[task.piece] = lane.stream.record_event()
        held.append(values[task.piece])
    for lane in lanes:
        here.wait_event(lane.stream.record_event())
    held.clear()
    return values
