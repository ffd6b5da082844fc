"""A recogniser that hangs: its clients get an error of their own protocol, and its process ends or is replaced."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from support.serving import (
    CONFIG,
    RATE_HZ,
    WAIT_S,
    Running,
    connect,
    printed_port,
    speech,
    text_alone,
    until,
    vosk,
    wav,
)
from websockets.exceptions import ConnectionClosed

from ds2.config.schema import DecodeConfig
from ds2.model.checkpoint import load_model
from ds2.recognition.recogniser import Recogniser
from ds2.recognition.session import LiveSession
from ds2.serve.http import bind, share
from ds2.serve.limits import Limits
from ds2.serve.processes import Recognisers

HANGS_HZ = 11025  # sources of this rate hang
HANGING = threading.Event()  # the hang has begun
RELEASED = threading.Event()  # ends the hang, so that no thread outlives the tests
FAILED = "this server's recogniser failed: its log says why"


class Hanging(Recogniser):
    """A recogniser that hangs where it decodes a source of `HANGS_HZ`, as where a GPU answers no more."""

    def live(self, *, sample_rate_hz: int | None = None, **options: Any) -> LiveSession:
        live = super().live(sample_rate_hz=sample_rate_hz, **options)
        if sample_rate_hz == HANGS_HZ:
            live.is_ready = hang  # type: ignore[method-assign]
        return live


def hang() -> bool:
    HANGING.set()
    return RELEASED.wait(WAIT_S)


def hanging(model: Path) -> Recogniser:
    """A recogniser, in a process that waits for less time than usual."""
    import ds2.serve.engine

    ds2.serve.engine.HANGS_S = 2.0  # more than a first batch takes on a busy machine
    return Hanging.of(load_model(model), DecodeConfig(), torch.device("cpu"))


async def last_answers(url: str, rate_hz: int, data: bytes) -> tuple[str, int]:
    """The error of a Vosk client, and the code of its end."""
    async with connect(url) as ws:
        await ws.send(json.dumps({"config": {"sample_rate": rate_hz}}))
        await ws.send(data)
        answer: dict[str, Any] = {}
        try:
            while True:
                answer = json.loads(await ws.recv())
        except ConnectionClosed as closed:
            return answer.get("error", ""), closed.rcvd.code if closed.rcvd else 0


def test_all_clients_of_a_recogniser_that_hangs_get_an_error(
    serve: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    running, data = serve(kind=Hanging), speech(3, 1.0)
    client = running.client()

    def upload() -> str:
        with pytest.raises(openai.InternalServerError) as failed:
            client.audio.transcriptions.create(model="ds2", file=wav(data))
        return failed.value.message

    async def all_at_once() -> list[Any]:
        async with connect(running.websocket) as silent:  # it waits for no answer
            await silent.send(CONFIG)
            await silent.send(data)
            await silent.recv()
            hangs = asyncio.ensure_future(last_answers(running.websocket, HANGS_HZ, data))
            assert await asyncio.to_thread(HANGING.wait, WAIT_S)
            others = [last_answers(running.websocket, RATE_HZ, data) for _ in range(3)]
            clients = asyncio.gather(hangs, *others, asyncio.to_thread(upload))
            await asyncio.to_thread(until, lambda: running.metric("ds2_sessions") == 6)
            monkeypatch.setattr("ds2.serve.engine.HANGS_S", 0.5)  # now that all wait, however long that took
            await hangs
            with pytest.raises(ConnectionRefusedError):  # whoever connects again at once needs another server
                await connect(running.websocket)
            answers = await clients
            error = json.loads(await silent.recv())["error"]
            with pytest.raises(ConnectionClosed) as closed:
                await silent.recv()
            return [*answers, (error, closed.value.rcvd.code if closed.value.rcvd else 0)]

    try:
        *answers, upload_error, last = asyncio.run(all_at_once())
    finally:
        RELEASED.set()
    assert {*answers, last} == {(FAILED, 1011)} and FAILED in upload_error


def test_a_server_whose_recogniser_hangs_ends(make_model: Callable[..., Path]) -> None:
    code = "import functools, sys, time; import ds2.serve.engine as engine; engine.HANGS_S = 1.0; "
    code += (
        f"engine.Engine._answer_finished = lambda *_: time.sleep({WAIT_S}); import ds2.cli; sys.exit(ds2.cli.main())"
    )
    command = [sys.executable, "-c", code, "serve", str(make_model()), "--device", "cpu", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        url = f"ws://127.0.0.1:{printed_port(server)}/"
        assert asyncio.run(last_answers(url, RATE_HZ, speech(3, 1.0))) == (FAILED, 1011)
        _, errors = server.communicate(timeout=WAIT_S / 2)  # Python itself would wait for its threads
        assert server.returncode == 1
        assert "the recogniser hangs" in errors and "in turn" in errors
    finally:
        server.kill()


@pytest.mark.slow
def test_a_recogniser_that_hangs_is_replaced(make_model: Callable[..., Path]) -> None:
    model, bound, data = make_model(), bind("127.0.0.1", 0), speech(3, 1.0)
    server = Recognisers(functools.partial(hanging, model), Limits(), share(bound), 2, 1)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    before, url = server.processes(), f"ws://127.0.0.1:{bound.getsockname()[1]}/"
    try:
        assert asyncio.run(last_answers(url, HANGS_HZ, data)) == (FAILED, 1011)
        until(lambda: len(server.processes()) == 2 and server.processes() != before)
        assert sorted(process.exitcode or 0 for process in before) == [0, 1]
        text = text_alone(Recogniser.load(model, device="cpu", decode=DecodeConfig()), data)
        for _ in range(4):  # whoever is asked
            answers = asyncio.run(vosk(url, data))
            assert not [answer for answer in answers if "error" in answer]
            assert " ".join(answer["text"] for answer in answers if answer.get("text")) == text
    finally:
        server.end()
        thread.join(WAIT_S)
        bound.close()
    assert not thread.is_alive() and os.environ.get("PROMETHEUS_MULTIPROC_DIR") is None
