"""Clients that die, fall silent, send rubbish or never read; and a server that ends while they speak."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import numpy as np
import openai
import pytest
import soundfile
import uvicorn
from support.serving import RATE_HZ, WAIT_S, Running, alone, connect, samples_of, speech, text_alone, until
from uvicorn.server import ServerState
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from ds2.recognition.open_segments import Endpoints
from ds2.serve.http import HttpConnection, WebSocketConnection
from ds2.serve.limits import Limits
from ds2.serve.protocols.vosk import Vosk

CONFIG = json.dumps({"config": {"sample_rate": RATE_HZ}})
UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
DIES = """
import sys, os, signal
from websockets.sync.client import connect
ws = connect(sys.argv[1], open_timeout=600)
ws.send(sys.argv[2]); ws.send(bytes(20000)); ws.recv(); ws.send(bytes(20000))
os.kill(os.getpid(), signal.SIGKILL)
"""


def until_empty(running: Running) -> None:
    until(lambda: running.metric("ds2_sessions") == 0)


async def recognise_live(ws: ClientConnection, data: bytes) -> str:
    """The text of all that a client sends, chunk by chunk."""
    await ws.send(CONFIG)
    texts = []
    for start in range(0, len(data), 6400):
        await ws.send(data[start : start + 6400])
        texts.append(json.loads(await ws.recv()).get("text"))
    await ws.send('{"eof" : 1}')
    texts.append(json.loads(await ws.recv())["text"])
    return " ".join(filter(None, texts))


def test_clients_that_misbehave_do_not_disturb_others(serve: Callable[..., Running]) -> None:
    running, data = serve(idle_s=3.0, message_bytes=100_000), speech(5, 1.5)

    async def damaged() -> None:  # a frame that is no frame of the protocol
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(UPGRADE)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(bytes(range(255, 0, -1)))
        await reader.read()
        writer.close()

    async def half_closed() -> None:  # sends, closes its side amid a message
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(UPGRADE)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"\x82\xfe\x40\x00")
        writer.write_eof()
        await reader.read()
        writer.close()

    async def sends(*messages: str | bytes) -> int:
        async with connect(running.websocket) as ws:
            try:
                for message in messages:
                    await ws.send(message)
                while True:
                    await ws.recv()
            except ConnectionClosed as closed:
                return closed.rcvd.code if closed.rcvd else 0

    async def all_of_them() -> tuple[list[int], list[str]]:
        async with connect(running.websocket) as first, connect(running.websocket) as second:
            codes = asyncio.gather(
                sends(bytes(200_000)), sends(CONFIG, "\u0000binary"), sends(CONFIG, speech(1, 0.3)), sends("{")
            )
            good = asyncio.gather(recognise_live(first, data), recognise_live(second, data))
            await asyncio.gather(damaged(), half_closed())
            return await codes, await good

    codes, texts = asyncio.run(all_of_them())
    assert codes == [1009, 1007, 1013, 1007]  # too large, no JSON, silent, no JSON
    assert texts == [text_alone(running.recogniser, data)] * 2
    until_empty(running)


def test_a_client_that_is_killed_leaves_its_place(serve: Callable[..., Running]) -> None:
    running, data = serve(sessions=2), speech(6, 1.0)
    for _ in range(2):
        killed = subprocess.run([sys.executable, "-c", DIES, running.websocket, CONFIG], timeout=WAIT_S, check=False)
        assert killed.returncode == -9
    until_empty(running)

    async def next_one() -> str:
        async with connect(running.websocket) as ws:
            return await recognise_live(ws, data)

    assert asyncio.run(next_one()) == text_alone(running.recogniser, data)


def test_a_client_that_never_reads_is_slowed_down(serve: Callable[..., Running]) -> None:
    running, data = serve(idle_s=10.0), speech(7, 1.0)
    with socket.create_connection(("127.0.0.1", running.port)) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.sendall(UPGRADE)
        assert raw.recv(4096).startswith(b"HTTP/1.1 101")  # what is sent before that is lost
        raw.settimeout(0.5)
        sent, frame = 0, b"\x82\x82\0\0\0\0\0\0" * 500  # messages of a sample, each answered
        deadline_s = time.monotonic() + WAIT_S
        try:
            while time.monotonic() < deadline_s:
                raw.sendall(frame)
                sent += len(frame)
        except (TimeoutError, ConnectionError):
            pass
        assert sent and time.monotonic() < deadline_s  # the server took no more, or ended it

        async def meanwhile() -> str:
            async with connect(running.websocket) as ws:
                return await recognise_live(ws, data)

        assert asyncio.run(meanwhile()) == text_alone(running.recogniser, data)
    until_empty(running)


def closes(running: Running, sent: bytes) -> bytes:
    """What a connection receives before the server ends it."""
    with socket.create_connection(("127.0.0.1", running.port)) as raw:
        raw.sendall(sent)
        raw.settimeout(WAIT_S)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while data := raw.recv(4096):
                received += data
        return received


def test_connections_that_ask_nothing_end(serve: Callable[..., Running]) -> None:
    running = serve(idle_s=1.0)
    upload = b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 999\r\n"
    upload += b"Content-Type: multipart/form-data; boundary=x\r\n\r\n--x\r\n"
    unfinished = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET / HTTP/1.1\r\n"
    with ThreadPoolExecutor(4) as clients:  # at once: each waits for the idle time
        sent = (b"", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n", upload, unfinished)
        nothing, half, late, answered = clients.map(functools.partial(closes, running), sent)
    assert nothing == half == b""
    assert b" 408 " in late and b"nothing of the upload came for 1 s" in late
    assert b" 200 " in answered
    assert json.loads(running.text("/healthz")) == {"status": "ok"}


def test_pings_whose_answers_nobody_takes_are_not_stored(serve: Callable[..., Running]) -> None:
    running = serve(idle_s=60.0)
    with socket.create_connection(("127.0.0.1", running.port)) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.sendall(UPGRADE)
        assert raw.recv(4096).startswith(b"HTTP/1.1 101")  # what is sent before that is lost
        raw.settimeout(1.0)
        sent, ping = 0, (b"\x89\xfd\0\0\0\0" + bytes(125)) * 1000
        with contextlib.suppress(TimeoutError, ConnectionError):
            while sent < 50 << 20:
                raw.sendall(ping)
                sent += len(ping)
        assert 0 < sent < 50 << 20  # the server took no more
    until_empty(running)


def test_many_small_messages_keep_nobody_else_waiting() -> None:
    async def turns_of_others(messages: int) -> int:
        message = {"type": "websocket.receive", "text": "{}"}
        connection = Vosk(Mock(receive=AsyncMock(return_value=message)), Mock(ending=False), Limits())
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        for _ in range(messages):
            assert await connection.receive() == message
        task.cancel()
        return turns

    assert asyncio.run(turns_of_others(100)) >= 100


@pytest.mark.parametrize("kind", [HttpConnection, WebSocketConnection])
def test_little_of_a_client_is_read_at_a_time(
    serve: Callable[..., Running], kind: type[HttpConnection] | type[WebSocketConnection],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of a client that sends pings or chunks of a byte without end, 256 KiB at a time took all others a second each."""
    parse, sizes = Mock(wraps=kind.data_received), list[int]()
    monkeypatch.setattr(kind, "data_received", lambda self, data: sizes.append(len(data)) or parse(self, data))
    part = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    upload = b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n"
    upload += b"Content-Type: multipart/form-data; boundary=x\r\n\r\n%x\r\n%b\r\n" % (len(part), part)
    head, unit = (upload, b"1\r\nx\r\n") if kind is HttpConnection else (UPGRADE, b"\x89\x80" + bytes(4))
    with socket.create_connection(("127.0.0.1", serve().port)) as raw:
        raw.sendall(head)
        if kind is WebSocketConnection:
            assert raw.recv(4096).startswith(b"HTTP/1.1 101")
        raw.sendall(unit * 30_000)
        until(lambda: sum(sizes) >= 1 << 17)
    assert max(sizes) <= 1 << 14


def test_fragments_of_a_message_are_joined(serve: Callable[..., Running]) -> None:
    """Empty ones are in no limit of a message."""
    running = serve()
    with socket.create_connection(("127.0.0.1", running.port), WAIT_S) as raw:
        raw.sendall(UPGRADE)
        assert raw.recv(4096).startswith(b"HTTP/1.1 101")
        raw.sendall(b"\x02\x80" + bytes(4) + 20_000 * (b"\0\x80" + bytes(4)) + b"\x89\x80" + bytes(4))
        assert raw.recv(2) == b"\x8a\0"  # the pong: all of them have been read
        [connection] = [candidate for candidate in gc.get_objects() if type(candidate) is WebSocketConnection]
        assert len(connection.frames) <= 1000
        raw.sendall(b"\x80\x82" + bytes(4) + b"ab")
        assert raw.recv(4096)[2:] == b'{"partial": ""}'


def test_a_lost_connection_is_not_read_on() -> None:
    """That of TLS raises an AttributeError then, which was a traceback in the log for each client that vanished."""

    async def receive() -> Any:
        connection = WebSocketConnection(uvicorn.Config(Mock()), ServerState(), {})
        connection.connections.add(connection)
        connection.transport, connection.read_paused = Mock(), True  # a message waited, and was taken
        connection.connection_lost(None)
        connection.transport.resume_reading.side_effect = AttributeError
        return await connection.receive()

    assert asyncio.run(receive())["type"] == "websocket.disconnect"


def test_a_client_whose_pongs_wait_behind_its_audio_stays(serve: Callable[..., Running]) -> None:
    """As one that sends a file faster than it is decoded: the server reads its audio no faster."""
    running, data = serve(ping_s=0.1), speech(3, 1.0)

    async def speak_without_pongs() -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(UPGRADE)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"\x81" + bytes([0x80 | len(CONFIG)]) + bytes(4) + CONFIG.encode())
        for start in range(0, len(data), 3200):
            piece = data[start : start + 3200]
            writer.write(b"\x82\xfe" + len(piece).to_bytes(2) + bytes(4) + piece)
            await asyncio.sleep(0.1)
        writer.write(b"\x81\x8b" + bytes(4) + b'{"eof" : 1}')
        received = await reader.readuntil(b'"text"')
        writer.write(b"\x88\x80" + bytes(4))  # else the server would wait for this for ten seconds
        received += await reader.read()
        writer.close()
        return received.decode(errors="replace")

    assert f'{{"text": "{text_alone(running.recogniser, data)}"' in asyncio.run(speak_without_pongs())
    until_empty(running)


def test_a_client_that_sends_on_while_it_is_refused_is_read_to_its_close(serve: Callable[..., Running]) -> None:
    """Else the server would wait for its close message for ten seconds."""
    running, audio = serve(), b"\x82\x82" + bytes(6)

    async def send_on() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(UPGRADE)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"\x81\x81" + bytes(4) + b"{" + 3 * audio)
        await reader.readuntil(b"JSON objects")
        for piece in (audio, b"\x88\x80" + bytes(4)):
            await asyncio.sleep(0.3)  # each arrives alone
            writer.write(piece)
        async with asyncio.timeout(5):
            received = await reader.read()
        writer.close()
        return received

    assert asyncio.run(send_on())
    until_empty(running)


def sends(*answers: Callable[[], Any], idle_s: float) -> float:
    """Send answers, each of which a client takes by one of these; return the seconds after which one was not taken."""

    class Client:
        async def send_text(self, message: str) -> None:
            await taking.pop(0)()

    async def send_all() -> float:
        started_s = 0.0
        try:
            for _ in answers:
                started_s = time.monotonic()
                await client.send({})
        except TimeoutError:
            return time.monotonic() - started_s
        raise AssertionError("all was taken")

    taking = list(answers)
    client: Any = Vosk(Client(), None, Limits(idle_s=idle_s))  # type: ignore[arg-type]
    return asyncio.run(send_all())


async def never() -> None:
    await asyncio.sleep(60)


async def never_though_the_server_ends() -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().call_soon(task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await never()
    await never()


def test_a_client_that_takes_no_answer_is_refused_in_time() -> None:
    assert sends(never, idle_s=0.01) < 5
    assert 0.5 <= sends(functools.partial(asyncio.sleep, 0.05), never, idle_s=0.5) < 0.9  # the first one's ends at 0.5
    with pytest.raises(asyncio.CancelledError):
        sends(never_though_the_server_ends, idle_s=0.01)


@pytest.mark.parametrize("method", ["greedy", "beam"])
def test_a_server_that_ends_sends_all_their_last_words(serve: Callable[..., Running], method: str) -> None:
    running = serve(method, sessions=8)
    sources = [speech(seed, 0.7 + 0.1 * seed) for seed in range(6)]
    wanted = [alone(running.recogniser, data).text for data in sources]
    assert any(wanted)
    sent = threading.Barrier(2)

    async def speak(data: bytes, ready: asyncio.Semaphore) -> tuple[str, int]:
        async with connect(running.websocket) as ws:
            await ws.send(CONFIG)
            await ws.send(data)
            texts = [json.loads(await ws.recv()).get("text")]
            ready.release()
            try:
                while True:
                    texts.append(json.loads(await ws.recv()).get("text"))
            except ConnectionClosed as closed:
                return " ".join(filter(None, texts)), closed.rcvd.code if closed.rcvd else 0

    async def speak_all() -> list[tuple[str, int]]:
        ready = asyncio.Semaphore(0)
        speaking = [asyncio.create_task(speak(data, ready)) for data in sources]
        for _ in sources:
            await ready.acquire()
        await asyncio.to_thread(sent.wait)
        return await asyncio.gather(*speaking)

    last_words: list[tuple[str, int]] = []
    client = threading.Thread(target=lambda: last_words.extend(asyncio.run(speak_all())))
    client.start()
    sent.wait(WAIT_S)
    running.end()
    client.join(WAIT_S)
    assert last_words == [(text, 1012) for text in wanted]


def test_a_server_that_ends_decodes_the_open_message_to_its_end(serve: Callable[..., Running]) -> None:
    running, data, rules = serve(), speech(4, 25.0), {"longest_s": 1.0}
    live = running.recogniser.live(endpoints=Endpoints(**rules))
    live.accept_waveform(samples_of(data))
    live.flush()
    assert live.segments[0].end_s < 8 and len(live.segments) > 3

    async def speak() -> tuple[str, int]:
        async with connect(running.websocket) as ws:
            await ws.send(json.dumps({"config": {"sample_rate": RATE_HZ, "endpoints": rules}}))
            await ws.send(data)
            decoded_s = functools.partial(running.metric, "ds2_audio_seconds_total")
            await asyncio.to_thread(until, lambda: decoded_s() > 8)
            running.end()
            texts = [json.loads(await ws.recv()).get("text") for _ in range(2)]
            with pytest.raises(ConnectionClosed) as closed:
                await ws.recv()
            return " ".join(filter(None, texts)), closed.value.rcvd.code if closed.value.rcvd else 0

    wanted = " ".join(segment.hypothesis.text for segment in live.segments)
    assert asyncio.run(speak()) == (wanted, 1012)


def test_a_recogniser_that_fails_is_an_error_and_the_server_goes_on(
    serve: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    running, data = serve(), speech(5, 1.0)

    async def talk() -> str:
        async with connect(running.websocket) as ws:
            return await recognise_live(ws, data)

    def fail(sessions: object, failed: object) -> None:
        raise RuntimeError("CUDA error: secret")

    with monkeypatch.context() as patch:
        patch.setattr("ds2.serve.engine.decode_sessions", fail)
        with pytest.raises(ConnectionClosed) as closed:
            asyncio.run(talk())
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1011
        assert closed.value.rcvd.reason == "this server's recogniser failed: its log says why"
        with pytest.raises(openai.InternalServerError, match="its log says why"):
            running.client().audio.transcriptions.create(model="ds2", file=("a.raw", data))
    until_empty(running)
    assert asyncio.run(talk()) == text_alone(running.recogniser, data)


@pytest.mark.parametrize("form", ["stream=true", "response_format=text"])
def test_an_upload_whose_client_has_gone_is_decoded_no_further(serve: Callable[..., Running], form: str) -> None:
    running, name, value = serve(sessions=1), *form.split("=")
    audio = bytes(2 * RATE_HZ * 3000)
    part = b'--x\r\nContent-Disposition: form-data; name="%s"'
    body = part % name.encode() + b"\r\n\r\n" + value.encode() + b"\r\n"
    body += part % b"file" + b'; filename="a.raw"\r\n\r\n' + audio + b"\r\n--x--\r\n"
    head = b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    head += b"Content-Type: multipart/form-data; boundary=x\r\n"
    with socket.create_connection(("127.0.0.1", running.port)) as client:
        client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        until(lambda: running.metric("ds2_sessions") == 1)
    until_empty(running)
    assert running.metric("ds2_audio_seconds_total") < 3000


@pytest.mark.parametrize("name", ["a.mkv", "a.m4a", "a.ts"])
def test_an_upload_cannot_open_other_files_of_the_server(
    shared: Callable[..., Running], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # uploads are kept there
    soundfile.write(tmp_path / "secret.wav", 0.1 * np.random.default_rng(0).standard_normal(RATE_HZ), RATE_HZ)
    upload = b"ffconcat version 1.0\nfile 'secret.wav'\n"
    with pytest.raises(openai.BadRequestError, match=rf"{name}: not readable as audio") as refused:
        shared().client().audio.transcriptions.create(model="ds2", file=(name, upload))
    assert "secret" not in str(refused.value)


@pytest.mark.slow  # of uvicorn: a connection has 10 s to close
def test_a_client_that_is_half_open_is_cut_off(serve: Callable[..., Running]) -> None:
    """Its machine is gone: it sends no close, answers no ping, and its socket stays open."""
    running = serve(idle_s=2.0)
    with socket.create_connection(("127.0.0.1", running.port)) as raw:
        raw.sendall(UPGRADE)
        assert raw.recv(4096).startswith(b"HTTP/1.1 101")
        raw.sendall(b"\x82\x82\0\0\0\0\0\0")  # a sample, so that it has a session
        raw.settimeout(WAIT_S)
        until(lambda: running.metric("ds2_sessions") == 1)
        with contextlib.suppress(ConnectionResetError):
            while raw.recv(4096):
                continue
    until_empty(running)


@pytest.mark.parametrize("cut", [False, True])
def test_texts_that_are_not_utf_8_are_refused_without_a_traceback(
    shared: Callable[..., Running], caplog: pytest.LogCaptureFixture, cut: bool
) -> None:
    running = shared()

    async def send() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(UPGRADE)
        await reader.readuntil(b"\r\n\r\n")
        frames = [b"\x01\x81\0\0\0\0\xc3", b"\x80\x81\0\0\0\0("] if cut else [b"\x81\x82\0\0\0\0\xff\xfe"]
        writer.write(b"".join(frames))
        answer = await reader.read()
        writer.close()
        return answer

    answer = asyncio.run(send())
    assert answer[:1] == b"\x88" and int.from_bytes(answer[2:4]) == 1007 and answer[4:] == b"text messages are UTF-8"
    until_empty(running)
    assert not [record for record in caplog.records if record.exc_info]
