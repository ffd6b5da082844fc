"""Messages between processes as data: JSON for the values, raw bytes for arrays. Reading one never runs code.

A message is the length of its JSON header (8 bytes, little-endian), the header, and the bytes of its arrays. In the
header a list stands for a list, and an object with one key stands for what JSON lacks: `{"tuple": [...]}`,
`{"array": [dtype, shape, offset, size]}` and so on.
"""

import dataclasses
import json
import math
import struct
from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import numpy as np

from ds2.system import UserError
from ds2.system.plain import parse_json

_LENGTH = struct.Struct("<Q")
_PLAIN = {type(None), bool, int, float, str}  # what JSON has: a list of these stands for itself
_ARRAY_KINDS = "biuf"  # of numpy: bool, integers, floats; never objects


class MessageError(UserError):
    """Bytes that are not a message; they come from another program, another version, or a stranger."""


def encode(value: object) -> bytes:
    """Return a value as bytes that `decode` reads.

    Args:
        value: None, bool, int, float, str, bytes, a bytearray, a numpy array, a dataclass, or lists, tuples
            and dicts of these.

    Raises:
        TypeError: the value holds something else.
    """
    buffers = bytearray()
    header = json.dumps(_to_json(value, buffers)).encode()
    return b"".join([_LENGTH.pack(len(header)), header, buffers])


def decode(data: bytes | bytearray | memoryview, classes: Iterable[type] = ()) -> Any:
    """Return the value of a message, which may hold these dataclasses; its arrays own their memory.

    Raises:
        MessageError: `data` is no message, its sizes do not fit, or it holds another class.
    """
    try:
        (length,) = _LENGTH.unpack_from(data)
        whole = memoryview(data)[_LENGTH.size :]
        if length > len(whole):
            raise ValueError(f"a header of {length} bytes in a message of {len(data)}")
        read = partial(_read_entry, whole[length:], _by_name(tuple(classes)))
        return parse_json(bytes(whole[:length]), read)
    except Exception as error:  # numpy raises SyntaxError for some types, a dataclass its own errors
        raise MessageError(
            f"a message from another process cannot be read: {error}; run the same version of ds2 everywhere, "
            "and let no stranger reach the network between them"
        ) from error


def _to_json(value: Any, buffers: bytearray) -> Any:  # noqa: PLR0911  one a kind
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list):
        return value if _PLAIN.issuperset(map(type, value)) else [_to_json(entry, buffers) for entry in value]
    if isinstance(value, tuple):
        return {"tuple": _to_json(list(value), buffers)}
    if dataclasses.is_dataclass(value):
        names = _field_names(value.__class__)
        return {"class": [type(value).__name__, names, _to_json([getattr(value, name) for name in names], buffers)]}
    if isinstance(value, dict):
        return {"dict": [[_to_json(key, buffers), _to_json(entry, buffers)] for key, entry in value.items()]}
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes | bytearray):
        return {type(value).__name__: _append(value, buffers)}
    if isinstance(value, np.ndarray) and value.dtype.kind in _ARRAY_KINDS:
        return {"array": [value.dtype.str, list(value.shape), *_append(value.tobytes(), buffers)]}
    raise TypeError(f"a {type(value).__name__} cannot be sent to another process")


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    """Return the names of a dataclass's fields that its constructor takes; cached, as a transcript has many words."""
    return tuple(field.name for field in dataclasses.fields(kind) if field.init)


def _append(data: bytes | bytearray, buffers: bytearray) -> list[int]:
    """Add a buffer; returns where it begins and how long it is."""
    offset = len(buffers)
    buffers += data
    return [offset, len(data)]


@cache
def _by_name(classes: tuple[type, ...]) -> dict[str, type]:
    return {kind.__name__: kind for kind in classes}


def _read_entry(buffers: memoryview, classes: dict[str, type], entry: dict[str, Any]) -> Any:
    """Return what an object of the header stands for; those inside it are read already."""
    [(tag, content)] = entry.items()
    if tag == "tuple":
        return tuple(content)
    if tag == "dict":
        return dict(content)
    if tag in ("bytes", "bytearray"):
        return (bytes if tag == "bytes" else bytearray)(_buffer(buffers, *content))
    if tag == "class":
        name, fields, values = content
        return classes[name](**dict(zip(fields, values, strict=True)))
    if tag == "array":
        return _array(buffers, *content)
    raise ValueError(f"an entry of the kind {tag!r}")


def _buffer(buffers: memoryview, offset: int, size: int) -> memoryview:
    if not 0 <= offset <= offset + size <= len(buffers):
        raise ValueError(f"bytes {offset} to {offset + size} of {len(buffers)}")
    return buffers[offset : offset + size]


def _array(buffers: memoryview, name: str, shape: list[int], offset: int, size: int) -> np.ndarray:
    dtype = np.dtype(name)
    if dtype.kind not in _ARRAY_KINDS:
        raise ValueError(f"an array of {name!r}")
    if any(type(n) is not int or n < 0 for n in shape) or math.prod(shape) * dtype.itemsize != size:
        raise ValueError(f"an array of shape {shape} with {dtype.itemsize} bytes an element in {size} bytes")
    return np.frombuffer(_buffer(buffers, offset, size), dtype).reshape(shape).copy()
