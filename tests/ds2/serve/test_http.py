"""Who may use a server: pages of its own, under its own names; and requests that two readers would read in two ways."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from support.serving import WAIT_S, Running, connect
from websockets.exceptions import InvalidStatus

from ds2.commands.serve import make_parser
from ds2.serve.http import PROTOCOLS, TCP_PROTOCOLS, Guard
from ds2.serve.limits import Limits
from ds2.serve.protocols import wyoming
from ds2.serve.protocols.websocket import Connection

PATHS = ("/", "/v1/realtime?intent=transcription")
TRANSCRIPTIONS = "/v1/audio/transcriptions"
EVIL = "http://evil.example"


def status(url: str, **headers: str) -> int:
    request = urllib.request.Request(url, headers={name.replace("_", "-"): text for name, text in headers.items()})
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


async def opens(running: Running, path: str, host: str = "127.0.0.1", origin: str | None = None) -> int:
    url = f"ws://{host}:{running.port}{path}"
    try:
        async with connect(url, host="127.0.0.1", port=running.port, origin=origin):
            return 101
    except InvalidStatus as error:
        return error.response.status_code


@pytest.mark.parametrize("path", PATHS)
def test_a_page_of_another_site_opens_no_websocket(shared: Callable[..., Running], path: str) -> None:
    running = shared()
    own = running.web

    async def all_of_them() -> list[int]:
        return [
            await opens(running, path),
            await opens(running, path, origin=own),
            await opens(running, path, origin=EVIL),
            await opens(running, path, origin="null"),
            await opens(running, path, "evil.example", f"http://evil.example:{running.port}"),
        ]

    assert asyncio.run(all_of_them()) == [101, 101, 403, 403, 421]


def test_a_page_of_another_site_reads_nothing(shared: Callable[..., Running]) -> None:
    running = shared()
    for path in ("/", "/healthz", "/metrics", "/v1/audio/transcriptions"):
        assert status(running.web + path, Origin=EVIL) == 403
        assert status(running.web + path, Host="evil.example") == 421
    assert status(running.web + "/healthz", Origin=running.web) == 200
    assert status(f"http://localhost:{running.port}/healthz", Origin=f"http://localhost:{running.port}") == 200
    assert status(running.web + "/healthz", Host="localhost:1") == 200  # a tunnel
    request = urllib.request.Request(running.web + "/healthz", headers={"Origin": EVIL})
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request, timeout=WAIT_S)
    assert "--allow-origin" in json.load(error.value)["error"]["message"]


def test_a_site_that_is_allowed_may_also_read_the_answers(serve: Callable[..., Running]) -> None:
    running = serve(allow_origins=("https://good.example",), allow_hosts=("asr.example",))
    headers = {"Origin": "https://good.example", "Host": "asr.example"}
    with urllib.request.urlopen(urllib.request.Request(running.web + "/healthz", headers=headers)) as answer:
        assert answer.headers["access-control-allow-origin"] == "https://good.example"
    assert asyncio.run(opens(running, "/", "asr.example", "https://good.example")) == 101
    assert status(running.web + "/healthz", Origin=EVIL) == 403


def scope(host: str | None, origin: str | None, local: str) -> dict[str, Any]:
    headers = [(b"host", host.encode())] if host is not None else []
    headers += [(b"origin", origin.encode())] if origin is not None else []
    return {"type": "http", "server": (local, 2700), "headers": headers}


CASES = [  # limits; Host, Origin, local address; whether it is let in
    ({}, "127.0.0.1:2700", None, "127.0.0.1", True),
    ({}, "[::1]:2700", "http://[::1]:2700", "::1", True),
    ({}, "LOCALHOST.:2700", "http://localhost:2700", "127.0.0.1", True),
    ({}, None, None, "127.0.0.1", True),  # HTTP/1.0, which no browser speaks
    ({}, "192.168.1.5:2700", None, "127.0.0.1", False),
    ({}, "rebound.example:2700", None, "127.0.0.1", False),
    ({}, "127.0.0.1.rebound.example", None, "127.0.0.1", False),
    ({}, "127.0.0.1:2700", "http://127.0.0.1:2701", "127.0.0.1", False),
    ({}, "127.0.0.1:2700", "http://127.0.0.1:2700.evil.example", "127.0.0.1", False),
    ({"host": "192.168.1.5"}, "192.168.1.5:2700", None, "192.168.1.5", True),
    ({"host": "192.168.1.5"}, "localhost:2700", None, "192.168.1.5", False),
    ({"host": "asr.lan"}, "asr.lan:2700", "http://asr.lan:2700", "192.168.1.5", True),
    ({"host": "0.0.0.0"}, "10.0.0.7:8080", "http://10.0.0.7:8080", "172.17.0.2", True),  # a container's port
    ({"host": "0.0.0.0"}, f"{socket.gethostname()}:2700", None, "172.17.0.2", True),
    ({"host": "0.0.0.0"}, "rebound.example:2700", None, "172.17.0.2", False),
    ({"host": "::"}, "localhost:2700", None, "::ffff:127.0.0.1", True),
    ({"host": "0.0.0.0"}, "localhost:2700", "http://localhost:2700", "172.17.0.2", True),  # a port of a container
    ({"host": "0.0.0.0"}, "localhost:2700", "http://localhost:80", "172.17.0.2", False),
    ({"allow_hosts": ("asr.example",)}, "asr.example", "https://asr.example", "127.0.0.1", True),  # a proxy with TLS
    ({"allow_hosts": ("asr.example",)}, "asr.example:443", "https://asr.example", "127.0.0.1", True),
    ({"allow_hosts": ("*",)}, "any.example", None, "127.0.0.1", True),
    ({"allow_origins": ("*",)}, "127.0.0.1", EVIL, "127.0.0.1", True),
    ({"allow_origins": ("null",)}, "127.0.0.1", "null", "127.0.0.1", True),
]


@pytest.mark.parametrize(("limits", "host", "origin", "local", "allowed"), CASES)
def test_who_is_let_in(limits: Any, host: str | None, origin: str | None, local: str, allowed: bool) -> None:
    guard = Guard(None, Limits(**limits))  # type: ignore[arg-type]
    assert (guard.refusal(scope(host, origin, local)) is None) == allowed


def test_a_request_with_two_lengths_ends_its_connection(shared: Callable[..., Running]) -> None:
    running = shared()
    smuggled = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    for path in (b"/healthz", b"/v1/audio/transcriptions"):
        head = b"POST " + path + b" HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: multipart/form-data; boundary=x\r\n"
        head += b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        with socket.create_connection(("127.0.0.1", running.port)) as raw:
            raw.settimeout(WAIT_S)
            raw.sendall(head + smuggled)
            answers = b""
            while data := raw.recv(4096):
                answers += data
        assert answers.startswith(b"HTTP/1.1 400 ") and answers.count(b"HTTP/1.1 ") == 1


def test_metrics_ask_for_the_key_where_one_is_set(serve: Callable[..., Running]) -> None:
    running = serve(api_key="secret")
    assert status(running.web + "/metrics") == 401
    assert status(running.web + "/metrics", Authorization="Bearer guess") == 401
    assert status(running.web + "/metrics", Authorization="Bearer secret") == 200
    assert status(running.web + "/healthz") == 200


class Greeting(Connection):
    """A protocol that says hello and ends."""

    summary = "greetings"

    async def handle_messages(self) -> None:
        await self.send({"text": "hello"})


class OtherBytes(wyoming.EventSocket):
    """The bytes of another protocol over TCP."""

    async def close(self) -> None:
        self.writer.write(b"bye\n")
        await super().close()


def test_a_protocol_is_a_row_of_a_table(monkeypatch: pytest.MonkeyPatch, serve: Callable[..., Running]) -> None:
    monkeypatch.setitem(PROTOCOLS, "/greetings", Greeting)
    monkeypatch.setitem(TCP_PROTOCOLS, b"!", (Greeting, OtherBytes))
    assert make_parser().parse_args(["--root", "greetings"]).root == "greetings"
    running = serve(root="greetings")

    async def answer(path: str) -> str:
        async with connect(running.websocket + path) as ws:
            return str(await ws.recv())

    assert json.loads(asyncio.run(answer("greetings"))) == json.loads(asyncio.run(answer(""))) == {"text": "hello"}
    with socket.create_connection(("127.0.0.1", running.port), timeout=WAIT_S) as connection:
        connection.sendall(b"!")
        connection.shutdown(socket.SHUT_WR)
        assert connection.makefile().readlines() == ['{"text": "hello"}\n', "bye\n"]


@pytest.mark.parametrize("method, path, code", [("POST", "/v1/audio/translations", 404), ("GET", TRANSCRIPTIONS, 405)])
def test_what_is_not_served_is_refused_in_json(
    shared: Callable[..., Running], method: str, path: str, code: int
) -> None:
    running = shared()
    request = urllib.request.Request(running.web + path, method=method)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=WAIT_S)
    message = json.load(refused.value)["error"]["message"]
    assert refused.value.code == code and message.startswith(f"{method} {path} is not served") and "/vosk" in message


@pytest.mark.parametrize("request_line", [b"no HTTP", b"\xff\xfe", b"GET / / HTTP/1.1"])
def test_what_is_no_http_is_refused_in_json(shared: Callable[..., Running], request_line: bytes) -> None:
    with socket.create_connection(("127.0.0.1", shared().port), timeout=WAIT_S) as raw:
        raw.sendall(request_line + b"\r\nHost: 127.0.0.1\r\n\r\n")
        answer = raw.makefile("rb").read()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request") and b"connection: close" in head.lower()
    error = json.loads(body)["error"]
    assert (error["type"], error["message"]) == ("invalid_request_error", "Invalid HTTP request received.")


@pytest.mark.parametrize(
    ("path", "origin", "code", "way_out"),
    [("/v2/listen", None, 404, "WebSockets at /v1/realtime"), ("/vosk", EVIL, 403, "--allow-origin ORIGIN")],
)
def test_a_websocket_that_is_refused_gets_the_reason(
    shared: Callable[..., Running],
    path: str,
    origin: str | None,
    code: int,
    way_out: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    running = shared()

    async def refusal() -> Any:
        with pytest.raises(InvalidStatus) as refused:
            async with connect(f"ws://127.0.0.1:{running.port}{path}", origin=origin):
                pass
        return refused.value.response

    response = asyncio.run(refusal())
    assert response.status_code == code and way_out in json.loads(response.body)["error"]["message"]
    assert "without completing handshake" not in caplog.text


HANDSHAKE = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
HANDSHAKE += b"Sec-WebSocket-Key: YWFhYWFhYWFhYWFhYWFhYQ==\r\n"


@pytest.mark.parametrize(
    ("request_line", "headers", "message"),
    [
        (b"POST /vosk", b"Content-Length: 3\r\n", "unsupported request body"),
        (b"GET /v1/listen?keywords=" + b"a" * 9000, b"", "expected no more than 8192 bytes"),
        (b"GET /vosk", b"X: y\r\n" * 200, "expected no more than 128 headers"),
    ],
)
def test_a_handshake_that_cannot_be_read_is_refused(
    shared: Callable[..., Running], request_line: bytes, headers: bytes, message: str
) -> None:
    with socket.create_connection(("127.0.0.1", shared().port), timeout=WAIT_S) as raw:
        raw.sendall(request_line + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n" + HANDSHAKE + headers + b"\r\nabc")
        head, _, body = raw.makefile("rb").read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and message in json.loads(body)["error"]["message"]


@pytest.mark.parametrize("path", [b"/healthz", b"/nothing"])
@pytest.mark.parametrize("first", [b"", b"4\r\nabcd\r\n"])
def test_a_body_that_is_no_http_is_logged_in_a_line(
    shared: Callable[..., Running], path: bytes, first: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the answer, and after it."""
    with socket.create_connection(("127.0.0.1", shared().port), timeout=WAIT_S) as raw:
        raw.sendall(b"POST " + path + b" HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n" + first)
        answer = raw.recv(4096) if first else b""
        raw.sendall(b"no size\r\n")
        answer += raw.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 4") and answer.count(b"HTTP/1.1") == 1
    assert (
        "Traceback" not in caplog.text and "Fatal" not in caplog.text and not [r for r in caplog.records if r.exc_info]
    )


@pytest.mark.parametrize(
    ("headers", "code", "message"),
    [({"Content-Encoding": "gzip"}, 415, "Content-Encoding 'gzip' is not read"), ({}, 400, "which has a filename")],
)
def test_uploads_in_other_forms_are_refused_with_the_reason(
    shared: Callable[..., Running], headers: dict[str, str], code: int, message: str
) -> None:
    body = b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\nabc\r\n--x--\r\n'
    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    request = urllib.request.Request(shared().web + TRANSCRIPTIONS, data=body, headers=kind | headers)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=WAIT_S)
    assert refused.value.code == code and message in json.load(refused.value)["error"]["message"]
