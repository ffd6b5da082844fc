"""Conversion of configurations: from Hydra, YAML and JSON to dataclasses and back, inheritance from a model, and help.

Errors name the most similar key.
"""

import difflib
import functools
import inspect
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, asdict, dataclass, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NoReturn, get_args, get_origin, get_type_hints

import yaml
from omegaconf import MISSING, OmegaConf

from ds2.config import schema
from ds2.config.allowed import ALLOWED, REMOVED, Range
from ds2.config.check import check
from ds2.config.schema import AlphabetConfig, Config, ConfigError, ConvConfig
from ds2.system.files import write_text
from ds2.system.plain import TYPE_NAMES, FieldError, UnknownField, from_plain, short_repr

FREE_FORM = ("alphabet.replace", "optim.layer_rates")  # mappings whose keys the user chooses
_SYNONYMS = {"lr": "optim.learning_rate", "batch_size": "batching.utterances", "bs": "batching.utterances",
             "layers": "model.depth", "lm": "decode.lm", "output": "run_dir", "gpu": "device"}  # fmt: skip
_SECTIONS = ("model", "features", "alphabet")
_OF_THE_RUN = ("model.backend", "model.intermediate_phones")  # of its machine, and of its train.intermediate_lexicon
_BOOLS = {"true": True, "yes": True, "on": True, "y": True, "false": False, "no": False, "off": False, "n": False}
_LABELS = ("symbols", "pieces", "pieces_file", "lexicon")
_CONV = "an entry is {kernel:[FREQUENCY,TIME],stride:[FREQUENCY,TIME],channels:N,causal:false}"


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Takes words, numbers and truth values as YAML 1.2 does; a key that is there twice is an error.

    By YAML 1.1 no is false, 007 is 7, 2024_01 is 202401 and 12:30 is 750.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        twice = [key for key in keys if keys.count(key) > 1]
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"key {twice[0]!r} is there twice", node.start_mark)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


for _kind, _pattern, _first in (
    ("null", "|~|null|Null|NULL", ["", "~", "n", "N"]),
    ("bool", "true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", list("-+0123456789")),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", list("-+.")),
    ("merge", "<<", ["<"]),
):  # fmt: skip
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(f"(?:{_pattern})$"), _first)


def read_yaml(text: str) -> Any:
    """Read YAML in which words stay words: `graphs: off`, `locale: no`, `run_dir: 2024_01`.

    Raises:
        YAMLError, ValueError, RecursionError: it is no YAML; also for a key twice in a mapping.
    """
    return yaml.load(text, Loader=_Loader)


@functools.cache
def text_keys() -> frozenset[str]:
    """Return the settings that are texts, lists of texts or mappings to texts, by dotted key."""
    return frozenset(key for key, (_, kind) in declared_settings().items() if kind in (str, list[str], dict[str, str]))


@functools.cache
def declared_settings() -> dict[str, tuple[Field[Any], Any]]:
    """The declarations and types of the sections and settings, by dotted key."""
    sections = [("", Config), *((f"{field.name}.", kind) for field, kind in _fields(Config) if is_dataclass(kind))]
    return {f"{prefix}{field.name}": (field, kind) for prefix, owner in sections for field, kind in _fields(owner)}


@functools.cache  # hints are slow to read
def kind_within(kind: Any, name: str) -> Any:
    """Return the type of a section's setting, a list's entry or a mapping's value; None if there is no such one."""
    if is_dataclass(kind):
        return {field.name: hint for field, hint in _fields(kind)}.get(name)
    return get_args(kind)[-1] if get_args(kind) else None


def with_types(value: Any, kind: Any = Config) -> Any:
    """Return the plain value of a setting or section with words and numbers as its type has them.

    Words are on, off and the like for bools, and numbers that were quoted or come from the environment. Entries of
    model.convs get the defaults that they leave out.
    """
    if isinstance(value, dict):
        value = (asdict(ConvConfig()) if kind is ConvConfig else {}) | value
        # YAML has read names such as true and 1.50 as other types, and how they were written is lost: refused.
        names = {name: str(name) if is_dataclass(kind) or type(name) is int else name for name in value}
        return {names[name]: with_types(entry, kind_within(kind, name)) for name, entry in value.items()}
    if isinstance(value, list):
        return [with_types(entry, kind_within(kind, "")) for entry in value]
    if kind is bool and isinstance(value, str):
        return _BOOLS.get(value.lower(), value)
    if kind is str and isinstance(value, int | float):
        return str(value)
    if (kind in (int, float) and isinstance(value, str)) or (kind is float and type(value) is int):
        with suppress(ValueError, OverflowError):
            return kind(value)
    return value


def to_config(values: object) -> Config:
    """Convert the plain containers of a composed configuration, with words as people write them. It is not checked yet.

    Raises:
        ConfigError: an unknown key (such as Hydra's `+key=value`), or a wrong type.
    """
    try:
        return _build(with_types(values))
    except FieldError as error:
        key = error.field.removeprefix("config.")
        raise ConfigError(f"{key}: {expected(key, error.value)}") from error


def _build(values: object) -> Config:
    try:
        return from_plain(Config, values, "config")
    except UnknownField as error:
        raise_unknown(error.field.removeprefix("config."))


def save_config(config: Config, path: Path) -> None:
    """Write the resolved configuration as YAML."""
    write_text(path, OmegaConf.to_yaml(OmegaConf.create(asdict(config)), resolve=True))


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by dotted key; mappings whose keys the user chooses are settings as a whole."""
    settings: dict[str, Any] = {}
    for key, value in values.items():
        nested = isinstance(value, dict) and prefix + key not in FREE_FORM
        settings |= flat(value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return settings


def not_default(config: Config) -> dict[str, Any]:
    """Return the settings that differ from their defaults, by dotted key."""
    default = flat(asdict(Config()))
    return {key: value for key, value in flat(asdict(config)).items() if value != default[key]}


def config_from_dict(values: object) -> Config:
    """Return the configuration of plain containers: the inverse of `asdict`. Nothing is interpolated.

    Raises:
        ConfigError: an unknown key, a wrong type, or values that do not work together.
    """
    try:
        config = _build({"run_dir": MISSING, **values} if isinstance(values, dict) else values)
    except FieldError as error:
        raise ConfigError(str(error)) from error
    check(config)
    return config


def nearest_key(key: str) -> str | None:
    """Return the setting most similar to `key`, by its full name or else by its last part."""
    section, _, leaf = key.rpartition(".")
    if leaf in _SYNONYMS:
        return _SYNONYMS[leaf]
    known = [*declared_settings(), "recipe"]
    if section:  # do not suggest the section itself
        known = [other for other in known if "." in other]
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.7)
    if close:
        return close[0]
    by_leaf = {name.rsplit(".", 1)[-1]: name for name in known}
    close = difflib.get_close_matches(leaf, list(by_leaf), n=1, cutoff=0.6)
    return by_leaf[close[0]] if close else None


def expected(key: str, value: object) -> str:
    """Return what the section, setting or entry of a setting of this name takes, for an error about `value`."""
    name, in_list, _ = key.partition("[")
    mapping = next((mapping for mapping in FREE_FORM if name.startswith(f"{mapping}.")), "")
    declared, kind = declared_settings()[mapping or name]
    entry, was = bool(in_list or mapping), "null" if value is None else short_repr(value)
    if is_dataclass(kind):
        return f"takes {key}.KEY=VALUE, not {was}"
    if kind == list[ConvConfig] and entry:
        return f"cannot be {was}: {_CONV}"
    if get_origin(kind) is list and not entry:
        return f"takes a list, in brackets even of one: {key}=[A,B], not {was}"
    if get_origin(kind) is dict and not entry:
        wrong = ", with quotes around 1.50, true or null" if isinstance(value, dict) else f", not {was}"
        return f"takes a mapping: {key}={{KEY:VALUE}}{wrong}"
    single: Any = get_args(kind)[-1] if entry else kind
    allowed = declared.metadata.get(ALLOWED)
    kinds = f"one of {', '.join(allowed)}" if isinstance(allowed, tuple) else TYPE_NAMES[single]
    limits = f"; allowed are {allowed}" if isinstance(allowed, Range) else ""
    shown = "" if entry or declared.default == MISSING else _key("", Config, declared, {}).default
    default = f" (default {shown})" if shown else ""
    return f"takes {kinds}, not {was}{limits}{default}"


def raise_unknown(key: str) -> NoReturn:
    """Raise ConfigError for a key that no setting has, with the most similar one."""
    near = nearest_key(key)
    hint = f"did you mean {near!r}?" if near else "`ds2 train --help` lists all"
    raise ConfigError(f"unknown key {key!r}; {_CONV if '[' in key else hint}")


def inherit(config: Config, stored: Config, explicit: Collection[str]) -> tuple[str, str]:
    """Copy architecture, features, sample rate and alphabet from the model that a run starts from.

    They replace those of a recipe, which are meant for training from scratch. Values of the command line stay, and so
    does the alphabet of a recipe, which belongs to the language.

    Args:
        config: changed in place.
        stored: configuration of the model.
        explicit: keys and groups set on the command line, such as `model`, `model.depth`, `alphabet.symbols`.

    Returns:
        Values of a recipe or a default that were replaced, and those of the command line that differ, for the log.
    """
    replaced, differing = [], []
    names = [(section, field.name) for section in _SECTIONS for field in fields(getattr(config, section))]
    names.append(("data", "sample_rate_hz"))
    stays = {pair for pair in names if _is_explicit(config, *pair, explicit)}  # before any of them is replaced
    for section, name in names:
        key = f"{section}.{name}"
        mine, theirs = getattr(getattr(config, section), name), getattr(getattr(stored, section), name)
        if mine == theirs or key in _OF_THE_RUN:
            continue
        if (section, name) not in stays:
            setattr(getattr(config, section), name, theirs)
            replaced.append(f"{key}={_described(theirs)} (not {_described(mine)})")
        elif name != "pieces_file":
            differing.append(f"{key}={_described(mine)} (the model has {_described(theirs)})")
    return ", ".join(replaced), ", ".join(differing)


def _described(value: object) -> str:
    """A value for a message; a list of dataclasses, such as model.convs, as on the command line."""
    if isinstance(value, list) and any(map(is_dataclass, value)):
        return re.sub(r"[' ]", "", str([asdict(entry) for entry in value])).lower()
    return short_repr(value)


def _is_explicit(config: Config, section: str, name: str, explicit: Collection[str]) -> bool:
    names = _LABELS if section == "alphabet" and name in _LABELS else (name,)
    settings = tuple(f"{section}.{one}." for one in names)  # with the dot: model.convs.0.causal is one of model.convs
    if (section in _SECTIONS and section in explicit) or any(f"{key}.".startswith(settings) for key in explicit):
        return True
    default = AlphabetConfig()
    return section == "alphabet" and any(getattr(config.alphabet, one) != getattr(default, one) for one in names)


@dataclass(frozen=True)
class Key:
    """A setting for the help: dotted name, default as written on the command line, choices and comment."""

    name: str
    default: str
    comment: str


def documented_keys() -> list[tuple[str, str, list[Key]]]:
    """Return the sections of the configuration as (name, docstring, settings), without removed settings."""
    comments = setting_comments(schema)
    sections: list[tuple[str, str, list[Key]]] = [("", "", [])]
    for field, kind in _fields(Config):
        if is_dataclass(kind):
            settings = (inner for inner, _ in _fields(kind) if REMOVED not in inner.metadata)
            keys = [_key(f"{field.name}.", kind, inner, comments) for inner in settings]
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
        shown = f"[{len(value)} entries]"
    else:
        shown = repr(value) if isinstance(value, str) and (not value or " " in value) else str(value)
    allowed, comment = field.metadata.get(ALLOWED), comments.get((owner.__name__, field.name), "")
    if isinstance(allowed, tuple):
        comment = "; ".join(filter(None, (" | ".join(allowed), comment)))
    return Key(prefix + field.name, shown, comment)


def _fields(owner: Any) -> Iterator[tuple[Field[Any], Any]]:
    hints = get_type_hints(owner)
    for field in fields(owner):
        yield field, hints[field.name]


def setting_comments(module: ModuleType) -> dict[tuple[str, str], str]:
    """Map (class, field) of a module's dataclasses to its comment: on the same line, else on the lines above."""
    comments: dict[tuple[str, str], str] = {}
    owner, above = "", list[str]()
    for line in inspect.getsource(module).splitlines():
        if line[:1].strip():
            owner = match[1] if (match := re.match(r"class (\w+)", line)) else ""
        comment = line.partition("# ")[2]
        if field := re.match(r" {4}(\w+): ", line):
            comments[owner, field[1]] = comment or " ".join(above)
        above = [*above, comment] if line.lstrip().startswith("# ") else []
    return comments
