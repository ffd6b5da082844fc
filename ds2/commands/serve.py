"""`ds2 serve`: live recognition for clients of OpenAI's REST and realtime interfaces and of Vosk's WebSocket."""

from __future__ import annotations

import argparse
import functools
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from ds2.commands.common import Parser, add_where, real, whole
from ds2.commands.decode_options import resolve_options, split_overrides
from ds2.config.allowed import UNLIMITED
from ds2.config.device import resolve_device
from ds2.config.schema import ConfigError
from ds2.model.checkpoint import find_model, load_model
from ds2.recognition.recogniser import Recogniser
from ds2.system.machine import allow_files, usable_cores
from ds2.system.signals import STOP_SIGNALS, handle_signals

_OTHER_FILES = 256  # that are open beside those of sessions: uploads, refused connections, libraries


def run(arguments: Sequence[str]) -> int:
    """`ds2 serve MODEL`: serve until SIGINT or SIGTERM; 0."""
    decode, arguments = split_overrides(arguments)
    given = _parse(arguments)
    try:
        from ds2.serve.address import keep, open_up, share, url
        from ds2.serve.batcher import Here
        from ds2.serve.limits import Limits
        from ds2.serve.recognisers import Recognisers
        from ds2.serve.server import make_server
        from ds2.serve.workers import Workers
    except ImportError as error:
        raise ConfigError(f"ds2 serve needs {error.name}: pip install 'ds2-speech[serve]'") from error
    if allow_files(given.sessions + _OTHER_FILES) < given.sessions + _OTHER_FILES:
        raise ConfigError(f"--sessions {given.sessions} need more open files than this process may have: ulimit -n")
    kept = keep(given.host, given.port)  # before the model is loaded, which takes longer
    device = resolve_device(given.device)
    file = find_model(given.model)
    limits = Limits(
        sessions=given.sessions,
        batch=given.batch,
        duration_s=given.duration_s,
        idle_s=given.idle_s,
        api_key=os.environ.get("DS2_API_KEY", ""),
        uploads_bytes=given.uploads_mb << 20,
        host=given.host,
        allow_hosts=tuple(given.allow_host),
        allow_origins=tuple(given.allow_origin),
    )
    make = functools.partial(_recogniser, file, decode, device, given.precision, given.log_transcripts)
    recognisers = _recognisers(given.sessions, device.type) if given.recognisers is None else given.recognisers
    workers = _workers(given.sessions, device.type) if given.workers is None else given.workers
    port = kept.getsockname()[1]
    said = f"ds2 serve: {url(given.host, port)} on {device}; at most {limits.sessions} sessions"
    if workers or recognisers > 1:
        several: Workers | Recognisers
        if recognisers > 1:
            several = Recognisers(make, limits, share(kept), recognisers, max(1, -(-workers // recognisers)))
        else:
            several = Workers(make(), limits, share(kept), workers)
        print(said, flush=True)
        several.run()
        kept.close()
    else:
        server = make_server(Here(make(), limits), limits, port)
        open_up(kept)
        with handle_signals(STOP_SIGNALS, server.handle_exit):  # uvicorn installs its own later
            print(said, flush=True)  # whoever reads it is answered
            server.run(sockets=[kept])
    return 0


def _recogniser(file: Path, decode: Sequence[str], device: torch.device, precision: str, tells: bool) -> Recogniser:
    """The one that hears, in the process that hears."""
    from ds2.serve.dispatch import transcripts

    if tells:
        transcripts.setLevel(logging.INFO)
    loaded = load_model(file, device)
    return Recogniser.of(loaded, resolve_options(decode, file, loaded.config), device, precision)


def _recognisers(sessions: int, device: str) -> int:
    """As many as sessions need, each with cores for itself and its workers."""
    from ds2.serve.recognisers import SESSIONS

    return 1 if device == "cpu" else max(1, min(-(-sessions // SESSIONS), usable_cores() // 8))


def _workers(sessions: int, device: str) -> int:
    """As many as sessions need, of the processors that there are beside the recogniser's own."""
    from ds2.serve.workers import SESSIONS

    return 0 if device == "cpu" or sessions <= SESSIONS else max(0, min(-(-sessions // SESSIONS), usable_cores() - 1))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="ds2 serve",
        usage="%(prog)s MODEL [decode=NAME] [decode.KEY=VALUE ...] [options]",
        description="a page at / for microphone and files, /v1/audio/transcriptions and /v1/realtime (transcription) "
        "as OpenAI has them, Vosk's WebSocket at /, /healthz and /metrics; with DS2_API_KEY in the environment, "
        "clients must send it as Authorization: Bearer KEY",
    )
    parser.add_argument("model", type=Path, help="model file or run folder, of a unidirectional model")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 lets other hosts in (default: this one only)")
    parser.add_argument("--port", type=whole(0, 65_535), default=2700, help="0: any that is free, which is told")
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="one more name in clients' URLs, as of a proxy before this server; * allows any (default: the addresses "
        "listened on)",
    )
    parser.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="a site whose pages may use this server, as https://example.com; * allows any (default: its own page)",
    )
    parser.add_argument(
        "--uploads-mb", type=whole(1, 1 << 30), default=2048, help="MiB of all uploads at once; more are refused"
    )
    parser.add_argument(
        "--sessions", type=whole(1, 1_000_000), default=64, help="heard at once; more are told to come back"
    )
    parser.add_argument(
        "--duration-s", type=real(0, UNLIMITED, above=True), default=4 * 3600.0, help="audio of a session at most"
    )
    parser.add_argument(
        "--idle-s", type=real(0, 1e9, above=True), default=60.0, help="silence of a client after which it is dropped"
    )
    parser.add_argument(
        "--workers",
        type=whole(0, 1024),
        help="processes that speak with clients beside the one that hears; 0: it does so itself (default: on a GPU one "
        "for every 250 sessions if there are more, else 0)",
    )
    parser.add_argument(
        "--recognisers",
        type=whole(1, 64),
        help="processes that hear, each with the model, its share of the sessions and workers of its own (default: on "
        "a GPU one for every 1,000 sessions if there are more, else 1)",
    )
    parser.add_argument(
        "--batch", type=whole(1, 1 << 20), default=1 << 20, help="sessions heard together at most; 1: one at a time"
    )
    parser.add_argument("--log-transcripts", action="store_true", help="log what is said; else no log holds any of it")
    add_where(parser)
    return parser.parse_args(arguments)
