"""`ds2 serve`: live recognition for clients of several protocols."""

import argparse
import functools
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from ds2_ops.install import install_command

from ds2.commands.common import DECODER_SETTINGS, Parser, add_device, add_model, real, whole
from ds2.commands.compose import resolve_options
from ds2.config.allowed import UNLIMITED
from ds2.config.device import resolve_device
from ds2.config.schema import ConfigError, DecodeConfig
from ds2.decoding.phrases import MAX_CHARACTERS, MAX_PHRASE_CHARACTERS, MAX_PHRASES
from ds2.model.checkpoint import find_model, load_model
from ds2.model.shipped import default_model
from ds2.recognition.recogniser import Recogniser
from ds2.recognition.session import describe_delays
from ds2.system.machine import allow_files, reachable_address, usable_cores
from ds2.system.signals import handle_signals, stop_signals
from ds2.system.tensor_file import identity

if TYPE_CHECKING:
    from ds2.serve.tls import Certificate

_OTHER_FILES = 256  # open files besides those of sessions: uploads, refused connections, libraries


def make_parser() -> Parser:
    protocols, roots, limits = _protocols_and_limits()
    parser = Parser(
        prog="ds2 serve",
        settings=DECODER_SETTINGS,
        usage="%(prog)s [MODEL] [decode=NAME] [decode.KEY=VALUE ...] [options]",
        description="a page at / for microphone and files, /v1/audio/transcriptions as OpenAI has it, "
        f"{protocols}/healthz and /metrics, all on one port; with DS2_API_KEY in the environment, "
        "clients must send it as Authorization: Bearer KEY",
        epilog=limits,
    )
    add_model(parser, optional=True)
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 lets other hosts in (default: this one only)")
    parser.add_argument("--port", type=whole(0, 65_535), default=2700, help="0: any free one, which is printed")
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="one more name in clients' URLs, as of a proxy before this server; * allows any (default: the addresses "
        "listened on)",
    )
    parser.add_argument(
        "--allow-origin", action="append", default=[], metavar="ORIGIN",
        help="a site whose pages may use this server, as https://example.com; * allows any (default: its own page)",
    )  # fmt: skip
    parser.add_argument("--root", choices=roots, default="vosk", help="the protocol of WebSockets at / (default: vosk)")
    parser.add_argument("--language", default="en", help="the language of the model, for Home Assistant (default: en)")
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="serve https: a certificate with its chain, PEM")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="the key of that certificate, without a password")
    parser.add_argument(
        "--tls-self-signed", action="store_true",
        help="serve https with a certificate made here, of which browsers warn once; for microphones of other machines",
    )  # fmt: skip
    parser.add_argument(
        "--uploads-mb", type=whole(1, 1 << 30), default=2048,
        help="MiB of all uploads at once; what exceeds them is refused",
    )  # fmt: skip
    parser.add_argument(
        "--sessions", type=whole(1, 1_000_000), default=64,
        help='most sessions open at once; further clients are refused with "try again later"',
    )  # fmt: skip
    parser.add_argument(
        "--duration-s", type=real(0, UNLIMITED, above=True), default=4 * 3600.0,
        help="longest audio of a session, in seconds",
    )  # fmt: skip
    parser.add_argument(
        "--idle-s", type=real(0, 1e9, above=True), default=60.0,
        help="seconds after which a client that sends nothing is dropped",
    )  # fmt: skip
    parser.add_argument(
        "--workers",
        type=whole(0, 1024),
        help="processes that speak with clients, besides the recogniser's; 0: that one does so itself (default: on a "
        "GPU one for every 250 sessions if there are more, else 0)",
    )
    parser.add_argument(
        "--recognisers",
        type=whole(1, 64),
        help="recogniser processes, each with the model, a share of the sessions and its own workers (default: on a "
        "GPU one for every 1,000 sessions if there are more, else 1)",
    )
    parser.add_argument(
        "--batch", type=whole(1, 1 << 20), default=1 << 20,
        help="most sessions in a batch; 1: no batches; by default all that wait",
    )  # fmt: skip
    parser.add_argument(
        "--log-transcripts", action="store_true", help="log what is said; without it no log holds any of it"
    )
    add_device(parser, precision=True)
    return parser


def _protocols_and_limits() -> tuple[str, list[str] | None, str]:
    """For the help: the protocols, those that `--root` may name, and the limits that no option changes.

    A protocol with a version in its path needs no `--root`. Without the extra `serve` the help is shorter.
    """
    try:
        from ds2.serve.http import PROTOCOLS, TCP_PROTOCOLS
        from ds2.serve.limits import Limits
    except ImportError:
        return "", None, ""
    paths = [f"{protocol.summary} at {path}" for path, protocol in PROTOCOLS.items()]
    described = ", ".join([*paths, *(protocol.summary for protocol, _ in TCP_PROTOCOLS.values()), ""])
    limits = (
        f"Fixed: an upload has {Limits.upload_bytes >> 20} MiB at most, a message of a WebSocket "
        f"{Limits.message_bytes >> 20} MiB; hot words or the prompt of a session are at most {MAX_PHRASES} phrases of "
        f"{MAX_PHRASE_CHARACTERS} characters, {MAX_CHARACTERS} characters together."
    )
    return described, [path[1:] for path in PROTOCOLS if not path.startswith("/v1/")], limits


def run(arguments: Sequence[str]) -> None:
    """`ds2 serve [MODEL]`: serve until SIGINT, SIGTERM or SIGHUP. A recogniser that hangs ends it with status 1."""
    args = make_parser().parse_args(arguments)
    try:
        from ds2.serve.engine import LocalRecogniser
        from ds2.serve.http import bind, listen, make_server, share
        from ds2.serve.limits import Limits
        from ds2.serve.processes import Recognisers, Workers
    except ImportError as error:
        raise ConfigError(f"ds2 serve needs {error.name}: {install_command('serve')}") from error
    needed_files = args.sessions + _OTHER_FILES
    if allow_files(needed_files) < needed_files:
        raise ConfigError(
            f"--sessions {args.sessions} needs {needed_files} open files, more than this process may have: "
            "raise the limit with ulimit -n, or allow fewer sessions"
        )
    bound = bind(args.host, args.port)  # before the model is loaded, which takes longer
    device = resolve_device(args.device)
    file = find_model(args.model or default_model())
    read = {file: identity(file)}
    config = load_model(file).config
    delays, decode = describe_delays(config), resolve_options(args.overrides, file, config)
    limits = Limits(
        sessions=args.sessions,
        batch=args.batch,
        duration_s=args.duration_s,
        idle_s=args.idle_s,
        api_key=_api_key(),
        uploads_bytes=args.uploads_mb << 20,
        root=args.root,
        language=args.language,
        host=args.host,
        allow_hosts=tuple(args.allow_host),
        allow_origins=tuple(args.allow_origin),
        tls=_certificate(args),
    )
    read |= {Path(lm): identity(Path(lm)) for lm in (decode.lm, decode.rescore) if lm}
    make = functools.partial(_make_recogniser, file, decode, read, device, args.precision, args.log_transcripts)
    recognisers = args.recognisers or _recogniser_count(args.sessions, device.type)
    workers = _worker_count(args.sessions, device.type) if args.workers is None else args.workers
    port = bound.getsockname()[1]
    message = f"ds2 serve: {_addresses(args, port)} on {device}; at most {limits.sessions} sessions\n{delays}"
    if recognisers > 1 or workers:
        processes: Workers | Recognisers
        if recognisers > 1:
            message += describe_turns(recognisers, device)
            processes = Recognisers(make, limits, share(bound), recognisers, max(1, -(-workers // recognisers)))
        else:
            processes = Workers(make(), limits, share(bound), workers)
        processes.run(message)
        bound.close()
    else:
        recogniser = LocalRecogniser(make(), limits)
        server = make_server(recogniser, limits, port)
        listen(bound)
        with handle_signals(stop_signals(), server.handle_exit):  # uvicorn installs its own later
            print(message, flush=True)  # from here on clients are answered
            server.run(sockets=[bound])
        if recogniser.hangs:
            os._exit(1)  # a thread that hangs in a GPU's driver can keep Python from its end


def _api_key() -> str:
    """The key that clients must send; empty: none."""
    key = os.environ.get("DS2_API_KEY", "")
    if not (key.isascii() and key.isprintable() and key == key.strip()):
        raise ConfigError(
            "DS2_API_KEY has characters that no client can send: give printable ASCII without a space or a newline at "
            "its start or end, or leave it empty"
        )
    return key


def _certificate(args: argparse.Namespace) -> "Certificate | None":
    from ds2.serve import tls

    if args.tls_self_signed and (args.tls_cert or args.tls_key):
        raise ConfigError("--tls-self-signed makes a certificate: leave it out, or --tls-cert and --tls-key")
    if args.tls_self_signed:
        return tls.self_signed(tls.names_of_host(args.host, args.allow_host))
    if not args.tls_cert and not args.tls_key:
        return None
    if not (args.tls_cert and args.tls_key):
        raise ConfigError("--tls-cert and --tls-key go together: give both, or --tls-self-signed")
    certificate = tls.Certificate(args.tls_cert, args.tls_key)
    certificate.check()
    return certificate


def _addresses(args: argparse.Namespace, port: int) -> str:
    """Describe the addresses of the server: on this machine and, if it listens on all, from other machines."""
    from ds2.serve.http import WILDCARDS, url

    scheme = "https" if args.tls_self_signed or args.tls_cert else "http"
    if args.host not in WILDCARDS:
        return url(args.host, port, scheme)
    addresses = url("127.0.0.1", port, scheme)
    if other := reachable_address():
        addresses += f", from other machines {url(other, port, scheme)}"
        if scheme == "http":
            addresses += " (their browsers allow no microphone over http: --tls-self-signed)"
    return addresses


def _make_recogniser(
    file: Path,
    decode: DecodeConfig,
    read: Mapping[Path, tuple[int, ...]],
    device: torch.device,
    precision: str,
    log_transcripts: bool,
) -> Recogniser:
    """Load the model, in the process that uses it; `read` has the identities of all files when the server started.

    Raises:
        ConfigError: a file was replaced since, so that this process would answer otherwise than others of the server.
    """
    from ds2.serve.engine import transcripts

    if log_transcripts:
        transcripts.setLevel(logging.INFO)
    recogniser = Recogniser.of(load_model(file, device), decode, device, precision)
    for path, before in read.items():
        if identity(path) != before:
            raise ConfigError(
                f"{path} was replaced after this server had started, and all its clients get the same model: start the "
                "server again"
            )
    return recogniser


def describe_turns(recognisers: int, device: torch.device) -> str:
    """Say that recognisers use a GPU in turns, unless CUDA's multi-process service lets them use it together."""
    control = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control")  # where drivers look for it
    if device.type != "cuda" or control.exists():
        return ""
    return (
        f"\n{recognisers} recognisers use {device} in turns: answers take less time with CUDA's multi-process service, "
        "see MPS in docs/guide/train.md"
    )


def _recogniser_count(sessions: int, device: str) -> int:
    """Recogniser processes for these sessions, each with cores for itself and its workers."""
    from ds2.serve.processes import RECOGNISER_SESSIONS

    return 1 if device == "cpu" else max(1, min(-(-sessions // RECOGNISER_SESSIONS), usable_cores() // 8))


def _worker_count(sessions: int, device: str) -> int:
    """Workers for these sessions, at most as many as there are cores besides the recogniser's own."""
    from ds2.serve.processes import WORKER_SESSIONS

    if device == "cpu" or sessions <= WORKER_SESSIONS:
        return 0
    return max(0, min(-(-sessions // WORKER_SESSIONS), usable_cores() - 1))
