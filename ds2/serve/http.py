"""The HTTP server: its address, routes, page and access rules, and timeouts of connections."""

import asyncio
import base64
import contextlib
import errno
import functools
import hashlib
import ipaddress
import logging
import os
import re
import socket
from collections.abc import AsyncIterator, Mapping
from importlib.resources import files
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import h11
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from ds2.config.schema import ConfigError
from ds2.serve.client import EngineClient, RemoteRecogniser
from ds2.serve.limits import BAD_DATA, Limits, StatusError
from ds2.serve.phrases import PhraseReader
from ds2.serve.protocols import wyoming
from ds2.serve.protocols.deepgram import Deepgram
from ds2.serve.protocols.openai_realtime import Realtime
from ds2.serve.protocols.openai_rest import Transcriptions, error_response
from ds2.serve.protocols.sherpa_onnx import SherpaOnnx
from ds2.serve.protocols.vosk import Vosk
from ds2.serve.protocols.websocket import Connection, ProtocolRoute
from ds2.system.machine import short_collections
from ds2.text.alphabet import Alphabet

log = logging.getLogger(__name__)
PROTOCOLS: dict[str, type[Connection]] = {  # WebSockets by their path
    "/v1/realtime": Realtime,
    "/v1/listen": Deepgram,
    "/vosk": Vosk,
    "/sherpa-onnx": SherpaOnnx,
}
# By the first byte of a connection: the protocol, and the class that makes WebSocket messages of the bytes.
TCP_PROTOCOLS: dict[bytes, tuple[type[Connection], type[wyoming.EventSocket]]] = {
    wyoming.FIRST_BYTE: (wyoming.Wyoming, wyoming.EventSocket),
}
_SHUTDOWN_S = 30  # for requests that are being answered
_MAX_FRAGMENTS = 1000  # of a WebSocket's message, before they are joined: each is an object, and may be empty
WILDCARDS = ("", "0.0.0.0", "::")  # hosts that stand for all addresses
_PORTS = {"http": 80, "https": 443}


def application(engine: EngineClient, limits: Limits) -> Starlette:
    """An ASGI application with the routes of all protocols."""

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def metrics(request: Request) -> Response:
        try:
            limits.check_key(request)
        except StatusError as error:
            return PlainTextResponse(str(error) + "\n", error.status)
        return Response(await engine.metrics(), media_type=CONTENT_TYPE_LATEST)

    rest = Transcriptions(engine, limits)
    protocols = PROTOCOLS | {"/": PROTOCOLS[f"/{limits.root}"]}
    websockets = {path: ProtocolRoute(protocol, engine, limits) for path, protocol in protocols.items()}
    tcp = {first: (ProtocolRoute(protocol, engine, limits), kind) for first, (protocol, kind) in TCP_PROTOCOLS.items()}
    routes: list[BaseRoute] = [
        Route("/", page()),
        Route("/healthz", health),
        Route("/metrics", metrics),
        Route("/v1/audio/transcriptions", rest.__call__, methods=["POST"]),
        Route("/v1/models", rest.models),
        Route("/v1/models/{name:path}", rest.models),
        *(WebSocketRoute(path, route.__call__) for path, route in websockets.items()),
    ]

    served = "POST /v1/audio/transcriptions, GET /v1/models, /healthz, /metrics, / and WebSockets at "
    served += ", ".join(protocols)

    def unserved(status: int, scope: Scope, headers: Mapping[str, str] | None = None) -> JSONResponse:
        place = f"{scope.get('method', 'a WebSocket at')} {scope['path'][:100]}"
        return error_response(status, f"{place} is not served: {served} are", headers)

    async def wrong_method(request: Request, error: Any) -> JSONResponse:
        return unserved(405, request.scope, error.headers)

    async def wrong_path(scope: Scope, receive: Receive, send: Send) -> None:
        """Starlette's own answer to a WebSocket is 403, as of a wrong key."""
        await unserved(404, scope)(scope, receive, send)

    async def end() -> None:
        engine.end()
        await asyncio.gather(*(route.end() for route in [*websockets.values(), *(route for route, _ in tcp.values())]))

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await engine.start()
        yield
        engine.close()

    middleware = [Middleware(Guard, limits=limits)]
    if limits.allow_origins:  # their pages may also read the answers
        methods, headers, origins = ["GET", "POST"], ["*"], limits.allow_origins
        middleware.append(
            Middleware(CORSMiddleware, allow_origins=origins, allow_methods=methods, allow_headers=headers)
        )
    app = Starlette(routes=routes, lifespan=lifespan, middleware=middleware, exception_handlers={405: wrong_method})
    app.router.default = wrong_path
    app.state.end, app.state.idle_s, app.state.tcp = end, limits.idle_s, tcp
    return app


def page() -> Any:
    """Return the route of the page, one file with a microphone, uploads and words, which loads nothing from elsewhere.

    Its content security policy allows its own script and connections to its own server only.
    """
    html = files("ds2.serve").joinpath("page.html").read_text(encoding="utf-8")
    policy = (
        "default-src 'none'",
        f"script-src {_hashes(html, 'script')} blob:",  # blob: the audio worklet that cuts the microphone's sound
        f"style-src {_hashes(html, 'style')}",
        "connect-src 'self'",
        "img-src data:",
        "media-src blob:",  # a file that was chosen is played
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    headers = {
        "content-security-policy": "; ".join(policy),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "permissions-policy": "microphone=(self)",
        "cache-control": "no-cache",
    }

    async def answer(request: Request) -> HTMLResponse:
        return HTMLResponse(html, headers=headers)

    return answer


def _hashes(html: str, tag: str) -> str:
    texts = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


class Guard:
    """ASGI middleware that refuses web pages of other sites, unknown names of this server, and ambiguous lengths.

    A web page may open WebSockets to any address and send forms to it, and a name that its owner points to 127.0.0.1
    (DNS rebinding) makes this server part of the page's own site. So `Origin`, which browsers send, must be this
    server, and `Host` must be an address that the server listens on: the one that the connection came to; `localhost`
    if that is a loopback address; the name in `limits.host`; and, if the server listens on all addresses, any IP
    address and `localhost`, which cannot be rebound (a container's port is `localhost` to its host), and this machine's
    name. Of the limits `host`, `allow_hosts` and `allow_origins` are used; "*" among these allows all.
    """

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self.app = app
        self._logged: set[int] = set()
        self.listens_on_all = limits.host in WILDCARDS
        names = [
            *limits.allow_hosts,
            limits.host,
            *(["localhost", socket.gethostname()] if self.listens_on_all else []),
        ]
        self.names = {_host_and_port(name)[0] for name in names if name}
        self.origins = {origin.lower().rstrip("/") for origin in limits.allow_origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or (refusal := self.refusal(scope)) is None:
            await self.app(scope, receive, send)
            return
        status, message = refusal
        if status not in self._logged:
            self._logged.add(status)
            log.warning("a request was refused: %s (logged once)", message)
        await error_response(status, message, {"connection": "close"})(scope, receive, send)

    def refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Return status and reason of a refusal, or None."""
        headers = Headers(scope=scope)
        if "content-length" in headers and "transfer-encoding" in headers:  # a proxy may believe the other one
            return 400, "Content-Length together with Transfer-Encoding: send one of them"
        host = headers.get("host")
        if host is not None and not self._allows_host(host, (scope.get("server") or ("",))[0]):
            return 421, f"Host {host[:100]!r} is not an address of this server: ds2 serve --allow-host NAME allows it"
        origins = headers.getlist("origin")
        if not all(self._allows_origin(origin, host or "") for origin in origins):
            site = origins[0][:100]
            return 403, f"pages of {site!r} may not use this server: ds2 serve --allow-origin ORIGIN allows it"
        return None

    def _allows_host(self, host: str, local: str) -> bool:
        name, _ = _host_and_port(host)
        if name in self.names or name == local or "*" in self.names:
            return True
        address, local_address = _ip_address(name), _ip_address(local)
        if self.listens_on_all and address is not None:
            return True
        is_loopback = local_address is not None and local_address.is_loopback
        return is_loopback and (name == "localhost" or (address is not None and address.is_loopback))

    def _allows_origin(self, origin: str, host: str) -> bool:
        if "*" in self.origins or origin.lower() in self.origins:
            return True
        try:
            parts = urlsplit(origin)
        except ValueError:
            return False
        port = _PORTS.get(parts.scheme)
        return port is not None and _host_and_port(parts.netloc, port) == _host_and_port(host, port)


def _host_and_port(text: str, default_port: int = 0) -> tuple[str, str]:
    """Split `name`, `name:port`, `[address]` or `[address]:port`."""
    name, colon, port = text.lower().rpartition(":")
    if not colon or "]" in port or (":" in name and not name.startswith("[")):
        name, port = text.lower(), ""
    return name.strip("[]").rstrip("."), port or str(default_port)


def _ip_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


class Server(uvicorn.Server):
    """A server whose WebSocket sessions get their last results before it ends."""

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        with short_collections():
            await super().serve(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """All sessions are finished first."""
        app: Any = self.config.app
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(app.state.end(), _SHUTDOWN_S)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End in order also at a second Ctrl-C, at which uvicorn cancels what runs: tracebacks, and threads abort."""
        self.should_exit = True

    def give_up(self) -> None:
        """Stop listening at once, then end: the engine no longer answers.

        Uvicorn alone would listen for up to 0.1 s more, and clients that connect again would get another error.
        """
        for listening in self.servers:
            listening.close()
        self.should_exit = True


def make_server(engine: EngineClient, limits: Limits, port: int) -> Server:
    """Make a server; `run` starts it, and SIGINT or SIGTERM end it after all sessions and requests are answered."""
    config = uvicorn.Config(
        application(engine, limits),
        limits.host,
        port,
        http=HttpConnection,
        ws=WebSocketConnection,
        ws_max_size=limits.message_bytes,
        ws_ping_timeout=None,  # a pong waits behind audio that is not decoded yet; silent clients end after `idle_s`
        ws_per_message_deflate=False,  # audio hardly shrinks, and a compressor takes 0.3 MiB a connection
        timeout_graceful_shutdown=_SHUTDOWN_S,
        log_level="warning",
        ssl_certfile=limits.tls.certificate if limits.tls else None,
        ssl_keyfile=limits.tls.key if limits.tls else None,
    )
    server = Server(config)
    engine.lost = server.give_up
    return server


class _ShortReads(asyncio.BufferedProtocol):
    """Takes 16 KiB of a client at a time: parsers need up to 7 us a byte, in which no other client is answered.

    Transports read 256 KiB for other protocols.
    """

    _buffer = memoryview(bytearray(1 << 14))  # of all connections: what was read is copied before the next read

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._buffer[:nbytes]))

    def data_received(self, data: bytes) -> None:
        raise NotImplementedError


class HttpConnection(H11Protocol, _ShortReads):
    """A connection that ends if it does nothing between two checks, `app.state.idle_s` seconds apart.

    Uvicorn waits for ever for the first request, for the rest of its headers, and for a client that does not read.
    A first byte of `TCP_PROTOCOLS` makes it a connection of that protocol.
    """

    _is_first = True  # whether no byte has come yet
    _timer: asyncio.TimerHandle | None = None
    _last: Any = None  # at the last check: the request that was answered, and whether the client took nothing

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        protocol = self.config.app.state.tcp.get(data[:1]) if self._is_first else None  # type: ignore[union-attr]
        self._is_first = False
        if protocol is None:
            super().data_received(data)
            return
        self.connections.discard(self)
        route, kind = protocol
        reader = asyncio.StreamReader(loop=self.loop)
        serve = functools.partial(_serve_tcp, route, kind, self.config.ws_max_size)
        streams = asyncio.StreamReaderProtocol(reader, serve, loop=self.loop)
        self.transport.set_protocol(streams)
        streams.connection_made(self.transport)
        streams.data_received(data)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP in JSON, as other refusals are; uvicorn's own answer is plain text.

        It is the last answer of the connection: that of a request whose body is no HTTP is not sent, and where that was
        sent or begun, this one is not.
        """
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        refusal = error_response(400, msg, {"connection": "close"})
        response = h11.Response(status_code=400, headers=refusal.raw_headers, reason=b"Bad Request")
        for event in (response, h11.Data(data=bytes(refusal.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _start_timer(self) -> None:
        if self in self.connections:  # else it has become a WebSocket
            self._timer = self.loop.call_later(self.config.app.state.idle_s, self._check)  # type: ignore[union-attr]

    def _check(self) -> None:
        is_answered = self.cycle is not None and not self.cycle.response_complete
        now = self.cycle, self.flow.write_paused
        is_stuck = self.flow.write_paused if is_answered else True
        if self in self.connections and is_stuck and (self.cycle is None or now == self._last):
            self.transport.abort()
            return
        self._last = now
        self._start_timer()


async def _serve_tcp(
    route: ProtocolRoute,
    kind: type[wyoming.EventSocket],
    max_bytes: int,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    socket = kind(reader, writer, max_bytes)
    try:
        await route(socket.websocket)
    finally:
        await socket.close()


class WebSocketConnection(WebSocketsSansIOProtocol, _ShortReads):
    """A connection that is not read while its client takes no answers, and that is cut if it does not close.

    Uvicorn answers pings of a client that reads no answers, in memory without bound.
    """

    _timer: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.read_paused:
            self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        """See uvicorn, which never answers a handshake that cannot be read: a POST, a body, a line of 8 KiB."""
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.close_sent:
            self.close_sent = True
            reason = self.conn.handshake_exc.__cause__ or self.conn.handshake_exc
            refusal = error_response(400, f"this is no WebSocket handshake: {reason}", {"connection": "close"})
            headers = b"".join(name + b": " + value + b"\r\n" for name, value in refusal.raw_headers)
            self.transport.write(b"HTTP/1.1 400 Bad Request\r\n" + headers + b"\r\n" + bytes(refusal.body))
            self.transport.close()

    def handle_cont(self, event: Frame) -> None:
        """See uvicorn, which lists all fragments of a message."""
        if len(self.frames) >= _MAX_FRAGMENTS:
            self.frames = [b"".join(self.frames)]
        super().handle_cont(event)

    def send_receive_event_to_app(self) -> None:
        """See uvicorn, which logs a traceback for each text that is not UTF-8."""
        if self.curr_msg_data_type == "text" and not self.close_sent:
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:
                self.frames = []
                self.conn.send_close(BAD_DATA, "text messages are UTF-8")
                self.handle_parser_exception()
                return
        super().send_receive_event_to_app()

    async def receive(self) -> Any:
        message = await super().receive()
        if not self.writable.is_set():
            self.transport.pause_reading()
        return message

    async def send(self, message: Any) -> None:
        """See uvicorn, which logs an error for each handshake that is answered with a status."""
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            self.handshake_complete = True

    async def run_asgi(self) -> None:
        try:
            await super().run_asgi()
        finally:
            if not self.disconnected:
                self._timer = self.loop.call_later(self.close_timeout, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.read_paused = False  # or `receive` would resume reading, which a closed TLS transport refuses
        if self._timer is not None:
            self._timer.cancel()


def bind(host: str, port: int) -> socket.socket:
    """Bind an address that no other process can bind or share while the socket is open; it does not listen yet.

    Args:
        host: name or address of this machine.
        port: 0 for any free one.

    Raises:
        ConfigError: another program listens there, the system forbids it, or the host is not this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier server may linger
            bound.bind(address)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        except OSError:
            bound.close()
            raise
    except (OSError, UnicodeError) as error:
        hints = {errno.EADDRINUSE: "give another --port", errno.EACCES: "ports below 1024 are the administrator's"}
        hint = hints.get(getattr(error, "errno", None) or 0, "--host is an address of this machine, or 0.0.0.0 for all")
        raise ConfigError(
            f"cannot listen on {host}:{port} ({getattr(error, 'strerror', '') or error}): {hint}"
        ) from error
    return bound


def listen(bound: socket.socket) -> None:
    """Listen on a bound address; connections that linger later do not keep the next server from it."""
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.listen()


def share(bound: socket.socket) -> tuple[str, int]:
    """Let `listen_shared` use a bound address, in any process of this user; return the address."""
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    host, port = bound.getsockname()[:2]
    return host, port


def listen_shared(host: str, port: int) -> socket.socket:
    """Listen on a shared address; the system spreads new connections over all sockets that do."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listening.bind((host, port))
    listening.listen()
    return listening


def url(host: str, port: int, scheme: str = "http") -> str:
    """Return the address as a URL; an IPv6 address stands in brackets."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def run_worker(
    address: tuple[str, int],
    alphabet: Alphabet,
    hot_characters: frozenset[str],
    sample_rate_hz: int,
    limits: Limits,
    end: socket.socket,
) -> None:
    """Serve on an address that others share, until SIGTERM or until the engine's process has ended.

    Args:
        address: which is shared (`share`).
        alphabet, hot_characters, sample_rate_hz: of the recogniser.
        end: of a socket pair, whose other end the engine's process has.
    """
    os.setpgrp()  # the first process handles Ctrl-C and ends the others in order
    engine = RemoteRecogniser(end, PhraseReader(alphabet, hot_characters), sample_rate_hz)
    server = make_server(engine, limits, address[1])
    server.run(sockets=[listen_shared(*address)])
