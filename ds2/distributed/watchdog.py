"""Finds the rank that hangs and ends the job with its name: ranks tell each other where they are, once a second.

Three ways to hang are told apart (`judge`): a rank that stays in one phase, a process that no longer says anything
(stopped, or stuck outside Python), and ranks that all wait in collectives that never end (a broken network).
"""

from __future__ import annotations

import faulthandler
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from ds2.system.messages import decode, encode
from ds2.system.plain import FieldError, from_plain

_STOP = 255  # no signal's number
_SETTLE_S = 0.2
_SLOW = 10.0


@dataclass
class Whereabouts:
    """Where a rank is. Written by the thread that trains, read by the watchdog's; each field is set at once."""

    step: int = 0
    phase: str = "start-up"
    patience: float = math.inf  # how often the watchdog's limit this phase may take
    waiting: str = ""  # the collective that it waits in, for others
    moves: int = 0  # changes so far: a number that stands still is a rank that stands still

    def enter(self, phase: str) -> None:
        """Note that a phase of a step begins."""
        self.phase, self.patience = phase, 1.0
        self.moves += 1

    @contextmanager
    def slow(self, phase: str) -> Iterator[None]:
        """Note that the block is no step and may take ten times as long as one."""
        self.enter(phase)
        self.patience = _SLOW
        yield
        self.enter("between steps")

    @contextmanager
    def wait_in(self, collective: str) -> Iterator[None]:
        """Note that the block waits for other ranks, so that its length is not held against this one."""
        outer, self.waiting = self.waiting, collective
        self.moves += 1
        try:
            yield
        finally:
            self.waiting = outer
            self.moves += 1

    def __str__(self) -> str:
        """Step and phase, as the messages of failures give them."""
        return f"step {self.step}, {self.phase}" + (f", waiting in {self.waiting}" if self.waiting else "")


@dataclass
class Seen:
    """A rank's whereabouts as another rank knows them."""

    host: str
    at: Whereabouts = field(default_factory=Whereabouts)
    heard_s: float = 0.0  # when its last message came
    moved_s: float = 0.0  # when its `moves` last changed

    def update(self, at: Whereabouts, now_s: float) -> None:
        """Take in a message."""
        if at.moves != self.at.moves:
            self.moved_s = now_s
        self.at, self.heard_s = at, now_s


def judge(ranks: Mapping[int, Seen], world: int, now_s: float, timeout_s: float) -> str:
    """What is wrong, or ''.

    Args:
        ranks: what one rank knows: of itself and of those that report to it; rank 0 hears all.
        world: how many ranks there are; that all wait is seen only by who knows of all.
        now_s: the time.
        timeout_s: how long a silence, a common wait or a phase of a step may last; other phases more (`patience`).
    """
    for rank, seen in ranks.items():
        if now_s - seen.heard_s > timeout_s:
            return (
                f"rank {rank} on {seen.host} has been silent for {now_s - seen.heard_s:.0f} s, last heard at {seen.at}"
            )
        if not seen.at.waiting and now_s - seen.moved_s > timeout_s * seen.at.patience:
            return f"rank {rank} on {seen.host} hangs: no progress for {now_s - seen.moved_s:.0f} s at {seen.at}"
    still_s = now_s - max(seen.moved_s for seen in ranks.values())
    if len(ranks) == world and all(seen.at.waiting for seen in ranks.values()) and still_s > timeout_s:
        places = "; ".join(f"rank {rank} on {seen.host}: {seen.at}" for rank, seen in ranks.items())
        return f"all ranks wait for each other for {still_s:.0f} s, the network or a collective is stuck: {places}"
    return ""


class Channel(Protocol):
    """Carries whereabouts between ranks; sends never wait."""

    rank: int

    def send(self, value: Whereabouts | None, to: int) -> None:
        """Send to a rank."""
        ...

    def receive(self) -> tuple[int, Whereabouts | None] | None:
        """Take the next message and its sender, or None where there is none."""
        ...

    def abort(self, status: int) -> None:
        """End all ranks."""
        ...


def write_report(rank: int, whereabouts: Whereabouts | None) -> bytes:
    """A message of a channel: a rank's whereabouts, or None for its farewell."""
    return encode([rank, None if whereabouts is None else asdict(whereabouts)])


def read_report(data: bytes | bytearray) -> tuple[int, Whereabouts | None]:
    """Read a message of a channel.

    Raises:
        MessageError, FieldError: it is none.
    """
    report = from_plain(list[Any], decode(data), "report")
    if len(report) != 2:
        raise FieldError("report", f"has {len(report)} entries, expected a rank and its whereabouts")
    rank, fields = report
    return from_plain(int, rank, "rank"), None if fields is None else from_plain(Whereabouts, fields, "whereabouts")


class Watchdog(threading.Thread):
    """Reports this rank's whereabouts to rank 0, rank 0's to all, and ends the job where `judge` finds a reason.

    Args:
        channel: between the ranks.
        hosts: of all ranks, in order.
        own: this rank's whereabouts, live.
        timeout_s: see `judge`; a hang ends the job after this and a few seconds more.
    """

    def __init__(self, channel: Channel, hosts: list[str], own: Whereabouts, timeout_s: float) -> None:
        super().__init__(name="ds2-watchdog", daemon=True)
        self.channel, self.own, self.timeout_s = channel, own, timeout_s
        self.listeners = list(range(1, len(hosts))) if channel.rank == 0 else [0]
        self.world, now_s = len(hosts), time.monotonic()
        known = {channel.rank, *self.listeners}
        self.ranks = {rank: Seen(hosts[rank], Whereabouts(), now_s, now_s) for rank in sorted(known)}
        self.tick_s = min(1.0, timeout_s / 10)
        self._gone: set[int] = set()
        # Signals wake this thread even while the one that trains sits in MPI, where Python's handlers cannot run.
        self._wake, self._signals = os.pipe()
        os.set_blocking(self._signals, False)
        self._former = signal.set_wakeup_fd(self._signals, warn_on_full_buffer=False)

    def run(self) -> None:
        """Tell, listen and judge until `stop`."""
        while (received := self._wait_for_signal()) != _STOP:
            if received:
                self._tell_of(received)
            for rank in self.listeners:
                self.channel.send(replace(self.own), rank)
            self._listen()
            present = {rank: seen for rank, seen in self.ranks.items() if rank not in self._gone}
            reason = judge(present, self.world, time.monotonic(), self.timeout_s)
            if reason:
                self._end(reason)
        for rank in self.listeners:
            self.channel.send(None, rank)
        until_s = time.monotonic() + 5
        while len(self._gone) < len(self.listeners) and time.monotonic() < until_s:
            self._listen()
            time.sleep(0.01)

    def _wait_for_signal(self) -> int:
        ready, _, _ = select.select([self._wake], [], [], self.tick_s)
        return os.read(self._wake, 1)[0] if ready else 0

    def _tell_of(self, received: int) -> None:
        """Where a rank still waits for others a moment after a signal, one is likely gone: say what is known of all."""
        moves = self.own.moves
        time.sleep(_SETTLE_S)
        self._listen()
        if self.channel.rank <= 1 and self.own.waiting and self.own.moves == moves:
            name = signal.Signals(received).name
            places = "; ".join(f"rank {rank} on {seen.host}: {seen.at}" for rank, seen in self.ranks.items())
            me = f"rank {self.channel.rank} on {self.ranks[self.channel.rank].host}"
            print(f"ds2: {me} got {name} while it waited; last heard: {places}", file=sys.stderr, flush=True)

    def _listen(self) -> None:
        now_s = time.monotonic()
        self.ranks[self.channel.rank].update(replace(self.own), now_s)
        while (message := self.channel.receive()) is not None:
            rank, at = message
            if at is None:
                self._gone.add(rank)
            elif rank in self.ranks:
                self.ranks[rank].update(at, now_s)

    def _end(self, reason: str) -> None:
        print(f"ds2: {reason} (comm.timeout_s={self.timeout_s:g}); ending the job", file=sys.stderr, flush=True)
        if self.channel.rank in self.ranks and f"rank {self.channel.rank} " in reason:
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        self.channel.abort(1)

    def stop(self) -> None:
        """Stop, after a farewell in both directions; all ranks call it together."""
        os.write(self._signals, bytes([_STOP]))
        self.join()
        signal.set_wakeup_fd(self._former)
        os.close(self._wake)
        os.close(self._signals)
