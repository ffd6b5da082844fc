"""Destinations of weight gradients, and products that wait until a recurrence leaves multiprocessors idle.

A recurrence is bound by latency and uses only the clusters that its utterances need: at 4 of them 64 of an H200's 132
multiprocessors. Gradients of weights are read after the backward pass only, and the transposed matrix that a recurrence
loads is known before the pass begins: both are computed on a second stream while another recurrence runs.

This happens only while a CUDA graph is recorded. Without a graph the host limits the speed, and more launches would
slow it down. The kernels and their bits are the same in both cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Work = Callable[[], None]
Factors = Sequence[tuple[Tensor, Tensor]]  # (R, N) and (N, C) each


class GradientSink(Protocol):
    """Destination of the gradient of a parameter. An op adds to it, and autograd then gets no gradient."""

    @property
    def deferred(self) -> Deferred | None:
        """What runs work during the recurrences of this backward pass; None: nothing is run then."""
        ...

    def add_products(self, factors: Factors, biases: Sequence[GradientSink] = ()) -> None:
        """Add the sum of left (R, N) times right (N, C) of all pairs, whose N differ, in the gradient's dtype on a GPU.

        Args:
            factors: the pairs.
            biases: sinks of vectors (R,), which get the sums of all left over N.
        """
        ...

    def add(self, make: Callable[[], Tensor]) -> None:
        """Add the tensor that `make` returns, of the shape of the gradient; `make` may run later."""
        ...

    def rows(self, start: int, stop: int) -> GradientSink:
        """Return the sink of these rows of the gradient. A pass adds to all rows or to none."""
        ...


class Prefetch:
    """An input of a recurrence's backward pass that can be computed before that begins.

    Args:
        empty: allocates its memory on the current stream.
        fill: launches its computation.
    """

    def __init__(self, empty: Callable[[], Tensor], fill: Callable[[Tensor], None]) -> None:
        self._empty, self._fill = empty, fill
        self._result: Tensor | None = None

    def allocate(self) -> Work:
        """Allocate its memory on the current stream; return a function that launches its computation."""
        result = self._result = self._empty()
        return lambda: self._fill(result)

    def take(self) -> Tensor:
        """The input, made now unless it was made ahead."""
        if self._result is None:
            self._result = self._empty()
            self._fill(self._result)
        return self._result


class Deferred(Protocol):
    """Runs other work during a recurrence, in passes that are recorded; `DeferredGradients` is the usual one."""

    def expect_backward(self, prefetch: Prefetch) -> Prefetch:
        """Announce an input of a recurrence's backward pass in its forward pass; return what to take it from."""
        ...

    def during_recurrence(self, own: Prefetch) -> AbstractContextManager[None]:
        """Run work during the recurrence that the block launches, while recording; `own` is what it announced."""
        ...


def is_recording() -> bool:
    """Return whether a CUDA graph is being recorded on the current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def product(factors: Factors) -> tuple[Tensor, Tensor]:
    """Return one left (R, N) and one right (N, C) whose product is the sum of those of all pairs."""
    if len(factors) == 1:
        return factors[0]
    return torch.cat([left.t() for left, _ in factors]).t(), torch.cat([right for _, right in factors])


@dataclass
class _Work:
    work: Work
    done: Work
    stream: torch.cuda.Stream | None = None  # on which what it reads is ready


class DeferredGradients:
    """Defers work that only the end of a backward pass needs until a recurrence runs, while a CUDA graph is recorded.

    The main stream waits for the work before the next recurrence, so work may take longer than the recurrence during
    which it started. Deferred work holds references to the tensors that it reads.

    Args:
        joined: runs when the main stream waits for the side stream.
    """

    def __init__(self, joined: Callable[[], None] = lambda: None) -> None:
        self._joined = joined
        self._deferred: list[_Work] = []
        self._running: list[_Work] = []  # launched on the side stream; the main stream does not wait for it yet
        self._expected: list[Prefetch] = []  # in the order of the forward pass
        self._side: torch.cuda.Stream | None = None

    def begin(self) -> None:
        """Forget the recurrences of earlier passes without a backward pass, and their work."""
        self._expected.clear()
        self._deferred.clear()
        self._running.clear()

    def later(self, work: Work, done: Work = lambda: None) -> None:
        """Launch work on the current stream now, or, while recording, when the next recurrence runs.

        Args:
            work: launches it; may read results of everything launched so far.
            done: runs when all later launches are ordered after the work.
        """
        if is_recording():
            self._deferred.append(_Work(work, done, torch.cuda.current_stream()))
        else:
            work()
            done()

    def flush(self) -> None:
        """Launch all deferred work on the current stream, and let that stream wait for the side stream."""
        self._join()
        self._launch_deferred()
        self._finish()

    def run_on_side_stream(self) -> None:
        """While recording, launch the work that was deferred on the current stream on the side stream, behind it.

        Work of other streams waits for `flush`, before which all streams join: what it reads may not be ready here.
        """
        if not is_recording():
            return
        current = torch.cuda.current_stream()
        others = [deferred for deferred in self._deferred if deferred.stream != current]
        self._deferred = [deferred for deferred in self._deferred if deferred.stream == current]
        if self._deferred:
            behind = torch.cuda.Event()  # type: ignore[no-untyped-call]
            behind.record()
            self._launch_on_side_stream(behind)
        self._deferred = others

    def expect_backward(self, prefetch: Prefetch) -> Prefetch:
        """See `Deferred`."""
        self._expected.append(prefetch)
        return prefetch

    @contextmanager
    def during_recurrence(self, own: Prefetch) -> Iterator[None]:
        """Run deferred work during the recurrence that the block launches, while recording.

        Args:
            own: the input that this recurrence announced in its forward pass. The input of the next recurrence of the
                backward pass is computed at the same time.
        """
        if own in self._expected:
            del self._expected[self._expected.index(own) :]
        if self._expected:
            self._deferred.append(_Work(self._expected[-1].allocate(), lambda: None))
        self._join()
        before = torch.cuda.Event()  # type: ignore[no-untyped-call]
        before.record()
        yield
        if self._deferred:
            self._launch_on_side_stream(before)

    def _launch_on_side_stream(self, behind: torch.cuda.Event) -> None:
        if self._side is None:
            self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._side.wait_event(behind)
        with torch.cuda.stream(self._side):
            self._launch_deferred()

    def _launch_deferred(self) -> None:
        with torch.no_grad():
            for deferred in self._deferred:
                deferred.work()
        self._running += self._deferred
        self._deferred = []

    def _join(self) -> None:
        """Let the current stream wait for the side stream."""
        if self._running:
            assert self._side is not None
            torch.cuda.current_stream().wait_stream(self._side)
            self._finish()

    def _finish(self) -> None:
        if not self._running:
            return
        for deferred in self._running:
            deferred.done()
        self._running = []
        self._joined()
