"""JSON and YAML values to dataclasses, with checks of types and field names; words for messages; groups of values."""

import dataclasses
import difflib
import functools
import json
import types
import typing
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar, cast, get_args, get_origin

from ds2.system import UserError

T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)
TYPE_NAMES = {str: "a string", bool: "true or false", int: "a whole number", float: "a number"}
_SHOWN = 60


class FieldError(UserError, ValueError):
    """A value of a file has the wrong type; the message is `field: what is wrong`."""

    def __init__(self, field: str, what: str, value: object = None) -> None:
        super().__init__(f"{field}: {what}")
        self.field, self.value = field, value


class UnknownField(FieldError):
    """A field that does not exist."""


def parse_json(text: str | bytes, read: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Parse JSON; raises ValueError for text that is not JSON or is nested too deep to be parsed.

    Args:
        read: returns what takes the place of an object.
    """
    try:
        return json.loads(text, object_hook=read)
    except RecursionError as error:
        raise ValueError(f"nested too deep ({error})") from error


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object; raises ValueError with what the text is instead."""
    try:
        value = parse_json(text)
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__}")
    return value


def from_plain(kind: type[T], value: object, field: str) -> T:
    """Build a value of `kind` from plain containers. Strings are data: no interpolation takes place.

    Args:
        kind: a dataclass, str, bool, int, float (whole numbers too), list[...], tuple[..., ...], dict[str, ...], an
            optional one of these, or Any.
        value: lists, dicts with strings as keys, strings and numbers.
        field: name for messages; names of nested fields are appended with dots.

    Raises:
        FieldError: a wrong type or a missing field.
        UnknownField: a field that the dataclass does not have.
    """
    return cast(T, _build(kind, value, field))


def _build(kind: Any, value: object, field: str) -> object:
    if kind in TYPE_NAMES:
        if kind is float and type(value) is int and abs(value) < 2**53:
            return float(value)
        if type(value) is not kind or (kind is int and not -(2**63) <= cast(int, value) < 2**63):
            raise _wrong(field, value, TYPE_NAMES[kind])
        return value
    if dataclasses.is_dataclass(kind):
        return _dataclass(cast(type, kind), value, field)
    return value if kind is Any else _container(kind, value, field)


def _container(kind: Any, value: object, field: str) -> object:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is types.UnionType:
        return None if value is None else _build(inner[0], value, field)
    if origin is dict:
        return {key: _build(inner[1], entry, f"{field}.{key}") for key, entry in _mapping(value, field).items()}
    if not isinstance(value, list):
        raise _wrong(field, value, "a list")
    return cast(type, origin)(_build(inner[0], entry, f"{field}[{place}]") for place, entry in enumerate(value))


def _dataclass(kind: type, value: object, field: str) -> object:
    values, kinds = _mapping(value, field), _fields(kind)
    for key in values:
        if key not in kinds:
            raise UnknownField(f"{field}.{key}", "no such field")
    arguments = {}
    for name, (inner, required) in kinds.items():
        if name in values:
            arguments[name] = _build(inner, values[name], f"{field}.{name}")
        elif required:
            raise FieldError(f"{field}.{name}", "is missing")
    return kind(**arguments)


@functools.cache  # hints are texts, which are slow to evaluate
def _fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Return the type of each field of a dataclass by name, and whether it has no default."""
    hints, missing = typing.get_type_hints(kind), dataclasses.MISSING
    return {
        entry.name: (hints[entry.name], entry.default is missing and entry.default_factory is missing)
        for entry in dataclasses.fields(kind)
        if entry.init
    }


def _mapping(value: object, field: str) -> dict[str, object]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise _wrong(field, value, "a mapping with strings as keys")
    return value


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, for a message: 1 utterance, 2 utterances; `plural` if s alone does not make it."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or noun + 's'}"


def first_of(texts: Sequence[str], most: int, more: str = "") -> list[str]:
    """Return the first texts of a list, for a message; if there are others, `... and N more` is the last."""
    return [*texts[:most], *([f"... and {len(texts) - most} more{more}"] if len(texts) > most else [])]


def grouped(values: Iterable[T], key: Callable[[T], Key]) -> dict[Key, list[T]]:
    """Return the values of each key, in order."""
    groups: dict[Key, list[T]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return groups


def did_you_mean(word: str, allowed: Iterable[object], cutoff: float = 0.6) -> str:
    """Return "; did you mean X?" with the allowed word most like this one, for a message; empty if none is like it."""
    close = difflib.get_close_matches(word, map(str, allowed), 1, cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""


def short_repr(value: object) -> str:
    """Return the repr of a value from a file, for a message: its first 60 characters."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # ValueError: a number of thousands of digits
        text = f"a {type(value).__name__}"
    return shortened(text)


def shortened(text: str) -> str:
    """Return the first 60 characters of a text, for a message."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _wrong(field: str, value: object, expected: str) -> FieldError:
    return FieldError(field, f"is {short_repr(value)}, expected {expected}", value)
