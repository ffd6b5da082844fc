"""Where a server listens: an address that is bound once, by whoever serves in the end, before anything else is done."""

from __future__ import annotations

import errno
import socket

from ds2.config.schema import ConfigError


def keep(host: str, port: int) -> socket.socket:
    """Bind an address that nobody else gets while the socket is open, not even to share it; it does not listen.

    Args:
        host: name or address of this machine.
        port: 0 for any that is free.

    Raises:
        ConfigError: another listens there, the system forbids it, or the host is not this one.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        kept = socket.socket(family, kind, protocol)
        try:
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a server before may linger
            kept.bind(address)
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        except OSError:
            kept.close()
            raise
    except (OSError, UnicodeError) as error:
        hints = {errno.EADDRINUSE: "give another --port", errno.EACCES: "ports below 1024 are the administrator's"}
        hint = hints.get(getattr(error, "errno", None) or 0, "--host is an address of this machine, or 0.0.0.0 for all")
        raise ConfigError(
            f"cannot listen on {host}:{port} ({getattr(error, 'strerror', '') or error}): {hint}"
        ) from error
    return kept


def open_up(kept: socket.socket) -> None:
    """From now on it listens; what lingers of its connections does not keep the next server from the address."""
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.listen()


def share(kept: socket.socket) -> tuple[str, int]:
    """From now on `joined` binds the address that is kept, in any process of this user; what that is."""
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    host, port = kept.getsockname()[:2]
    return host, port


def joined(host: str, port: int) -> socket.socket:
    """A socket that listens on an address that is shared: new connections are spread over all of them."""
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    found.bind((host, port))
    found.listen()
    return found


def url(host: str, port: int) -> str:
    """The address as clients write it; one of IPv6 stands in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
