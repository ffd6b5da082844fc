"""What a server keeps of connections that have ended, counted."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable

from support.serving import RATE_HZ, Running, connect, speech
from websockets.server import ServerProtocol

AT_ONCE, ROUNDS = 8, 40
CONFIG = json.dumps({"config": {"sample_rate": RATE_HZ}})


def connections() -> list[ServerProtocol]:
    return [candidate for candidate in gc.get_objects() if type(candidate) is ServerProtocol]


def test_connections_that_ended_do_not_pile_up(serve: Callable[..., Running]) -> None:
    """A connection is a cycle (its parser is a generator that knows it), so it stays until a collection finds it.

    One that outlives two collections waits for a full one, which Python makes once there were so many of the second
    generation and the first is full: so many rounds of clients may wait, twice as many as chance has it. What is loaded
    must not put it off until a quarter as many objects are new: thousands of connections.
    """
    running, data = serve(), speech(3, 0.2)

    async def talk(ended: asyncio.Barrier) -> None:
        async with connect(running.websocket) as ws:
            await ws.send(CONFIG)
            await ws.send(data)
            await ws.recv()
            if await ended.wait() == 0:
                gc.collect(1)  # all that are here grow old together: the worst that chance may bring
            await ended.wait()

    async def rounds() -> list[int]:
        counts = []
        for _ in range(ROUNDS):
            ended = asyncio.Barrier(AT_ONCE)
            await asyncio.gather(*(talk(ended) for _ in range(AT_ONCE)))
            counts.append(len(connections()))
        return counts

    counts = asyncio.run(rounds())
    assert max(counts) <= 2 * gc.get_threshold()[2] * AT_ONCE
    assert max(counts) > AT_ONCE  # else nothing was shown


def test_a_connection_has_no_compressor(serve: Callable[..., Running]) -> None:
    running = serve()

    async def extensions() -> str | None:
        async with connect(running.websocket) as ws:
            assert ws.response is not None
            return ws.response.headers.get("Sec-WebSocket-Extensions")

    assert asyncio.run(extensions()) is None
