"""The keys of the configuration with what the schema's source says of them, for `ds2 train --help`."""

from __future__ import annotations

import ast
import inspect
import io
import tokenize
from collections.abc import Iterator
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, dataclass, fields, is_dataclass
from typing import Any, get_type_hints

from omegaconf import MISSING

from ds2.config import schema
from ds2.config.allowed import KEY
from ds2.config.schema import Config


@dataclass(frozen=True)
class Key:
    """One key: its dotted name, its default as it would be written, its choices and the comment beside it."""

    name: str
    default: str
    comment: str


def documented_keys() -> list[tuple[str, str, list[Key]]]:
    """Return the sections of the configuration, each as (name, docstring, keys), in the order of the schema."""
    comments = _comments()
    sections: list[tuple[str, str, list[Key]]] = [("", "", [])]
    for field, kind in _fields(Config):
        if is_dataclass(kind):
            keys = [_key(f"{field.name}.", kind, inner, comments) for inner, _ in _fields(kind)]
            sections.append((field.name, (kind.__doc__ or "").splitlines()[0], keys))
        else:
            sections[0][2].append(_key("", Config, field, comments))
    return sections


def _key(prefix: str, owner: Any, field: Field[Any], comments: dict[tuple[str, str], str]) -> Key:
    value = field.default if field.default_factory is NO_DEFAULT else field.default_factory()
    if value == MISSING:
        shown = "..."
    elif isinstance(value, bool):
        shown = str(value).lower()
    elif isinstance(value, list) and value and is_dataclass(value[0]):
        shown = f"[{len(value)} of them]"
    else:
        shown = repr(value) if isinstance(value, str) and (not value or " " in value) else str(value)
    allowed, comment = field.metadata.get(KEY), comments.get((owner.__name__, field.name), "")
    if isinstance(allowed, tuple):
        comment = ": ".join(filter(None, (" | ".join(allowed), comment)))
    return Key(prefix + field.name, shown, comment)


def _fields(owner: Any) -> Iterator[tuple[Field[Any], Any]]:
    hints = get_type_hints(owner)
    for field in fields(owner):
        yield field, hints[field.name]


def _comments() -> dict[tuple[str, str], str]:
    """Map (class, field) of the schema to the comment behind the field."""
    source = inspect.getsource(schema)
    by_line = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    return {
        (owner.name, node.target.id): by_line[line]
        for owner in ast.parse(source).body
        if isinstance(owner, ast.ClassDef)
        for node in owner.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        if line in by_line
    }
