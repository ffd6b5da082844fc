"""The watchdog: finds a rank that hangs, names it and ends the job. Ranks report their status at least once a second.

`find_hang` distinguishes a rank that stays in one phase, a process that sends no reports (it is stopped, or stuck
outside Python), and ranks that all wait in collectives that never end (a broken network).
"""

import faulthandler
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from ds2.system.messages import decode, encode
from ds2.system.plain import FieldError, from_plain

_STOP = 255  # a byte that is no signal number
_SIGNAL_DELAY_S = 0.2
_SLOW_FACTOR = 10.0
_LATE = 4  # times as long as planned: where more passes between two looks at the reports, this process did not run
_REPORT_S, _ELASTIC_REPORT_S = 1.0, 0.25  # from one report to the next; the latter where ranks come and go
SILENT_S = 8.0  # where ranks come and go: a process that shows no life for so long is stopped, or its host is cut off


@dataclass
class RankStatus:
    """The progress of a rank. The training thread writes it, the watchdog thread reads it."""

    step: int = 0
    phase: str = "start-up"
    limit_factor: float = math.inf  # this phase may take the timeout of the watchdog times this
    collective: str = ""  # in which this rank waits for others
    changes: int = 0  # a counter: if it stays the same, the rank makes no progress

    def enter(self, phase: str) -> None:
        """Record the start of a phase of a step."""
        self.phase, self.limit_factor = phase, 1.0
        self.changes += 1

    @contextmanager
    def slow(self, phase: str) -> Iterator[None]:
        """Record that the block is a phase between steps, which may take ten times the timeout."""
        self.enter(phase)
        self.limit_factor = _SLOW_FACTOR
        yield
        self.enter("between steps")

    @contextmanager
    def waiting(self, collective: str) -> Iterator[None]:
        """Record that the block waits for other ranks, so that this rank is not blamed for its duration."""
        outer, self.collective = self.collective, collective
        self.changes += 1
        try:
            yield
        finally:
            self.collective = outer
            self.changes += 1

    def __str__(self) -> str:
        """Return step and phase for messages."""
        return f"step {self.step}, {self.phase}" + (f", waiting in {self.collective}" if self.collective else "")


@dataclass
class ReportedStatus:
    """The last reported status of a rank."""

    host: str
    status: RankStatus = field(default_factory=RankStatus)
    reported_s: float = 0.0  # time of the last report
    changed_s: float = 0.0  # time of the last report with other `changes`

    def update(self, status: RankStatus, now_s: float) -> None:
        if status.changes != self.status.changes:
            self.changed_s = now_s
        self.status, self.reported_s = status, now_s


class Hang(NamedTuple):
    """A rank that hangs, or -1 where all of them wait, the name of its host, and what it does, for messages."""

    rank: int
    host: str
    reason: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} {self.reason}" if self.rank >= 0 else self.reason


def find_hang(
    ranks: Mapping[int, ReportedStatus], world: int, now_s: float, timeout_s: float, silent_s: float = math.inf
) -> Hang | None:
    """Return the first rank that hangs, if one does.

    Args:
        ranks: what one rank knows: itself and the ranks that report to it. All ranks report to rank 0.
        world: the number of ranks; only a rank that knows all of them can see that all wait.
        timeout_s: the longest time without reports, of waiting by all ranks, or of a phase of a step; other phases may
            take `limit_factor` times as long.
        silent_s: a shorter limit of the time without reports.
    """
    for rank, known in ranks.items():
        since_report_s, since_change_s = now_s - known.reported_s, now_s - known.changed_s
        if since_report_s > min(timeout_s, silent_s):
            reason = f"has been silent for {since_report_s:.0f} s, its last report: {known.status}"
            return Hang(rank, known.host, reason)
        if not known.status.collective and since_change_s > timeout_s * known.status.limit_factor:
            return Hang(rank, known.host, f"hangs: no progress for {since_change_s:.0f} s at {known.status}")
    since_change_s = now_s - max(known.changed_s for known in ranks.values())
    if len(ranks) == world and all(known.status.collective for known in ranks.values()) and since_change_s > timeout_s:
        stuck = f"all ranks wait for each other for {since_change_s:.0f} s, the network or a collective is stuck"
        return Hang(-1, "", f"{stuck}: {_describe(ranks)}")
    return None


def _describe(ranks: Mapping[int, ReportedStatus]) -> str:
    return "; ".join(f"rank {rank} on {known.host}: {known.status}" for rank, known in ranks.items())


class Channel(Protocol):
    """Carries reports between ranks; sends never wait."""

    rank: int

    def send(self, value: RankStatus | None, to: int) -> None:
        """Send a status, or None as the last message, to a rank."""
        ...

    def receive(self) -> tuple[int, RankStatus | None] | None:
        """Return the sender and the status of the next message, or None if there is no message."""
        ...


def write_report(rank: int, status: RankStatus | None) -> bytes:
    """Return the message of a channel with the status of a rank, or None as its last message."""
    return encode([rank, None if status is None else asdict(status)])


def read_report(data: bytes | bytearray) -> tuple[int, RankStatus | None]:
    """Read a message of a channel; raises MessageError or FieldError where `data` is no report."""
    report = from_plain(list[Any], decode(data), "report")
    if len(report) != 2:
        raise FieldError("report", f"has {len(report)} entries, expected a rank and its status")
    rank, fields = report
    return from_plain(int, rank, "rank"), None if fields is None else from_plain(RankStatus, fields, "status")


class Watchdog(threading.Thread):
    """Sends the status of this rank to rank 0 and rank 0's to all, and ends when `find_hang` finds a rank.

    Where ranks come and go, a silent rank is named after `SILENT_S`: a mistake costs it a new start from the state of
    the others, where otherwise it would end the job. So reports are four times as frequent there: a rank is named at
    most half a second after that limit, and one that runs slowly has four times as many chances to report within it.

    Its clock stands still while this process does not run. On a host that is too busy, or is suspended with all of its
    ranks, this process does not see what others send either, and so cannot say that they were silent.

    Args:
        hosts: of all ranks, in order.
        own: the status of this rank, which others change.
        timeout_s: see `find_hang`; a hang ends the job a few seconds after it.
        on_hang: is called with what was found: ends the job or, where ranks come and go, this rank's part in its group.
        elastic: whether ranks come and go.
    """

    def __init__(
        self,
        channel: Channel,
        hosts: list[str],
        own: RankStatus,
        timeout_s: float,
        on_hang: Callable[[Hang], object],
        *,
        elastic: bool = False,
    ) -> None:
        super().__init__(name="ds2-watchdog", daemon=True)
        self.channel, self.own, self.timeout_s = channel, own, timeout_s
        self._on_hang, self._elastic = on_hang, elastic
        self._silent_s = SILENT_S if elastic else math.inf
        self.listeners = list(range(1, len(hosts))) if channel.rank == 0 else [0]
        self.world, now_s = len(hosts), time.monotonic()
        self._now_s = self._looked_s = now_s
        self._slept_s = 0.0
        known = {channel.rank, *self.listeners}
        self.ranks = {rank: ReportedStatus(hosts[rank], RankStatus(), now_s, now_s) for rank in sorted(known)}
        self.tick_s = min(_ELASTIC_REPORT_S if elastic else _REPORT_S, timeout_s / 10)
        self._finished: set[int] = set()
        self._dropped = self._stopped = False
        # A signal wakes this thread even while the training thread is inside MPI, where Python runs no handlers.
        self._wake, self._signals = os.pipe()
        os.set_blocking(self._signals, False)
        self._previous_fd = signal.set_wakeup_fd(self._signals, warn_on_full_buffer=False)

    def run(self) -> None:
        """Send and receive reports and look for hangs until `stop`."""
        while (received := self._wait_for_signal()) != _STOP:
            if received:
                self._report_signal(received)
            for rank in self.listeners:
                self.channel.send(replace(self.own), rank)
            self._receive()
            running = {rank: known for rank, known in self.ranks.items() if rank not in self._finished}
            hang = find_hang(running, self.world, self._now_s, self.timeout_s, self._silent_s)
            if hang is not None:
                self._end(hang)
                return
        if self._dropped:
            return
        for rank in self.listeners:
            self.channel.send(None, rank)
        until_s = time.monotonic() + 5
        while len(self._finished) < len(self.listeners) and time.monotonic() < until_s:
            self._receive()
            time.sleep(0.01)

    def _wait_for_signal(self) -> int:
        ready, _, _ = select.select([self._wake], [], [], self.tick_s)
        return os.read(self._wake, 1)[0] if ready else 0

    def _report_signal(self, received: int) -> None:
        """Print the status of all ranks if this one still waits a moment after a signal: another one may be gone."""
        changes = self.own.changes
        time.sleep(_SIGNAL_DELAY_S)
        self._receive()
        if self.channel.rank <= 1 and self.own.collective and self.own.changes == changes:
            name = signal.Signals(received).name
            own = f"rank {self.channel.rank} on {self.ranks[self.channel.rank].host}"
            reports = _describe(self.ranks)
            print(f"ds2: {own} got {name} while it waited; last reports: {reports}", file=sys.stderr, flush=True)

    def _receive(self) -> None:
        looked_s, self._looked_s = self._looked_s, time.monotonic()
        self._slept_s += max(0.0, self._looked_s - looked_s - _LATE * self.tick_s)
        now_s = self._now_s = self._looked_s - self._slept_s
        self.ranks[self.channel.rank].update(replace(self.own), now_s)
        while (message := self.channel.receive()) is not None:
            rank, status = message
            if status is None:
                self._finished.add(rank)
            elif rank in self.ranks:
                self.ranks[rank].update(status, now_s)

    def _end(self, hang: Hang) -> None:
        end = "the others go on" if self._elastic else "ending the job"
        print(f"ds2: {hang} (comm.timeout_s={self.timeout_s:g}); {end}", file=sys.stderr, flush=True)
        if hang.rank in (self.channel.rank, -1):
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        self._on_hang(hang)

    def drop(self) -> None:
        """Stop at once, without a last message: the group has broken."""
        self._dropped = True
        self.stop()

    def stop(self) -> None:
        """Stop, after a last message in both directions; all ranks call it together.

        It may be called again: a signal may end the call, or what follows it.
        """
        if self._stopped:  # the numbers of its files may be those of others by now
            return
        os.write(self._signals, bytes([_STOP]))
        self.join()
        self._stopped = True
        signal.set_wakeup_fd(self._previous_fd)
        os.close(self._wake)
        os.close(self._signals)
