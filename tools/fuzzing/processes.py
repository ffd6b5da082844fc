"""Simulated processes: their clock, threads, locks and connections, all in one thread of the system.

A thread is a greenlet that runs until it waits; then the clock jumps to the next event. What stands for a class of
Python or ds2 names it, and `stand_ins` says where it is put.
"""

import errno
import fcntl
import heapq
import itertools
import json
import os
import random
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fuzzing.disks import Node
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor

from ds2.distributed import elastic, members
from ds2.distributed.elastic import ElasticCommunicator
from ds2.distributed.members import Members, View
from ds2.distributed.process_group import LostRankError
from ds2.distributed.tcp import CLOSED, TcpGroup
from ds2.system import files
from ds2.system.messages import decode, encode
from ds2.system.plain import from_plain, parse_json
from ds2.training import run_folder
from ds2.training.stopping import Interrupts

SILENT_S = 4.0
POLL_S = 0.1
SLOW = 0.02  # of what is sent


class Machine:
    """The clock of a run and its processes, of whose threads one runs at a time."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.stack = getcurrent()  # the event loop's, to which a thread that waits returns
        self.now_s, self.running, self.over = 0.0, None, False
        self.disturbed_s = 0.0  # when the last thing happened that may delay a step, or the last one was logged
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.faults: list[str] = []
        self.processes: list[Process] = []
        self.by_member: dict[str, Process] = {}
        self.calls: set[tuple[int, str]] = set()  # views, and members that connect to the ranks of it
        self.links = defaultdict[tuple[int, str, str], Link](Link)  # by view, sender and receiver

    process = property(lambda self: self.running.process)  # the one that runs

    def call_later(self, seconds: float, function: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + max(0.0, seconds), next(self._numbers), function))

    def run_events(self) -> None:
        """Run until nothing is left to happen, then end all threads."""
        while self._events:
            self.now_s, _, function = heapq.heappop(self._events)
            function()
        self.over = True
        for process in self.processes:
            for thread in process.threads:
                thread.stack.throw(GreenletExit)

    def sleep(self, seconds: float) -> None:
        if self.over:
            raise GreenletExit
        if self.running is not None:
            self.running.sleep(seconds)

    def pause(self) -> None:
        """Called between two calls that need each other: a subclass disturbs the process that runs now and then."""


class Process:
    """A simulated process: its threads run only while it is neither stopped nor dead."""

    def __init__(self, machine: Machine, number: int) -> None:
        self.machine, self.number = machine, number
        self.dead = self.stopped = False
        self.stopped_s = 0.0
        self.due: list[Callable[[], None]] = []  # what was to happen while it was stopped
        self.threads: list[Thread] = []
        self.interrupts = Interrupts()
        self.signals: list[int] = []
        self.status: int | None = None

    def spawn(self, target: Callable[[], object]) -> None:
        """Start a thread."""
        thread = Thread(self, target)
        self.threads.append(thread)
        thread.wake(0.0)

    def kill(self) -> None:
        """Let it run no more."""
        self.dead = True

    def stop(self, seconds: float) -> None:
        """Let it rest for a while."""
        if not (self.stopped or self.dead):
            self.stopped, self.stopped_s = True, self.machine.now_s
            self.machine.call_later(seconds, self._go_on)

    def _go_on(self) -> None:
        self.stopped, self.machine.disturbed_s = False, self.machine.now_s
        due, self.due = self.due, []
        for function in due:
            self.machine.call_later(0.0, function)


class Thread:
    """A thread of a simulated process. Of all of them one runs at a time, until it waits."""

    def __init__(self, process: Process, target: Callable[[], object]) -> None:
        self.process, self._target = process, target
        self.waits = 0  # the number of its present wait: an event that would end a previous one does nothing
        self.is_main = not process.threads
        self.stack = greenlet(self._run, process.machine.stack)

    def sleep(self, seconds: float) -> None:
        """Wait; called in the thread itself."""
        process = self.process
        self.waits += 1
        self.wake(seconds)
        process.machine.stack.switch()
        if process.machine.over:
            raise GreenletExit
        while self.is_main and process.signals:
            process.interrupts._handle(process.signals.pop(0), None)

    def wake(self, seconds: float) -> None:
        """Let its present wait end some time later."""
        self.process.machine.call_later(seconds, partial(self._go_on, self.waits))

    def _go_on(self, wait: int) -> None:
        process, machine = self.process, self.process.machine
        if process.stopped and not process.dead:
            process.due.append(partial(self._go_on, wait))
        elif wait == self.waits and not process.dead:
            machine.running = self
            self.stack.switch()
            machine.running = None

    def _run(self) -> None:
        machine = self.process.machine
        try:
            self._target()
        except BaseException as error:
            if not (machine.over or isinstance(error, GreenletExit)):
                where = traceback.extract_tb(error.__traceback__)[-3:]
                places = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(where))
                machine.faults.append(f"process {self.process.number}: {error!r} at {places}")
        self.waits += 1


class Lock:
    """Stands for the functions of `fcntl`; a lock belongs to a process, as those of POSIX."""

    LOCK_EX, LOCK_SH, LOCK_NB = fcntl.LOCK_EX, fcntl.LOCK_SH, fcntl.LOCK_NB

    def __init__(self, machine: Machine) -> None:
        self._machine, self._owners = machine, dict[Node, Process]()

    def lockf(self, file: Any, how: int) -> None:
        node, own = file.fileno(), self._machine.process
        owner = self._owners.get(node)
        if owner is not None and owner is not own and not owner.dead:
            raise OSError(errno.EAGAIN, "locked")
        if how & self.LOCK_EX:
            self._owners[node] = own


class Event:
    """Stands for `threading.Event`."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._set = machine, False

    def set(self) -> None:
        self._set = True

    def wait(self, timeout: float) -> bool:
        if not self._set:
            self._machine.sleep(timeout)
        return self._set


class Writer:
    """Stands for the `ThreadPoolExecutor` of a writer."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._work = machine, list[tuple[Future[None], Callable[[], None]]]()
        self._started = False

    def submit(self, work: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        self._work.append((future, work))
        if not self._started:
            self._started = True
            self._machine.process.spawn(self._run)
        return future

    def _run(self) -> None:
        while self._work:
            future, work = self._work.pop(0)
            self._machine.sleep(self._machine.draw.expovariate(20))
            try:
                work()
                future.set_result(None)
            except Exception as error:
                future.set_exception(error)
        self._started = False


class Link:
    """What travels from one process to another in a view: when it arrives, and the bytes; None at its end."""

    def __init__(self) -> None:
        self.items: list[tuple[float, bytes | None]] = []
        self.reader: Thread | None = None
        self.open = False  # whether the sender is connected

    def append(self, at_s: float, data: bytes | None) -> None:
        """Send; who waits for it wakes up when it arrives."""
        self.items.append((at_s, data))
        if self.reader is not None:
            self.reader.wake(at_s - self.reader.process.machine.now_s)


@lru_cache(1 << 12)
def decoded(message: bytes, classes: tuple[type, ...]) -> Any:
    """The value of a message; nobody changes it."""
    return decode(memoryview(message), classes)


class Group(TcpGroup):
    """A `TcpGroup` that is its own stream: what ranks send each other arrives in order, some time later."""

    def __init__(self, machine: Machine, number: int, rank: int, members: Sequence[str]) -> None:
        self.rank, self.size, self.hosts = rank, len(members), ["host"] * len(members)
        self.lost, self.on_loss, self._blocking, self._began_s = {}, lambda: None, self, machine.now_s
        self.machine = machine
        self.links = [other for other in range(len(members)) if other != rank]
        self._from = {r: machine.links[number, members[r], members[rank]] for r in self.links}
        self._to = {r: machine.links[number, members[rank], members[r]] for r in self.links}
        self._processes = {r: machine.by_member[members[r]] for r in self.links}
        for link in self._to.values():
            link.open = True

    def finish(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
        data = {rank: tensor.detach().view(-1).view(torch.uint8).numpy().tobytes() for rank, tensor in sent.items()}
        for rank, octets in self._exchange(data, received).items():
            received[rank].view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(octets), dtype=torch.uint8))

    def _exchange(self, sent: Mapping[int, bytes], received: Iterable[int]) -> dict[int, bytes]:
        """Send to some ranks and wait for what others have sent."""
        machine, arrived = self.machine, dict[int, bytes]()
        for rank in self.links if machine.draw.random() < 0.5 else reversed(self.links):
            self._check_rank(rank)
            if rank in sent:
                slow_s = machine.draw.uniform(0, 2) if machine.draw.random() < SLOW else 0.0
                self._to[rank].append(machine.now_s + slow_s + machine.draw.expovariate(200), sent[rank])
                machine.pause()
        missing = [rank for rank in received if rank in self.links]
        while missing:
            next_s = machine.now_s + machine.draw.expovariate(1 / POLL_S)
            for rank in list(missing):
                items = self._from[rank].items
                if items and items[0][0] > machine.now_s:
                    next_s = min(next_s, items[0][0])
                elif items and (data := items[0][1]) is not None:
                    items.pop(0)
                    arrived[rank] = data
                    missing.remove(rank)
            if missing:
                self.check()
                for rank in missing:
                    self._from[rank].reader = machine.running
                machine.sleep(next_s - machine.now_s)
                for rank in missing:
                    self._from[rank].reader = None
        if self.lost:
            raise LostRankError(self.reason)
        return arrived

    def check(self) -> None:
        """Raise LostRankError if a rank is gone."""
        for rank in self.links:
            self._check_rank(rank)

    def _check_rank(self, rank: int) -> None:
        """As the watchdog does: rank 0 listens to all, the others to rank 0."""
        process, machine, link = self._processes[rank], self.machine, self._from[rank]
        alive_s = process.stopped_s if process.stopped else machine.now_s if link.open else self._began_s
        if process.dead or (link.items and link.items[-1][1] is None):
            if machine.draw.random() < 0.5:  # what has arrived is read before the end is seen, or not
                self.lose(rank, CLOSED)
        elif 0 in (rank, self.rank) and machine.now_s - alive_s > SILENT_S:
            self.lose(rank, f"has been silent for {SILENT_S:.0f} s")
        if self.lost:
            raise LostRankError(self.reason)

    def allgather(self, value: Any, classes: Iterable[type] = ()) -> list[Any]:
        """See `ProcessGroup`: a message and its length are one here."""
        own = encode(value)
        parts = {self.rank: own, **self._exchange(dict.fromkeys(self.links, own), self.links)}
        return [decoded(bytes(parts[rank]), classes) for rank in range(self.size)]

    def broadcast(self, value: Any) -> Any:
        own = encode(value)
        if self.rank == 0:
            self._exchange(dict.fromkeys(self.links, own), ())
        return decoded(bytes(own if self.rank == 0 else self._exchange({}, (0,))[0]), ())

    def barrier(self) -> None:
        self._exchange(dict.fromkeys(self.links, b""), self.links)

    def close(self) -> None:
        """Tell the others."""
        for link in self._to.values():
            link.append(self.machine.now_s, None)


class SimulatedMembers(Members):
    """Members without sockets."""

    machine: Any = None  # the Machine, while it is simulated

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.machine.by_member[self.me.id] = self.machine.process

    def connect(self, view: View) -> TcpGroup:
        """See `Members`: a process waits for the calls of higher ranks; lower ones need only listen."""
        own, ids = view.rank(self.me.id), [member.id for member in view.members]
        self.machine.calls.add((view.number, self.me.id))
        began_s = time.monotonic()
        if any(self.machine.by_member[member].dead for member in ids[:own]):
            raise LostRankError("a rank of the new group cannot be reached")
        while not all((view.number, member) in self.machine.calls for member in ids[own:]):
            self._check_view(view, own, time.monotonic() - began_s)
            time.sleep(POLL_S)
        return Group(self.machine, view.number, own, ids)


class SimulatedCommunicator(ElasticCommunicator):
    """An `ElasticCommunicator` whose watchdog is in `Group`."""

    machine: Any = None  # the Machine, while it is simulated

    def _use(self, group: Any) -> None:
        self.rank, self.world, self.group = group.rank, group.size, group
        self.watchdog = SimpleNamespace(stop=lambda: None, drop=lambda: None)

    def end_sums(self) -> None:
        """See `OrderedCommunicator`; none runs."""

    def check(self) -> None:
        """See `Communicator`; what the watchdog has noticed by now."""
        if isinstance(self.group, Group):
            self.group.check()
        super().check()

    def superseded(self) -> bool:
        """See `Communicator`; then a signal may come."""
        superseded = super().superseded()
        self.machine.pause()
        return superseded


def stand_ins(machine: Machine) -> list[tuple[Any, str, Any]]:
    """What processes use while they are simulated: a module or class, the name in it, and what is put there."""
    lock, draw = Lock(machine), machine.draw
    threads = SimpleNamespace(
        Event=lambda: Event(machine),
        Thread=lambda target, **_: SimpleNamespace(start=lambda: machine.process.spawn(target)),
    )
    server = SimpleNamespace(getsockname=lambda: ("", 1), close=lambda: None)
    secrets = SimpleNamespace(token_hex=lambda count: draw.randbytes(count).hex())

    def wait(futures: Sequence[Future[None]]) -> None:
        while not all(future.done() for future in futures):
            machine.sleep(POLL_S)

    return [
        *[(module, "fcntl", lock) for module in (members, files)],
        *[(module, "host_id", lambda: "host") for module in (files, run_folder)],
        *[(module, "secrets", secrets) for module in (members, run_folder)],
        (members, "threading", threads),
        (members, "socket", SimpleNamespace(create_server=lambda *_, **__: server)),
        (members, "reachable_address", lambda: "127.0.0.1"),
        (members, "SILENT_S", SILENT_S),
        (members, "POLL_S", POLL_S),
        (members, "asdict", lambda value: value),  # this and the next four: the same content is converted once
        (members, "json", SimpleNamespace(dumps=partial(json.dumps, default=vars))),
        (members, "parse_json", lambda content: content),
        (members, "from_plain", parsed),
        (files, "parse_json", lru_cache(1 << 12)(parse_json)),
        (elastic, "Members", SimulatedMembers),
        *[(kind, "machine", machine) for kind in (SimulatedMembers, SimulatedCommunicator)],
        (files, "_is_dead", lambda _, writer: machine.processes[int(writer["process"]) - 1].dead),
        (os, "getpid", lambda: machine.process.number if machine.running else 0),
        (run_folder, "ThreadPoolExecutor", lambda *_: Writer(machine)),
        (run_folder, "wait", wait),
        (time, "monotonic", lambda: machine.now_s),
        (time, "time", lambda: machine.now_s),  # the log has it: what is left of a torn line depends on its length
        (time, "sleep", machine.sleep),
    ]


@lru_cache(1 << 12)
def parsed(kind: Any, content: bytes, name: str) -> Any:
    """The value of a file; nobody changes it."""
    return from_plain(kind, parse_json(content), name)
