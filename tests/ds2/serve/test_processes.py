"""A server in several processes: the same answers, and no process that takes the others with it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest
import torch
from support.serving import (
    CONFIG,
    WAIT_S,
    Running,
    alone,
    connect,
    printed_port,
    speech,
    start_server,
    text_alone,
    texts_though_killed,
    until,
    wav,
    words,
)
from support.tiny import compose_once, tiny_overrides_in, write_untrained
from websockets.exceptions import ConnectionClosed

from ds2.config.schema import ConfigError, DecodeConfig
from ds2.model.checkpoint import load_model
from ds2.recognition.recogniser import Recogniser
from ds2.serve.http import bind, listen, listen_shared, share
from ds2.serve.limits import Limits
from ds2.serve.processes import END_S, Workers


@pytest.fixture(scope="module")
def running(tone_manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Workers]]:
    """A server with two workers that takes 40 sessions; all tests share it, as it takes seconds to start."""
    folder = tmp_path_factory.mktemp("workers")
    model = write_untrained(compose_once(*tiny_overrides_in(folder, tone_manifest)), folder / "model.safetensors")
    recogniser = Recogniser.of(load_model(model), DecodeConfig(method="beam", beam=8), torch.device("cpu"))
    bound = bind("127.0.0.1", 0)
    server = Workers(recogniser, Limits(sessions=40, idle_s=WAIT_S), share(bound), 2)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    yield Running(recogniser, server.address[1], server.end), server
    server.end()
    thread.join(WAIT_S)
    bound.close()
    assert not thread.is_alive()


def test_workers_have_no_use_for_torch(running: tuple[Running, Workers]) -> None:
    pids = [process.pid for process in running[1].processes()]
    assert len(pids) == 2 and not [pid for pid in pids if "libtorch" in Path(f"/proc/{pid}/maps").read_text()]
    assert "libtorch" in Path("/proc/self/maps").read_text()


def test_all_get_their_own_words(running: tuple[Running, Workers]) -> None:
    server, workers = running
    sources = [speech(seed, 0.4 + 0.02 * seed) for seed in range(36)]
    wanted = [
        [(word.text, round(word.start_s, 3), round(word.end_s, 3)) for word in alone(server.recogniser, data).words]
        for data in sources
    ]
    assert len(set(map(str, wanted))) > 10
    before = server.metric("ds2_words_total"), server.metric("ds2_latency_seconds_count")

    async def all_at_once() -> list[list[tuple[str, float, float]]]:
        return await asyncio.gather(*(words(server.websocket, data) for data in sources))

    assert asyncio.run(all_at_once()) == wanted
    until(lambda: server.metric("ds2_sessions") == 0)
    assert server.metric("ds2_words_total") - before[0] == sum(map(len, wanted))
    assert server.metric("ds2_latency_seconds_count") - before[1] > len(sources)
    with pytest.raises(ConfigError, match="give another --port"):
        bind(*workers.address)


def test_an_address_is_bound_once_and_stays_bound() -> None:
    bound = bind("127.0.0.1", 0)
    address = bound.getsockname()[:2]
    with pytest.raises(ConfigError, match="give another --port"):
        bind(*address)
    with pytest.raises(OSError, match="in use"):
        listen_shared(*address)  # not even one that would share it
    assert share(bound) == address
    workers = [listen_shared(*address) for _ in range(2)]
    with pytest.raises(ConfigError, match="give another --port"):
        bind(*address)
    with socket.create_connection(address):
        for end in (*workers, bound):
            end.close()
    again = bind(*address)  # though a connection of the one before lingers
    listen(again)
    client = socket.create_connection(address)
    end, _ = again.accept()
    end.close()
    again.close()
    client.close()
    bind(*address).close()


def test_files_hot_words_and_what_is_wrong(running: tuple[Running, Workers]) -> None:
    server, _ = running
    data = speech(2, 1.5)
    upload, create = wav(data), server.client().audio.transcriptions.create
    plain = text_alone(server.recogniser, data)
    assert create(model="ds2", file=upload).text == plain
    assert create(model="ds2", file=upload, extra_body={"hot_words": json.dumps({plain: -500})}).text != plain
    create(model="ds2", file=upload, prompt="cab, b a")
    with pytest.raises(openai.BadRequestError, match="zebra"):
        create(model="ds2", file=upload, extra_body={"hot_words": '["zebra"]'})
    with pytest.raises(openai.BadRequestError, match="not readable"):
        create(model="ds2", file=("talk.wav", b"not audio"))
    until(lambda: server.metric("ds2_sessions") == 0)  # whichever worker is asked


def test_the_sessions_of_all_workers_together_are_limited(running: tuple[Running, Workers]) -> None:
    server, _ = running

    async def full() -> tuple[str, int]:
        held = [await connect(server.websocket) for _ in range(40)]
        for ws in held:
            await ws.send(bytes(200))
            await ws.recv()
        try:
            async with connect(server.websocket) as ws:
                await ws.send(bytes(200))
                reason = json.loads(await ws.recv())["error"]
                with pytest.raises(ConnectionClosed) as closed:
                    await ws.recv()
            with pytest.raises(openai.RateLimitError, match="40 sessions at most"):
                await asyncio.to_thread(
                    server.client().audio.transcriptions.create, model="ds2", file=("a.raw", bytes(200))
                )
        finally:
            for ws in held:
                await ws.close()
        return reason, closed.value.rcvd.code if closed.value.rcvd else 0

    reason, code = asyncio.run(full())
    assert "40 sessions at most" in reason and code == 1013
    until(lambda: server.metric("ds2_sessions") == 0)


def test_a_worker_that_is_killed_takes_only_its_own_clients(running: tuple[Running, Workers]) -> None:
    server, workers = running
    data = speech(6, 1.0)
    first = workers.processes()[0]
    assert first.pid is not None
    texts = asyncio.run(texts_though_killed(server, data, 30, first.pid))
    assert texts == {None, text_alone(server.recogniser, data)}
    until(lambda: first not in workers.processes() and len(workers.processes()) == 2)
    until(lambda: server.metric("ds2_sessions") == 0)
    assert " ".join(word for word, *_ in asyncio.run(words(server.websocket, data))) == text_alone(
        server.recogniser, data
    )


def test_a_worker_that_stays_stopped_is_replaced(
    running: tuple[Running, Workers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would get its share of new connections, which nobody answers."""
    address, server = running
    stopped, other = server.processes()
    assert stopped.pid is not None and other.pid is not None
    try:
        os.kill(other.pid, signal.SIGSTOP)
        time.sleep(0.2)
        os.kill(other.pid, signal.SIGCONT)  # for a short time it does no harm
        monkeypatch.setattr("ds2.serve.processes._STUCK_S", 1.0)
        os.kill(stopped.pid, signal.SIGSTOP)
        until(lambda: stopped not in server.processes() and len(server.processes()) == 2)
        until(lambda: all(link.started for link in server._processes))
        data = speech(3, 0.5)

        async def all_at_once() -> list[list[tuple[str, float, float]]]:
            return await asyncio.gather(*(words(address.websocket, data) for _ in range(16)))

        texts = {" ".join(word for word, *_ in one) for one in asyncio.run(all_at_once())}
        assert texts == {text_alone(address.recogniser, data)}
        assert (stopped.exitcode, other in server.processes()) == (-signal.SIGKILL, True)
    finally:
        stopped.kill()


def test_a_stopped_worker_keeps_neither_the_others_nor_its_server(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the others once its connection has ended, which it does not notice; and not a server that ends."""
    recogniser, bound = Recogniser.load(make_model(), device="cpu", decode=DecodeConfig()), bind("127.0.0.1", 0)
    server = Workers(recogniser, Limits(), share(bound), 1)
    (worker,) = workers = server.processes()
    assert worker.pid is not None
    try:
        os.kill(worker.pid, signal.SIGSTOP)
        (link,) = server._processes
        link.end.shutdown(socket.SHUT_RDWR)
        start_s = time.monotonic()
        server._receive_from_workers(True)
        assert (time.monotonic() - start_s < END_S / 2, worker.exitcode) == (True, -signal.SIGKILL)

        (another,) = server.processes()
        assert another.pid is not None
        workers.append(another)
        (link,) = server._processes
        while not link.started:  # before that SIGTERM ends it
            server._receive_from_workers(True)
        os.kill(another.pid, signal.SIGSTOP)
        monkeypatch.setattr("ds2.serve.processes.END_S", 0.5)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        server.end()
        thread.join(WAIT_S)
        assert (thread.is_alive(), another.exitcode) == (False, -signal.SIGKILL)
    finally:
        for process in workers:
            process.kill()
        bound.close()


@pytest.mark.parametrize(
    ("workers", "number"),
    [
        ("1", signal.SIGTERM),
        ("0", signal.SIGHUP),
        ("0", signal.SIGINT),
        pytest.param("0", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("2", signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_a_server_after_all_last_results(
    make_model: Callable[..., Path], workers: str, number: int
) -> None:
    model = str(make_model())
    server = start_server(model, "--workers", workers)
    try:
        port = printed_port(server)
        data, recogniser = speech(3, 1.0), Recogniser.load(model, device="cpu", decode=DecodeConfig())

        async def speak() -> list[tuple[str, int]]:
            held = [await connect(f"ws://127.0.0.1:{port}/") for _ in range(8)]
            texts: list[tuple[str, int]] = []
            for ws in held:
                await ws.send(CONFIG)
                await ws.send(data)
                await ws.recv()
            for ws in held:
                server.send_signal(number)  # again and again, as by someone impatient
                text = json.loads(await ws.recv())["text"]
                with pytest.raises(ConnectionClosed) as closed:
                    await ws.recv()
                texts.append((text, closed.value.rcvd.code if closed.value.rcvd else 0))
            return texts

        assert asyncio.run(speak()) == [(text_alone(recogniser, data), 1012)] * 8
        errors = server.communicate(timeout=WAIT_S)[1]
        assert (server.returncode, "Traceback" in errors) == (0, False), errors
    finally:
        server.kill()


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_signal_while_phrases_are_read_ends_a_server_in_order(make_model: Callable[..., Path], workers: str) -> None:
    model = str(make_model())
    server = start_server(model, "decode=beam", "--workers", workers)
    phrases = [f"{'abc'[n % 3]} {'cab'[n // 3 % 3]} {'abc' * (1 + n % 6)}" for n in range(1000)]
    try:
        url = f"ws://127.0.0.1:{printed_port(server)}/"

        async def speak() -> list[int]:
            held = [await connect(url) for _ in range(3)]
            for ws in held:
                await ws.send(json.dumps({"config": {"sample_rate": 16000, "phrase_list": phrases}}))
                await ws.send(speech(3, 1.0))
            server.terminate()
            codes = []
            for ws in held:
                try:
                    while True:
                        await ws.recv()
                except ConnectionClosed as closed:
                    codes.append(closed.rcvd.code if closed.rcvd else 0)
            return codes

        codes = asyncio.run(speak())
        assert set(codes) <= {1012, 1013}, codes
        assert (server.wait(WAIT_S), "Traceback" in server.communicate()[1]) == (0, False)
    finally:
        server.kill()
