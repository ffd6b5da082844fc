"""What a backward pass makes beside its recurrences, on multiprocessors that these leave idle.

A recurrence waits for latencies and holds the clusters that its utterances need: at 4 of them 64 of an H200's 132
multiprocessors. Gradients of weights are read behind the pass only, and the transpose that a recurrence loads is known
before the pass begins: both are made while another recurrence runs.

Only in recordings (CUDA graphs): launch by launch the host, which would have more to launch, sets the pace. The kernels
and their bits are the same either way.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

Work = Callable[[], None]
# Products beside each other end sooner than in turn: where a recurrence ends before they do, the whole device takes
# what is left of all.
_STREAMS = 4


class Coming(Protocol):
    """What the backward pass of a recurrence will need."""

    def ahead(self) -> Work:
        """Take its memory on the current stream; what is returned launches what makes it."""
        ...


class Beside:
    """Holds back, in recordings, what nobody waits for until a recurrence runs.

    What is held back keeps what it reads alive, so it waits for the next recurrence and no longer; whatever follows
    that recurrence follows what was made beside it, too.

    Args:
        joined: called when what was held back has been launched, and the current stream waits for it.
    """

    def __init__(self, joined: Callable[[], None] = lambda: None) -> None:
        self._joined = joined
        self._held: list[tuple[Hashable, Work]] = []
        self._coming: list[Coming] = []  # in the order of the forward pass
        self._sides: list[torch.cuda.Stream] = []

    def recording(self) -> bool:
        """Whether what is launched becomes part of a CUDA graph."""
        return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Forget the recurrences of former passes, which nobody went back through, and what they left."""
        self._coming.clear()
        self._held.clear()

    def later(self, work: Work, place: Hashable = None) -> None:
        """Launch something on the current stream: now, or in a recording when the next recurrence runs.

        Args:
            work: launches it; reads only what has been launched so far.
            place: what it alone changes, but for other work of the same place, which keeps its order; None: it follows
                all that was given before.
        """
        if self.recording():
            self._held.append((place, work))
        else:
            work()

    def flush(self) -> None:
        """Launch what is still held back on the current stream."""
        if self._held:
            self._launch_held()
            self._joined()

    def expect(self, coming: Coming) -> None:
        """Say, in the forward pass of a recurrence that is recorded, what its backward pass will need."""
        self._coming.append(coming)

    @contextmanager
    def around(self, own: Coming) -> Iterator[None]:
        """The block launches, in a recording, the backward pass of the recurrence that said `own`.

        Beside it are made what was held back, and what the recurrence needs that the pass comes to next.
        """
        if own in self._coming:
            del self._coming[self._coming.index(own) :]
        if self._coming:
            self._held.insert(0, (object(), self._coming[-1].ahead()))
        before = torch.cuda.Event()  # type: ignore[no-untyped-call]
        before.record()
        yield
        if self._held:
            self._launch_beside(before)
            self._joined()

    def _launch_held(self) -> None:
        with torch.no_grad():
            for _, work in self._held:
                work()
        self._held.clear()

    def _launch_beside(self, before: torch.cuda.Event) -> None:
        """Launch what is held back after an event, each place on a stream; the current stream then waits for all."""
        while len(self._sides) < _STREAMS:
            self._sides.append(torch.cuda.Stream())  # type: ignore[no-untyped-call]
        taken: dict[Hashable, int] = {}
        used: list[int] = []
        together = False  # on one stream, behind what was given first
        with torch.no_grad():
            for place, work in self._held:
                number = 0 if together or place is None else taken.setdefault(place, len(taken) % _STREAMS)
                side = self._sides[number]
                if number not in used:
                    side.wait_event(before)
                    used.append(number)
                if place is None and not together:
                    together = True
                    for other in used:
                        if other != number:
                            side.wait_stream(self._sides[other])
                with torch.cuda.stream(side):
                    work()
        for number in used:
            torch.cuda.current_stream().wait_stream(self._sides[number])
        self._held.clear()
