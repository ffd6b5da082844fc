"""What a backward pass makes beside its recurrences, on multiprocessors that these leave idle.

A recurrence waits for latencies and holds the clusters that its utterances need: at 4 of them 64 of an H200's 132
multiprocessors. Gradients of weights are read behind the pass only, and the transpose that a recurrence loads is known
before the pass begins: both are made while another recurrence runs.

Only in recordings (CUDA graphs): launch by launch the host, which would have more to launch, sets the pace. The kernels
and their bits are the same either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

Work = Callable[[], None]


@dataclass
class _Held:
    work: Work
    done: Work


class Coming(Protocol):
    """What the backward pass of a recurrence will need."""

    def ahead(self) -> Work:
        """Take its memory on the current stream; what is returned launches what makes it."""
        ...


class Beside:
    """Holds back, in recordings, what nobody waits for until a recurrence runs.

    The pass waits for it where the next recurrence begins: what takes longer than the recurrence beside which it
    began goes on beside what lies between the two. What is held back keeps what it reads alive until then.

    Args:
        joined: called when the current stream waits for what was launched beside it.
    """

    def __init__(self, joined: Callable[[], None] = lambda: None) -> None:
        self._joined = joined
        self._held: list[_Held] = []
        self._running: list[_Held] = []  # launched; the current stream does not wait for it yet
        self._coming: list[Coming] = []  # in the order of the forward pass
        self._side: torch.cuda.Stream | None = None

    def recording(self) -> bool:
        """Whether what is launched becomes part of a CUDA graph."""
        return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Forget the recurrences of former passes, which nobody went back through, and what they left."""
        self._coming.clear()
        self._held.clear()
        self._running.clear()

    def later(self, work: Work, done: Work = lambda: None) -> None:
        """Launch something on the current stream: now, or in a recording when the next recurrence runs.

        Args:
            work: launches it; reads only what has been launched so far.
            done: called when whatever is launched next follows it.
        """
        if self.recording():
            self._held.append(_Held(work, done))
        else:
            work()
            done()

    def flush(self) -> None:
        """Launch what is still held back on the current stream, which then waits for all."""
        self._join()
        self._launch_held()
        self._finish()

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
            self._held.append(_Held(self._coming[-1].ahead(), lambda: None))
        self._join()
        before = torch.cuda.Event()  # type: ignore[no-untyped-call]
        before.record()
        yield
        if self._held:
            if self._side is None:
                self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._side.wait_event(before)
            with torch.cuda.stream(self._side):
                self._launch_held()

    def _launch_held(self) -> None:
        with torch.no_grad():
            for held in self._held:
                held.work()
        self._running, self._held = self._held, []

    def _join(self) -> None:
        """Let the current stream wait for what runs beside it."""
        if self._running:
            assert self._side is not None
            torch.cuda.current_stream().wait_stream(self._side)
            self._finish()

    def _finish(self) -> None:
        if not self._running:
            return
        for held in self._running:
            held.done()
        self._running = []
        self._joined()
