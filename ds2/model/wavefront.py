"""Layers that overlap: piece c of layer l runs as soon as piece c - 1 of it and piece c of layer l - 1 are there.

Appleyard et al. (2016), "Optimizing Performance of Recurrent Neural Networks on GPUs", section 3.3: the cells (layer,
piece) of a stack are run along its anti-diagonals. Here a lane is a CUDA stream, and a layer stays on its lane.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Task:
    """One piece of one stage, and whether the stage before it runs on another lane, which is to be waited for."""

    stage: int
    piece: int
    lane: int
    waits: bool


def tasks(stages: int, pieces: int, lanes: int) -> list[Task]:
    """All tasks in an order in which each may be queued: after those it needs, and along the anti-diagonals.

    Stage s has lane s % lanes, so piece c - 1 of a stage is before piece c on its lane.
    """
    found = []
    for diagonal in range(stages + pieces - 1):
        for stage in range(max(0, diagonal - pieces + 1), min(stages, diagonal + 1)):
            found.append(Task(stage, diagonal - stage, stage % lanes, stage > 0 and lanes > 1))
    return found


def run(
    stages: Sequence[Callable[[int, Tensor], Tensor]], pieces: Sequence[Tensor], lanes: Sequence[torch.cuda.Stream]
) -> list[Tensor]:
    """Give each piece to the first stage, what it makes of it to the second one, and so on; return the last one's.

    Args:
        stages: each takes the number of a piece and what the stage before made of it, and is given pieces in order.
        pieces: inputs of the first stage, of whatever shape it takes, made on the current stream.
        lanes: streams; none: everything on the current one. Recorded or not, they begin behind the current stream and
            it goes on behind them.
    """
    values = list(pieces)
    if not lanes:
        for task in tasks(len(stages), len(pieces), 1):
            values[task.piece] = stages[task.stage](task.piece, values[task.piece])
        return values
    here = torch.cuda.current_stream(lanes[0].device)
    begun = here.record_event()
    for lane in lanes:
        lane.wait_event(begun)
    # Nothing is given back before the lanes have come together: another lane may still read it.
    held, done = list(values), dict[int, torch.cuda.Event]()
    for task in tasks(len(stages), len(pieces), len(lanes)):
        lane = lanes[task.lane]
        with torch.cuda.stream(lane):
            if task.waits:
                lane.wait_event(done[task.piece])
            values[task.piece] = stages[task.stage](task.piece, values[task.piece])
            done[task.piece] = lane.record_event()
        held.append(values[task.piece])
    for lane in lanes:
        here.wait_event(lane.record_event())
    held.clear()
    return values
