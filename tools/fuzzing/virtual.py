"""An event loop whose clock jumps to the next event, and connections in memory: the same seed gives the same run.

Nothing waits in real time, so hours of idle connections pass in milliseconds, and a task that waits for an event that
never comes is an error instead of a hang. Work for threads runs in the loop itself, after a random delay.
"""

import asyncio
import random
import selectors
from collections.abc import Callable
from typing import Any

from fuzzing.seeds import Fault

from ds2.serve.client import resolve


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time; `draw` gives the random numbers of this run."""

    def __init__(self, draw: random.Random) -> None:
        self.now_s, self.draw = 0.0, draw
        self.spent_s = self.longest_s = 0.0  # by what runs now, and by anything in the loop: meanwhile nobody is served
        self.longest_work_s = 0.0  # of a thread
        selector = selectors.SelectSelector()
        selector.select = self._move_clock  # nobody writes to the only file that it waits for, the loop's own pipe
        super().__init__(selector)

    def _move_clock(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Fault("tasks wait for what will never happen")
        self.longest_s = max(self.longest_s, self.spent_s)
        self.now_s, self.spent_s = self.now_s + max(timeout, self.spent_s, 0.0), 0.0
        return []

    def time(self) -> float:
        return self.now_s

    def spend(self, seconds: float) -> None:
        """Let what runs now take so long."""
        self.spent_s += seconds

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)  # there is one thread

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """See asyncio: run the work in the loop, some time later."""
        future = self.create_future()

        def work() -> None:
            spent_s = self.spent_s
            try:
                result = func(*args)
            except Exception as error:
                result = error
            resolve([(future, result)])
            self.longest_work_s, self.spent_s = max(self.longest_work_s, self.spent_s - spent_s), spent_s

        self.call_later(self.draw.expovariate(20), work)
        return future

    async def create_unix_connection(self, protocol_factory: Any, path: Any = None, **options: Any) -> Any:
        """See asyncio: `sock` is a `LoopSocket`."""
        return options["sock"].connect(protocol_factory())


class PeerSocket:
    """The blocking end of a socket pair, as `WorkerLink` of ds2 uses it; `readable` is called at each arrival."""

    def __init__(self, loop: VirtualLoop, readable: Callable[[], None]) -> None:
        self.loop, self.readable = loop, readable
        self.arrived, self.closed = bytearray(), False
        self.other = LoopSocket(loop, self)

    def setblocking(self, blocking: bool) -> None: ...

    def fileno(self) -> int:
        return -1 if self.closed else 1

    def recv(self, most: int) -> bytes:
        """Return a random part of what has arrived."""
        if not (self.arrived or self.closed):
            raise BlockingIOError
        count = self.loop.draw.randint(1, min(most, len(self.arrived))) if self.arrived else 0
        data = bytes(self.arrived[:count])
        del self.arrived[:count]
        return data

    def send(self, data: memoryview) -> int:
        """Take a random part."""
        if self.closed:
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
            self.other.lose()


class LoopSocket(asyncio.Transport):
    """The event loop's end of a socket pair; bytes travel in order, with random delays."""

    def __init__(self, loop: VirtualLoop, peer: PeerSocket) -> None:
        super().__init__()
        self.loop, self.peer = loop, peer
        self._protocol: asyncio.Protocol | None = None
        self._next_s = 0.0

    def connect(self, protocol: asyncio.Protocol) -> tuple[asyncio.Transport, asyncio.Protocol]:
        """Begin to deliver to a protocol."""
        self._protocol = protocol
        protocol.connection_made(self)
        return self, protocol

    def _later(self, action: Callable[..., Any], *arguments: Any) -> None:
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

    def __init__(self, path: str) -> None:
        self.to_server: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.to_client: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.receive = self.to_server.get  # see ASGI, as for `scope` and `send`
        self.scope = {
            "type": "websocket", "path": path, "query_string": b"", "headers": [(b"host", b"127.0.0.1")],
            "subprotocols": [],
        }  # fmt: skip
        self.reads, self.gone = asyncio.Event(), False
        self.reads.set()
        self.to_server.put_nowait({"type": "websocket.connect"})

    async def send(self, message: dict[str, Any]) -> None:
        """Wait for a client that reads nothing."""
        await self.reads.wait()
        if self.gone:
            raise OSError("the client has left")
        self.to_client.put_nowait(message)

    def leave(self) -> None:
        """The client ends without a word."""
        self.gone = True
        self.reads.set()
        self.to_server.put_nowait({"type": "websocket.disconnect", "code": 1006})
