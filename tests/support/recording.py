"""A recording of a CUDA graph that a CPU can take part in: streams and events that only say what was asked of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from ds2_ops.recurrent import autograd, deferred


class _Stream:
    def __init__(self, log: list[str], name: str) -> None:
        self._log, self.name = log, name

    def wait_event(self, event: _Event) -> None:
        self._log.append(f"{self.name} waits for what came before {event.place}")

    def wait_stream(self, other: _Stream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")


class _Event:
    def __init__(self, log: list[str]) -> None:
        self._log, self.place = log, -1

    def record(self) -> None:
        self.place = len(self._log)


def pretend_to_record(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let `DeferredGradients` take what a CPU launches for parts of a recording.

    Returns:
        What was asked of streams, which grows; launches may be added to it.
    """
    log: list[str] = []
    current = [_Stream(log, "main")]

    @contextlib.contextmanager
    def on(stream: _Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    for module in (autograd, deferred):
        monkeypatch.setattr(module, "is_recording", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: _Stream(log, "side"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: _Event(log))
    return log
