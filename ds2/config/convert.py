"""Trees to dataclasses and back, for YAML and JSON, with errors that name the nearest right key."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from ds2.config.check import check
from ds2.config.schema import Config, ConfigError
from ds2.system.files import write_text

FREE_FORM = ("alphabet.replace", "optim.layer_rates")  # mappings whose keys are the user's


def to_config(composed: DictConfig) -> Config:
    """Turn a composed tree into dataclasses, once, and check it across fields.

    Raises:
        ConfigError: an unknown key (Hydra's `+key=value` adds one), a wrong type, or values that cannot work together.
    """
    known = {*_keys(OmegaConf.structured(Config))}
    for key in _keys(composed):
        if key not in known and not any(key.startswith(f"{free}.") for free in FREE_FORM):
            _unknown(key)
    try:
        config = cast(Config, OmegaConf.to_object(composed))
    except OmegaConfBaseException as error:
        explain(error)
    check(config)
    return config


def save_config(config: Config, path: Path) -> None:
    """Write the resolved configuration as YAML."""
    write_text(path, OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True))


def config_to_dict(config: Config) -> dict[str, Any]:
    """The configuration as plain containers, for JSON."""
    return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.structured(config), resolve=True))


def config_from_dict(values: dict[str, Any]) -> Config:
    """The inverse of `config_to_dict`; raises `ConfigError` for keys this version does not know."""
    try:
        return to_config(cast(DictConfig, OmegaConf.merge(OmegaConf.structured(Config), values)))
    except OmegaConfBaseException as error:
        explain(error)


def _keys(node: Any, prefix: str = "") -> Iterator[str]:
    for key in node:
        yield f"{prefix}{key}"
        if not OmegaConf.is_missing(node, key) and OmegaConf.is_dict(node[key]):
            yield from _keys(node[key], f"{prefix}{key}.")


def nearest_key(key: str) -> str | None:
    """The configuration key most like `key`, by its whole path or, failing that, by its last part."""
    known = [*_keys(OmegaConf.structured(Config)), "recipe"]
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.7)
    if close:
        return close[0]
    by_leaf = {name.rsplit(".", 1)[-1]: name for name in known}
    leaf = difflib.get_close_matches(key.rsplit(".", 1)[-1], list(by_leaf), n=1, cutoff=0.6)
    return by_leaf[leaf[0]] if leaf else None


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
    raise ConfigError(f"{key}: {detail}") from error


def _unknown(key: str) -> NoReturn:
    near = nearest_key(key)
    raise ConfigError(f"unknown key {key!r}" + (f"; did you mean {near!r}?" if near else ""))
