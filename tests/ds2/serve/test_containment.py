"""A source that fails takes no other with it: numbers that nothing can use, and failures of the code, the network and
the decoder in a batch of many."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.serving import CONFIG, RATE_HZ, WAIT_S, Running, connect, speech, text_alone, until, vosk
from websockets.exceptions import ConnectionClosed

from ds2.config.schema import DecodeConfig
from ds2.model.checkpoint import load_model
from ds2.recognition.open_segments import Endpoints
from ds2.recognition.recogniser import Recogniser
from ds2.recognition.session import LiveSession
from ds2.serve.http import bind, share
from ds2.serve.limits import Limits
from ds2.serve.processes import Workers

GOOD = 12
HUGE = {"longest_s": "1" + "0" * 400, "silence_s": "-1e400", "after_speech_s": "true"}
MARKS_HZ = {"code": 11025, "network": 22050, "decoder": 44100}  # by which the recogniser below knows whom to let fail


class Fragile(Recogniser):
    """Gives sources that fail in a batch."""

    def live(self, *, sample_rate_hz: int | None = None, **options: Any) -> LiveSession:
        live = super().live(sample_rate_hz=sample_rate_hz, **options)
        if sample_rate_hz == MARKS_HZ["code"]:
            live.endpoints = Endpoints(longest_s=10**400)  # fits no float
        if sample_rate_hz == MARKS_HZ["network"]:
            live.blocks.append(np.zeros(10**6, np.float32))  # fits no block
        if sample_rate_hz == MARKS_HZ["decoder"]:
            live.blocks.append(np.full(3200, np.nan, np.float32))  # its log-probs are none
        return live


async def fails(url: str, rate_hz: int) -> tuple[str, int]:
    async with connect(url) as ws:
        await ws.send(json.dumps({"config": {"sample_rate": rate_hz}}))
        try:
            while True:
                await ws.send(speech(1, 1.0, rate_hz))
                await ws.recv()
        except ConnectionClosed as closed:
            assert closed.rcvd is not None
            return closed.rcvd.reason, closed.rcvd.code


async def together(url: str, rates_hz: list[int]) -> tuple[list[str], list[tuple[str, int]]]:
    good = [vosk(url, speech(seed, 1.5), chunk=6400) for seed in range(GOOD)]
    answers, failed = await asyncio.gather(
        asyncio.gather(*good), asyncio.gather(*(fails(url, rate_hz) for rate_hz in rates_hz))
    )
    return [" ".join(filter(None, (answer.get("text") for answer in client))) for client in answers], failed


def check(running: Running) -> None:
    failed: list[tuple[str, int]]
    texts, failed = asyncio.run(together(running.websocket, list(MARKS_HZ.values()) * 2))
    assert texts == [text_alone(running.recogniser, speech(seed, 1.5)) for seed in range(GOOD)]
    errors = dict(zip(MARKS_HZ, failed, strict=False))
    assert errors["code"] == errors["network"] == ("this server's recogniser failed: its log says why", 1011)
    assert "NaN or infinite" in errors["decoder"][0]
    until(lambda: running.metric("ds2_sessions") == 0)


def fragile(model: Path, method: str) -> Recogniser:
    return Fragile.of(load_model(model), DecodeConfig(method=method, beam=8), torch.device("cpu"))


@pytest.mark.parametrize("method", ["greedy", "beam"])
def test_the_others_of_a_batch_get_all_their_words(serve: Callable[..., Running], method: str) -> None:
    check(serve(method, kind=Fragile))


@pytest.fixture
def workers(make_model: Callable[..., Path]) -> Iterator[Running]:
    """A server with a worker whose recogniser gives sources that fail."""
    recogniser, bound = fragile(make_model(), "greedy"), bind("127.0.0.1", 0)
    server = Workers(recogniser, Limits(idle_s=WAIT_S), share(bound), 1)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    yield Running(recogniser, server.address[1], server.end)
    server.end()
    thread.join(WAIT_S)
    bound.close()


def test_the_others_of_a_batch_get_all_their_words_from_workers(workers: Running) -> None:
    check(workers)


@pytest.mark.parametrize("rule", HUGE)
def test_a_number_that_fits_nothing_is_refused_where_it_is_read(serve: Callable[..., Running], rule: str) -> None:
    running, data = serve(), speech(3, 1.0)
    config = f'{{"config": {{"sample_rate": {RATE_HZ}, "endpoints": {{"{rule}": {HUGE[rule]}}}}}}}'

    async def refused() -> dict[str, Any]:
        async with connect(running.websocket) as ws, connect(running.websocket) as other:
            await other.send(CONFIG)
            await ws.send(config)
            answer: dict[str, Any] = json.loads(await ws.recv())
            await other.send(data)
            assert "partial" in json.loads(await other.recv())
            return answer

    assert f"{rule}=" in (error := asyncio.run(refused())["error"]) and "is not allowed: give numbers above 0" in error
