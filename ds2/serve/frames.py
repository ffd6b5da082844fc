"""What processes of one server say to each other: pickled lists, each after its length, over a pair of sockets.

Nothing of a client's is unpickled: what comes here was made by the process at the other end.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator, Sequence
from typing import Any

_LENGTH = struct.Struct("<Q")


def frame(messages: Sequence[Any]) -> bytes:
    """Messages as bytes."""
    data = pickle.dumps(messages, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


class Frames:
    """Bytes as they come, as messages."""

    def __init__(self) -> None:
        self._held = bytearray()

    def accept(self, data: bytes) -> Iterator[Any]:
        """Take the next bytes; yield the messages that are whole."""
        self._held += data
        at = 0
        while len(self._held) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._held, at)
            first = at + _LENGTH.size
            if len(self._held) < first + length:
                break
            with memoryview(self._held) as whole:
                messages = pickle.loads(whole[first : first + length])
            at = first + length
            yield from messages
        del self._held[:at]
