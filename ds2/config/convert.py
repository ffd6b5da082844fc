"""Trees to dataclasses and back, for YAML and JSON, with errors that name the nearest right key."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn, cast

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from ds2.config.check import check
from ds2.config.schema import Config, ConfigError
from ds2.system.files import write_text
from ds2.system.plain import FieldError, UnknownField, from_plain

FREE_FORM = ("alphabet.replace", "optim.layer_rates")  # mappings whose keys are the user's


def to_config(composed: DictConfig) -> Config:
    """Turn a composed tree into dataclasses, once, and check it across fields.

    Raises:
        ConfigError: an unknown key (Hydra's `+key=value` adds one), a wrong type, or values that cannot work together.
    """
    known = {*_keys(OmegaConf.structured(Config))}
    try:
        for key in _keys(composed):
            if key not in known and not any(key.startswith(f"{free}.") for free in FREE_FORM):
                _unknown(key)
        config = cast(Config, OmegaConf.to_object(composed))
        from_plain(Config, asdict(config), "config")  # an interpolation may have brought another type
    except OmegaConfBaseException as error:
        explain(error)
    except FieldError as error:
        raise ConfigError(str(error).removeprefix("config.")) from error
    check(config)
    return config


def save_config(config: Config, path: Path) -> None:
    """Write the resolved configuration as YAML."""
    write_text(path, OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True))


def config_to_dict(config: Config) -> dict[str, Any]:
    """The configuration as plain containers, for JSON."""
    return asdict(config)


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted key."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def not_default(config: Config) -> dict[str, Any]:
    """The settings that differ from the schema's defaults, by dotted key."""
    default = flat(asdict(Config(run_dir="")))
    return {key: value for key, value in flat(asdict(config)).items() if key not in default or value != default[key]}


def config_from_dict(values: object) -> Config:
    """The inverse of `config_to_dict`: values of files are data, nothing in them is interpolated.

    Raises:
        ConfigError: a key that this version does not know, a wrong type, or values that cannot work together.
    """
    try:
        config = from_plain(Config, {"run_dir": MISSING, **values} if isinstance(values, dict) else values, "config")
    except UnknownField as error:
        _unknown(error.field.removeprefix("config."))
    except FieldError as error:
        raise ConfigError(str(error)) from error
    check(config)
    return config


def _keys(node: Any, prefix: str = "") -> Iterator[str]:
    for key in node:
        yield f"{prefix}{key}"
        if not OmegaConf.is_missing(node, key) and OmegaConf.is_dict(node[key]):
            yield from _keys(node[key], f"{prefix}{key}.")


_SHORT = {"lr": "optim.learning_rate", "batch_size": "batching.utterances", "bs": "batching.utterances",
          "layers": "model.depth", "lm": "decode.lm", "output": "run_dir", "gpu": "device"}  # fmt: skip


def nearest_key(key: str) -> str | None:
    """The configuration key most like `key`, by its whole path or, failing that, by its last part."""
    section, _, leaf = key.rpartition(".")
    if leaf in _SHORT:
        return _SHORT[leaf]
    known = [*_keys(OmegaConf.structured(Config)), "recipe"]
    if section:  # of a key in a section the section itself is no mending
        known = [other for other in known if "." in other]
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.7)
    if close:
        return close[0]
    by_leaf = {name.rsplit(".", 1)[-1]: name for name in known}
    close = difflib.get_close_matches(leaf, list(by_leaf), n=1, cutoff=0.6)
    return by_leaf[close[0]] if close else None


def explain(error: Exception, overrides: Sequence[str] = ()) -> NoReturn:
    """Raise what an error of OmegaConf, or one with such a cause, means to the user as ConfigError."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__ or cause.__context__
    text = str(error).splitlines()[0]
    if cause is None:
        raise ConfigError(text) from error
    key = str(cause.full_key or cause.key or "")
    detail = (cause.msg or str(cause) or text).splitlines()[0]
    given = next((name for o in overrides if (name := o.lstrip("+~").split("=")[0]).split(".")[0] == key), key)
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        _unknown(given)
    raise ConfigError(f"{key}: {shape_hint(key) or detail}") from error


def shape_hint(key: str) -> str:
    """What a key takes if that is a list or a mapping, whatever was given; empty for single values and unknown keys."""
    value: Any = Config()
    for name in key.split("."):
        value = getattr(value, name, None)
    if isinstance(value, list):
        return f"takes a list, in brackets even of one: {key}=[A,B]"
    return f"takes a mapping: {key}={{KEY:VALUE}}" if isinstance(value, dict) else ""


def _unknown(key: str) -> NoReturn:
    near = nearest_key(key)
    raise ConfigError(
        f"unknown key {key!r}; " + (f"did you mean {near!r}?" if near else "`ds2 train --help` lists all")
    )
