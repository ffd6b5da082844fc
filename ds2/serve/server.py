"""The routes of a server, and running it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute

from ds2.serve.batcher import Batcher
from ds2.serve.guard import Guard
from ds2.serve.limits import LimitError, Limits
from ds2.serve.page import Page
from ds2.serve.patience import Http, WebSocket
from ds2.serve.realtime import Realtime
from ds2.serve.rest import Transcriptions
from ds2.serve.sockets import Socket
from ds2.serve.vosk import Vosk

_SHUTDOWN_S = 30  # for requests that are being answered


def application(batcher: Batcher, limits: Limits) -> Starlette:
    """An ASGI application of all protocols."""

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def metrics(request: Request) -> Response:
        try:
            limits.check_key(request)
        except LimitError as error:
            return PlainTextResponse(str(error) + "\n", error.status)
        return Response(await batcher.counted(), media_type=CONTENT_TYPE_LATEST)

    rest = Transcriptions(batcher, limits)
    realtime, vosk = (Socket(protocol, batcher, limits) for protocol in (Realtime, Vosk))
    page = Page()

    async def end() -> None:
        batcher.end()
        await asyncio.gather(realtime.end(), vosk.end())

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await batcher.begin()
        yield
        batcher.close()

    routes = [
        Route("/", page.__call__),
        Route("/healthz", health),
        Route("/metrics", metrics),
        Route("/v1/audio/transcriptions", rest.__call__, methods=["POST"]),
        WebSocketRoute("/v1/realtime", realtime.__call__),
        WebSocketRoute("/", vosk.__call__),
    ]
    guards = [Middleware(Guard, limits=limits)]
    if limits.allow_origins:  # their pages may also read the answers
        methods, headers = ["GET", "POST"], ["*"]
        guards.append(
            Middleware(CORSMiddleware, allow_origins=limits.allow_origins, allow_methods=methods, allow_headers=headers)
        )
    app = Starlette(routes=routes, lifespan=lifespan, middleware=guards)
    app.state.end, app.state.idle_s = end, limits.idle_s
    return app


class Server(uvicorn.Server):
    """A server whose WebSocket sessions are told their last words before it ends."""

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, in a process that is calm: see `calm`."""
        with calm():
            await super().serve(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, once all sessions are finished."""
        app: Any = self.config.app
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(app.state.end(), _SHUTDOWN_S)
        await super().shutdown(sockets)


@contextlib.contextmanager
def calm() -> Iterator[None]:
    """Keep garbage collections short and memory flat.

    Of libraries that are loaded hundreds of thousands of objects stay for ever. A full collection that looks at them
    takes 0.1 s, in which nobody is answered, and Python puts it off until a quarter as many are new: meanwhile
    thousands of connections that have ended stay in memory.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # Python counts here what a quarter is of
    try:
        yield
    finally:
        gc.unfreeze()


def make_server(batcher: Batcher, limits: Limits, port: int) -> Server:
    """A server that `run` starts, and SIGINT and SIGTERM end after sessions and requests in progress were answered."""
    config = uvicorn.Config(
        application(batcher, limits),
        limits.host,
        port,
        http=Http,
        ws=WebSocket,
        ws_max_size=limits.message_bytes,
        ws_per_message_deflate=False,  # audio hardly shrinks; what it takes is 0.3 MiB a connection
        timeout_graceful_shutdown=_SHUTDOWN_S,
        log_level="warning",
    )
    return Server(config)
