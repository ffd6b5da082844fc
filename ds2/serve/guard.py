"""Requests that no route sees: of web pages of other sites, under names that are not this server's, framed twice."""

from __future__ import annotations

import ipaddress
import logging
import socket
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ds2.serve.limits import Limits

log = logging.getLogger(__name__)
_WILDCARDS = ("", "0.0.0.0", "::")
_PORTS = {"http": 80, "https": 443}


class Guard:
    """An ASGI application that asks another one only if a request may have come from a friend.

    A web page may open WebSockets to any address and send forms to it, and a name that its owner points to 127.0.0.1
    (DNS rebinding) makes this server the page's own site. So `Origin`, which browsers send, must be this server, and
    `Host` must be one of the addresses listened on: the one that the connection came to, `localhost` where that is this
    machine's own, the name in `limits.host`; where the server listens on all addresses, any IP address (which nobody
    can rebind) and this machine's name.

    Args:
        app: the application.
        limits: of which `host`, `allow_hosts` and `allow_origins` are used; "*" among these allows all.
    """

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self.app = app
        self._logged: set[int] = set()
        self.listens_on_all = limits.host in _WILDCARDS
        names = [*limits.allow_hosts, limits.host, *([socket.gethostname()] if self.listens_on_all else [])]
        self.names = {_host(name)[0] for name in names if name}
        self.origins = {origin.lower().rstrip("/") for origin in limits.allow_origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        if scope["type"] not in ("http", "websocket") or (refusal := self.refusal(scope)) is None:
            await self.app(scope, receive, send)
            return
        status, message = refusal
        if status not in self._logged:
            self._logged.add(status)
            log.warning("a request was refused: %s (said once)", message)
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})  # before it is accepted: status 403
            return
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        await JSONResponse({"error": error}, status, {"connection": "close"})(scope, receive, send)

    def refusal(self, scope: Scope) -> tuple[int, str] | None:
        """The status and the reason of a refusal, or None."""
        headers = Headers(scope=scope)
        if "content-length" in headers and "transfer-encoding" in headers:  # a proxy may believe the other one
            return 400, "Content-Length together with Transfer-Encoding: send one of them"
        host = headers.get("host")
        if host is not None and not self._knows(host, (scope.get("server") or ("",))[0]):
            return 421, f"Host {host[:100]!r} is not an address of this server: ds2 serve --allow-host NAME allows it"
        origins = headers.getlist("origin")
        if not all(self._allows(origin, host or "") for origin in origins):
            return (
                403,
                f"pages of {origins[0][:100]!r} may not use this server: ds2 serve --allow-origin ORIGIN allows it",
            )
        return None

    def _knows(self, host: str, local: str) -> bool:
        name, _ = _host(host)
        if name in self.names or name == local or "*" in self.names:
            return True
        address, here = _address(name), _address(local)
        if self.listens_on_all and address is not None:
            return True
        is_own = here is not None and here.is_loopback
        return is_own and (name == "localhost" or (address is not None and address.is_loopback))

    def _allows(self, origin: str, host: str) -> bool:
        if "*" in self.origins or origin.lower() in self.origins:
            return True
        try:
            parts = urlsplit(origin)
        except ValueError:
            return False
        port = _PORTS.get(parts.scheme)
        return port is not None and _host(parts.netloc, port) == _host(host, port)


def _host(text: str, port: int = 0) -> tuple[str, str]:
    """Name and port of `name:port`, `[address]:port` or either without a port."""
    name, colon, given = text.lower().rpartition(":")
    if not colon or "]" in given or (":" in name and not name.startswith("[")):
        name, given = text.lower(), ""
    return name.strip("[]").rstrip("."), given or str(port)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
