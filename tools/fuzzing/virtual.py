"""An event loop whose clock jumps to the next event, and connections in memory: the same seed gives the same run.

Nothing waits in real time, so hours of idle connections pass in milliseconds, and a task that waits for an event that
never comes is an error instead of a hang. Work for threads runs in the loop itself, after a random delay. `simulate` is
the command line of a simulation.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import inspect
import logging
import math
import multiprocessing
import random
import selectors
import textwrap
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from ds2.system.machine import usable_cores

PlantedFault = Callable[[], Any] | dict[str, bool]  # makes a context manager that plants it, or options of a run


def planted(*rows: tuple[Any, ...]) -> dict[str, PlantedFault]:
    """Faults by name: each puts a value instead of an attribute of a module or class, or a text for one in it."""
    return {name: partial(_plant, *where) for name, *where in rows}


def _plant(owner: Any, name: str, *value: Any) -> Any:
    if len(value) == 1:
        return patch.object(owner, name, *value)
    function, made = inspect.unwrap(getattr(owner, name)), dict[str, Any]()
    source, (old, new) = textwrap.dedent(inspect.getsource(function)), value
    if source.count(old) != 1:
        raise ValueError(f"{name} has {source.count(old)} times, where a fault is planted: {old}")
    exec("from __future__ import annotations\n" + source.replace(old, new), function.__globals__, made)
    return patch.object(owner, name, made[function.__name__])


class Fault(Exception):
    """A run that breaks a promise, fails or hangs."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time.

    Args:
        draw: the random numbers of this run.
    """

    def __init__(self, draw: random.Random) -> None:
        self.now_s, self.draw = 0.0, draw
        self.spent_s = self.longest_s = 0.0  # by what runs now, and by anything in the loop: meanwhile nobody is served
        self.longest_work_s = 0.0  # of a thread
        super().__init__(_Clock(self))

    def time(self) -> float:
        return self.now_s

    def spend(self, seconds: float) -> None:
        """Let what runs now take so long."""
        self.spent_s += seconds

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """See asyncio: run the work in the loop, some time later."""
        future = self.create_future()

        def work() -> None:
            spent_s = self.spent_s
            try:
                result = func(*args)
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)
            self.longest_work_s, self.spent_s = max(self.longest_work_s, self.spent_s - spent_s), spent_s

        self.call_later(self.draw.expovariate(20), work)
        return future

    async def create_unix_connection(self, protocol_factory: Any, path: Any = None, **options: Any) -> Any:
        """See asyncio: `sock` is one end of `socket_pair`."""
        return options["sock"].connect(protocol_factory())


class _Clock(selectors.BaseSelector):
    """A selector without files: to wait is to move the clock."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop, self.keys = loop, dict[Any, selectors.SelectorKey]()

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """See selectors: the loop's own pipe, which nobody writes to."""
        self.keys[fileobj] = key = selectors.SelectorKey(fileobj, fileobj, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self.keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[Any]:
        loop = self.loop
        if timeout is None:
            raise Fault("tasks wait for what will never happen")
        loop.longest_s = max(loop.longest_s, loop.spent_s)
        loop.now_s, loop.spent_s = loop.now_s + max(timeout, loop.spent_s, 0.0), 0.0
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self.keys


class PeerSocket:
    """The blocking end of a socket pair, as `ds2.serve.processes.WorkerLink` uses it: `recv`, `send`, `close`."""

    def __init__(self, loop: VirtualLoop, readable: Callable[[], None]) -> None:
        self.loop, self.readable = loop, readable
        self.arrived, self.closed = bytearray(), False
        self.other: LoopSocket | None = None

    def setblocking(self, blocking: bool) -> None:
        """See socket; it never blocks."""

    def fileno(self) -> int:
        return -1 if self.closed else 1

    def recv(self, most: int) -> bytes:
        """See socket: return a random part of what has arrived."""
        if not self.arrived:
            if self.closed:
                return b""
            raise BlockingIOError
        count = self.loop.draw.randint(1, min(most, len(self.arrived)))
        data = bytes(self.arrived[:count])
        del self.arrived[:count]
        return data

    def send(self, data: memoryview) -> int:
        """See socket: take a random part."""
        if self.closed or self.other is None:
            raise BrokenPipeError
        count = self.loop.draw.randint(1, len(data))
        self.other.feed(bytes(data[:count]))
        return count

    def shutdown(self, how: int) -> None:
        self.close()

    def close(self) -> None:
        """Close both ends."""
        if not self.closed:
            self.closed = True
            self.readable()
            if self.other is not None:
                self.other.lose()


class LoopSocket(asyncio.Transport):
    """The event loop's end of a socket pair; bytes travel in order, with random delays."""

    def __init__(self, loop: VirtualLoop, peer: PeerSocket) -> None:
        super().__init__()
        self.loop, self.peer = loop, peer
        self._protocol: asyncio.Protocol | None = None
        self._next_s = 0.0
        peer.other = self

    def connect(self, protocol: asyncio.Protocol) -> tuple[asyncio.Transport, asyncio.Protocol]:
        """Begin to deliver to a protocol."""
        self._protocol = protocol
        protocol.connection_made(self)
        return self, protocol

    def _later(self, action: Callable[..., None], *arguments: Any) -> None:
        self._next_s = max(self._next_s, self.loop.time()) + self.loop.draw.expovariate(2000)
        self.loop.call_at(self._next_s, action, *arguments)

    def feed(self, data: bytes) -> None:
        """Send bytes to the protocol."""
        self._later(lambda: self._protocol and self._protocol.data_received(data))

    def lose(self) -> None:
        """End the connection after the bytes that travel."""
        self._later(self._lose)

    def _lose(self) -> None:
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            protocol.connection_lost(None)

    def write(self, data: Any) -> None:
        self._later(self._arrive, bytes(data))

    def _arrive(self, data: bytes) -> None:
        if not self.peer.closed:
            self.peer.arrived += data
            self.peer.readable()

    def close(self) -> None:
        self._later(self.peer.close)


class Connection:
    """A WebSocket between a simulated client and an ASGI application."""

    def __init__(self, loop: VirtualLoop, path: str) -> None:
        self.loop, self.path = loop, path
        self.to_server: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.to_client: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.reads, self.gone = asyncio.Event(), False
        self.reads.set()
        self.to_server.put_nowait({"type": "websocket.connect"})

    def scope(self) -> dict[str, Any]:
        return {
            "type": "websocket", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "ws", "path": self.path,
            "raw_path": self.path.encode(), "query_string": b"", "root_path": "", "subprotocols": [],
            "headers": [(b"host", b"127.0.0.1")], "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "state": {},
        }  # fmt: skip

    async def receive(self) -> dict[str, Any]:
        return await self.to_server.get()

    async def send(self, message: dict[str, Any]) -> None:
        """See ASGI: wait for a client that reads nothing."""
        await self.reads.wait()
        if self.gone:
            raise OSError("the client has left")
        self.to_client.put_nowait(message)

    def leave(self) -> None:
        """The client ends without a word."""
        self.gone = True
        self.reads.set()
        self.to_server.put_nowait({"type": "websocket.disconnect", "code": 1006})


def simulate(
    command: str,
    description: str | None,
    run: Callable[..., str],
    planted_faults: Mapping[str, PlantedFault],
    arguments: Sequence[str] | None,
) -> int:
    """Run seeds, or look for the planted faults; returns the exit status.

    Args:
        command: of tools/fuzz.py.
        description: what `--help` shows.
        run: runs a seed and returns a digest of what happened, or raises Fault.
        planted_faults: that it must detect.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="seed of the first run")
    parser.add_argument("--seeds", type=int, default=1000, help="runs; with --faults the most for each")
    parser.add_argument(
        "--faults",
        nargs="*",
        choices=planted_faults,
        metavar="FAULT",
        help="plant each of these, by default all, and print the first seed that finds it",
    )
    parser.add_argument("--workers", type=int, default=usable_cores(), help="processes")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no further seed counts")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    gc.freeze()  # modules are not looked through again in each run
    gc.set_threshold(50_000)  # a run makes few cycles
    seeds = range(options.first, options.first + options.seeds)
    if options.faults is not None:
        faults = {name: planted_faults[name] for name in options.faults or planted_faults}
        return _print_faults(run, faults, seeds, options.workers)
    return _print_runs(command, run, seeds, options.workers, options.seconds)


def _attempt(run: Callable[..., str], seed: int, **options: bool) -> tuple[str, str]:
    """Run a seed; return what was wrong, or '', and its digest."""
    try:
        return "", run(seed, **options)
    except Fault as error:
        return str(error), ""
    except Exception as error:
        return f"unexpected {error!r}", ""


def _attempts(
    run: Callable[..., str], seeds: range, workers: int, **options: bool
) -> Generator[tuple[int, str, str], None, None]:
    """Run seeds in forked processes; yield each, in order, with what was wrong, or '', and its digest."""
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        results = pool.imap(partial(_attempt, run, **options), seeds, chunksize=4)
        for seed, (wrong, digest) in zip(seeds, results, strict=True):
            yield seed, wrong, digest


def _print_faults(run: Callable[..., str], faults: Mapping[str, PlantedFault], seeds: range, workers: int) -> int:
    missed = 0
    for name, fault in faults.items():
        options, began_s = fault if isinstance(fault, dict) else {}, time.monotonic()
        with (
            nullcontext() if isinstance(fault, dict) else fault(),
            closing(_attempts(run, seeds, workers, **options)) as results,
        ):
            detected = next(((seed, wrong) for seed, wrong, _ in results if wrong), None)
        missed += detected is None
        how = f"not found in {len(seeds)} seeds" if detected is None else f"seed {detected[0]}: {detected[1][:200]}"
        print(f"{name}: {how} ({time.monotonic() - began_s:.0f} s)", flush=True)
    return 1 if missed else 0


def _print_runs(command: str, run: Callable[..., str], seeds: range, workers: int, most_s: float) -> int:
    began_s, digest, failed, done = time.monotonic(), hashlib.sha256(), 0, 0
    with closing(_attempts(run, seeds, workers)) as results:
        for seed, wrong, digest_of_run in results:
            digest.update(digest_of_run.encode())
            failed, done = failed + bool(wrong), done + 1
            if wrong:
                again = f"python tools/fuzz.py {command} --first {seed} --seeds 1"
                print(f"seed {seed}: {wrong}\n  again: {again}")
            if time.monotonic() - began_s > most_s:
                break
        rate = done / (time.monotonic() - began_s)
    print(f"{done} seeds, {failed} failed, {rate:.1f} a second; digest {digest.hexdigest()[:16]}")
    return 1 if failed else 0
