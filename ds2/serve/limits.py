"""The limits of a server, who may use it, and the errors for both."""

import difflib
import hmac
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import unquote

from starlette.requests import HTTPConnection

from ds2.audio.read import RATES_HZ
from ds2.config.allowed import Range
from ds2.serve.tls import Certificate
from ds2.system import UserError
from ds2.system.plain import short_repr

TRY_LATER, BAD_DATA, RESTART, BROKEN = 1013, 1007, 1012, 1011  # close codes of a WebSocket

_MISSPELT = 0.8  # how alike two names are, as difflib counts
_MAX_NAMES = 100  # of settings in a message: to compare more would hold up other clients
KEY_PROTOCOL = "openai-insecure-api-key."  # before the key, among a WebSocket's subprotocols, as OpenAI has it


class StatusError(UserError):
    """An error that ends a request or a session; `status` is HTTP's, `code` the WebSocket's."""

    def __init__(self, message: str, status: int = 400, code: int = BAD_DATA) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class BadRequestError(StatusError):
    """A client sent what its protocol or this server does not take; the message says what is taken."""


class SessionOverError(StatusError):
    """A session has lasted as long as it may; its client gets the last result first."""


class FullError(StatusError):
    """The server takes no more at present; the client may try again later."""

    def __init__(self, message: str) -> None:
        super().__init__(message, 429, TRY_LATER)


class BrokenError(StatusError):
    """The recogniser failed, not by a fault of the client; the server's log has the traceback."""

    def __init__(self, message: str = "this server's recogniser failed: its log says why") -> None:
        super().__init__(message, 500, BROKEN)


def check_number(value: object, field: str, allowed: Range) -> float:
    """Return a number that a client sent; all protocols check numbers with this.

    Args:
        value: as JSON gives it.
        field: as the client calls it.
        allowed: a finite range.

    Raises:
        StatusError: not a number (nor are true and false), NaN, infinity, or outside the range.
    """
    if isinstance(value, bool) or value not in allowed:
        raise BadRequestError(f"{field}={short_repr(value)} is not allowed: give {allowed}")
    assert isinstance(value, int | float)
    return float(value)


def check_rate(value: object, field: str) -> int:
    """Return a sample rate that a client sent, in Hz; raises as `check_number`, for fractions too."""
    rate_hz = check_number(value, field, Range(*RATES_HZ))
    if not rate_hz.is_integer():
        raise BadRequestError(f"{field}={short_repr(value)} is not allowed: give a whole number")
    return int(rate_hz)


def refuse_misspelt(names: Collection[str], known: Collection[str], place: str = "") -> None:
    """Refuse a setting that is none, but nearly the name of one; others are of newer clients and change nothing.

    Args:
        names: that a client sent.
        known: of its protocol, with those that change nothing here.
        place: of the settings, before their names in errors.

    Raises:
        BadRequestError: such a name, or more than 100 names.
    """
    if len(names) > _MAX_NAMES:
        raise BadRequestError(f"{place or 'a message'} has {len(names)} settings: allowed are {_MAX_NAMES}")
    for name in names:
        shown = name[:40]
        if name not in known and (nearest := difflib.get_close_matches(shown, known, 1, _MISSPELT)):
            raise BadRequestError(f"{place}{shown} is no setting; did you mean {place}{nearest[0]}?")


@dataclass(frozen=True)
class Limits:
    """Limits of each client (`sessions`, `batch`, `uploads_bytes`: of all together), and who may be a client."""

    sessions: int = 64
    batch: int = 1 << 20  # sessions in one; 1: no batches
    message_bytes: int = 1 << 20
    upload_bytes: int = 200 << 20
    uploads_bytes: int = 2 << 30  # of all uploads together, in memory and in the temporary folder
    duration_s: float = 4 * 3600.0
    idle_s: float = 60.0
    api_key: str = ""  # empty: no key is needed
    root: str = "vosk"  # the protocol of WebSockets at /, a name of `ds2.serve.http.PROTOCOLS`
    language: str = "en"  # of the model, which Wyoming's clients choose it by
    host: str = "127.0.0.1"  # where the server listens
    allow_hosts: tuple[str, ...] = ()  # more names of the server, see `ds2.serve.http.Guard`
    allow_origins: tuple[str, ...] = ()  # sites whose pages may use it
    tls: Certificate | None = None  # None: http

    def check_key(self, connection: HTTPConnection) -> None:
        """Raise StatusError if the server has a key and the client did not send it."""
        key = connection.headers.get("authorization", "").removeprefix("Bearer ").removeprefix("Token ")
        offered = connection.scope.get("subprotocols", [])  # browsers cannot set headers of a WebSocket
        for before, protocol in zip(["", *offered], offered, strict=False):
            key = protocol.removeprefix(KEY_PROTOCOL) if protocol.startswith(KEY_PROTOCOL) else key
            key = protocol if before in ("token", "bearer") else key  # as Deepgram has it
        sent = (key, unquote(key))  # a subprotocol takes fewer characters than a key may have
        if self.api_key and not any(hmac.compare_digest(one.encode(), self.api_key.encode()) for one in sent):
            raise StatusError(
                "this server wants its API key: send Authorization: Bearer KEY, or enter it on the page, in Settings",
                401,
                1008,
            )

    def check_duration(self, seconds: float) -> None:
        """Raise SessionOverError past the longest session."""
        if seconds > self.duration_s:
            raise SessionOverError(
                f"a session takes {self.duration_s:g} s of audio at most: begin a new one", 413, 1008
            )
