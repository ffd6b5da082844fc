"""Servers that end with their test, and one that the tests of a file share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.serving import WAIT_S, Running, until
from support.tiny import compose_once, tiny_overrides_in, write_untrained

from ds2.config.schema import DecodeConfig
from ds2.model.checkpoint import load_model
from ds2.recognition.recogniser import Recogniser
from ds2.serve.engine import LocalRecogniser
from ds2.serve.http import make_server
from ds2.serve.limits import Limits


@contextmanager
def _running(
    model: Path,
    decode: DecodeConfig,
    kind: type[Recogniser] = Recogniser,
    port: int = 0,
    ping_s: float | None = None,
    **limits: Any,
) -> Iterator[Running]:
    recogniser = kind.of(load_model(model), decode, torch.device("cpu"))
    server = make_server(LocalRecogniser(recogniser, Limits(**limits)), Limits(**limits), port)
    if ping_s is not None:  # as often, and as long waited for, where a client has so long at all
        server.config.ws_ping_interval = ping_s
        server.config.ws_ping_timeout = server.config.ws_ping_timeout and ping_s
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield Running(recogniser, port, lambda: setattr(server, "should_exit", True))
    server.should_exit = True
    thread.join(WAIT_S)
    assert not thread.is_alive()


@pytest.fixture
def serve(make_model: Callable[..., Path]) -> Iterator[Callable[..., Running]]:
    """Start servers of the tiny model with given limits; each ends with the test."""
    with ExitStack() as servers:

        def start(
            method: str = "greedy", decode: DecodeConfig | None = None, model: Sequence[str] = (), **options: Any
        ) -> Running:
            decode = decode or DecodeConfig(method=method, beam=8)
            return servers.enter_context(_running(make_model(*model), decode, **options))

        yield start


@pytest.fixture(scope="module")
def shared(tone_manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Running]]:
    """Return a server with the usual limits that has no session; it ends with the file, as its start takes a while."""
    folder, started = tmp_path_factory.mktemp("shared"), dict[str, Running]()
    model = write_untrained(compose_once(*tiny_overrides_in(folder, tone_manifest)), folder / "model.safetensors")
    with ExitStack() as servers:

        def find(method: str = "greedy", decode: DecodeConfig | None = None) -> Running:
            decode = decode or DecodeConfig(method=method, beam=8)
            if str(decode) not in started:
                started[str(decode)] = servers.enter_context(_running(model, decode))
            running = started[str(decode)]
            until(lambda: running.metric("ds2_sessions") == 0)
            return running

        yield find
