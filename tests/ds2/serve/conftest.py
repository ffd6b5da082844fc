"""Servers that end with their test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.serving import WAIT_S, Running

from ds2.config.schema import DecodeConfig
from ds2.model.checkpoint import load_model
from ds2.recognition.recogniser import Recogniser
from ds2.serve.engine import LocalRecogniser
from ds2.serve.http import make_server
from ds2.serve.limits import Limits


@pytest.fixture
def serve(make_model: Callable[..., Path]) -> Iterator[Callable[..., Running]]:
    """Start servers of the tiny model with given limits; each ends with the test."""
    started: list[tuple[Any, threading.Thread]] = []

    def start(
        method: str = "greedy",
        decode: DecodeConfig | None = None,
        kind: type[Recogniser] = Recogniser,
        model: Sequence[str] = (),
        port: int = 0,
        **limits: Any,
    ) -> Running:
        options = decode or DecodeConfig(method=method, beam=8)
        recogniser = kind.of(load_model(make_model(*model)), options, torch.device("cpu"))
        server = make_server(LocalRecogniser(recogniser, Limits(**limits)), Limits(**limits), port)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        started.append((server, thread))
        port = server.servers[0].sockets[0].getsockname()[1]
        return Running(recogniser, port, lambda: setattr(server, "should_exit", True))

    yield start
    for server, thread in started:
        server.should_exit = True
        thread.join(WAIT_S)
        assert not thread.is_alive()
