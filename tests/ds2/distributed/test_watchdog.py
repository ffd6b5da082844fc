"""The watchdog names the rank that hangs, is silent, or that all wait for, and nobody else."""

from __future__ import annotations

import math
import os
import queue
import signal
import sys
import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from ds2.distributed.watchdog import Hang, RankStatus, ReportedStatus, Watchdog, find_hang

WAIT_S = 600  # a last resort: what is waited for comes by itself, on a busy machine late


def report(
    host: str, reported_s: float, changed_s: float, *, limited: bool = True, collective: str = ""
) -> ReportedStatus:
    return ReportedStatus(
        host,
        RankStatus(7, "forward" if limited else "start-up", 1.0 if limited else math.inf, collective),
        reported_s,
        changed_s,
    )


def test_ranks_that_move_are_left_alone() -> None:
    assert find_hang({0: report("a", 100, 95), 1: report("b", 99, 99)}, 2, 100, 10) is None


def test_a_rank_that_stands_still_is_named_with_host_step_and_phase() -> None:
    reason = str(find_hang({0: report("a", 100, 80, collective="sum"), 1: report("b", 99, 80)}, 2, 100, 10))
    assert "rank 1 on b hangs" in reason and "20 s" in reason and "step 7, forward" in reason


def test_a_silent_rank_is_named() -> None:
    hang = find_hang({0: report("a", 100, 80, collective="sum"), 1: report("b", 85, 80)}, 2, 100, 10)
    assert hang is not None and hang.rank == 1 and "rank 1 on b has been silent for 15 s" in str(hang)


def test_a_silent_rank_is_named_sooner_where_the_others_go_on_without_it() -> None:
    ranks = {0: report("a", 100, 80, collective="sum"), 1: report("b", 91, 91)}
    assert find_hang(ranks, 2, 100, 600) is None
    assert "rank 1 on b has been silent for 9 s" in str(find_hang(ranks, 2, 100, 600, 8))
    assert find_hang({**ranks, 1: report("b", 100, 20)}, 2, 100, 600, 8) is None  # slow, but not silent


def test_unlimited_phases_and_those_who_wait_for_them_are_left_alone() -> None:
    ranks = {0: report("a", 100, 10, limited=False), 1: report("b", 100, 10, collective="allgather")}
    assert find_hang(ranks, 2, 100, 10) is None


def test_a_wait_of_all_is_seen_by_who_knows_all() -> None:
    ranks = {rank: report("a", 100, 80, collective="sum") for rank in range(3)}
    hang = find_hang(ranks, 3, 100, 10)
    assert hang is not None and hang.rank == -1 and "all ranks wait for each other for 20 s" in str(hang)
    assert find_hang({0: ranks[0], 2: ranks[2]}, 3, 100, 10) is None  # rank 1 may be at work


def test_a_status_reads_as_messages_give_them() -> None:
    at = RankStatus()
    at.step = 3
    at.enter("forward")
    with at.waiting("sum"):
        assert str(at) == "step 3, forward, waiting in sum"
    assert str(at) == "step 3, forward" and at.changes == 3
    with at.slow("saving"):
        assert at.phase == "saving" and at.limit_factor == 10
    assert str(at) == "step 3, between steps" and at.limit_factor == 1


class Wires:
    """Carries messages between ranks that are threads."""

    def __init__(self, rank: int, boxes: list[queue.SimpleQueue[tuple[int, RankStatus | None]]]) -> None:
        self.rank, self.boxes = rank, boxes
        self.aborted = threading.Event()

    def send(self, value: RankStatus | None, to: int) -> None:
        self.boxes[to].put((self.rank, value))

    def receive(self) -> tuple[int, RankStatus | None] | None:
        box = self.boxes[self.rank]
        return None if box.empty() else box.get()

    def end_job(self, hang: Hang) -> None:
        self.aborted.set()
        raise SystemExit  # ends the thread, as MPI_Abort ends the process


def two_ranks(timeout_s: float) -> tuple[list[Wires], list[Watchdog]]:
    boxes: list[queue.SimpleQueue[tuple[int, RankStatus | None]]] = [queue.SimpleQueue(), queue.SimpleQueue()]
    wires = [Wires(rank, boxes) for rank in range(2)]
    dogs = [Watchdog(wire, ["a", "b"], RankStatus(), timeout_s, wire.end_job) for wire in wires]
    return wires, dogs


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_hanging_rank_ends_the_job_and_says_so(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: now_s, sleep=time.sleep)  # goes on when all have heard of all
    monkeypatch.setattr(sys.modules[Watchdog.__module__], "time", clock)
    wires, dogs = two_ranks(timeout_s=0.5)
    dogs[1].own.step = 12
    dogs[1].own.enter("backward")
    for dog in dogs:
        dog.start()
    while not any(wire.aborted.is_set() for wire in wires):
        now_s += 0.1
        assert now_s < 1.0, "nobody has noticed"
        while not any(wire.aborted.is_set() for wire in wires) and any(
            seen.reported_s < now_s for dog in dogs for seen in dog.ranks.values()
        ):
            time.sleep(0.001)
    for wire, dog in zip(wires, dogs, strict=True):
        assert wire.aborted.wait(WAIT_S)
        dog.join(WAIT_S)  # a thread that still prints while capfd reads writes over what is to be read
    errors = capfd.readouterr().err
    assert "rank 1 on b hangs" in errors and "step 12, backward" in errors and "comm.timeout_s=0.5" in errors
    assert "test_watchdog.py" in errors  # where its threads stand
    wires[0].boxes[0].put((1, None))
    dogs[0].stop()


def test_ranks_are_not_silent_while_this_process_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is suspended with all of its ranks, and this one goes on before their reports arrive."""
    now_s, hangs = 0.0, list[Hang]()
    clock = SimpleNamespace(monotonic=lambda: now_s, sleep=time.sleep)
    monkeypatch.setattr(sys.modules[Watchdog.__module__], "time", clock)
    channel = SimpleNamespace(rank=1, send=lambda status, to: None, receive=lambda: None)
    watchdog = Watchdog(channel, ["a", "b"], RankStatus(), 600, hangs.append, elastic=True)
    ticks = iter([1.0, 60.0, *(60 + 0.25 * number for number in range(1, 100))])

    def tick(*_: object) -> tuple[list[int], list[int], list[int]]:
        nonlocal now_s
        now_s = next(ticks)
        return [], [], []

    monkeypatch.setattr(sys.modules[Watchdog.__module__], "select", SimpleNamespace(select=tick))
    watchdog.start()
    watchdog.join(WAIT_S)
    watchdog.drop()
    assert now_s == 66.25 and "rank 0 on a has been silent for 8 s" in str(hangs[0])  # 2 s are those before it slept


def test_a_signal_prints_what_is_known_of_ranks_while_this_one_waits(capfd: pytest.CaptureFixture[str]) -> None:
    former = signal.signal(signal.SIGUSR2, lambda *_: None)
    wires, dogs = two_ranks(timeout_s=60)
    try:
        for dog in dogs:
            dog.start()
        dogs[1].own.enter("forward")
        with dogs[1].own.waiting("sum"):
            os.kill(os.getpid(), signal.SIGUSR2)
            told, until_s = "", time.monotonic() + WAIT_S
            while "SIGUSR2" not in told and time.monotonic() < until_s:
                time.sleep(0.01)
                told += capfd.readouterr().err
    finally:
        wires[0].boxes[1].put((0, None))
        dogs[1].stop()
        dogs[0].stop()
        signal.signal(signal.SIGUSR2, former)
    assert "rank 1 on b got SIGUSR2 while it waited" in told
    assert not any(wire.aborted.is_set() for wire in wires)


def test_a_watchdog_that_is_stopped_again_leaves_the_files_alone_that_were_opened_since() -> None:
    """A signal ends a rank that has left its group, before it has another watchdog."""
    wires = Wires(0, [queue.SimpleQueue()])
    watchdog = Watchdog(wires, ["a"], RankStatus(), 600, wires.end_job)
    watchdog.start()
    watchdog.drop()
    with ExitStack() as files:
        opened = [files.enter_context(open(os.devnull, "rb")) for _ in range(8)]  # they take free numbers
        watchdog.drop()
        assert all(file.read() == b"" for file in opened)
