"""From command-line overrides to a checked Config: Hydra's composition, with errors that name the nearest right key."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from ds2.config import Config, ConfigError, register
from ds2.config_check import check
from ds2.pieces import read_pieces
from ds2.whole_file import write_text

PRIMARY_CONFIG = "train"
_FREE_FORM = ("alphabet.replace",)  # mappings whose keys are the user's


def config_dir() -> Path:
    """The Hydra tree: `conf` beside the package in a checkout, `ds2/conf` inside an installed wheel."""
    package = Path(__file__).resolve().parent
    for candidate in (package / "conf", package.parent / "conf"):
        if (candidate / f"{PRIMARY_CONFIG}.yaml").is_file():
            return candidate
    places = f"{package / 'conf'} and {package.parent / 'conf'}"
    raise FileNotFoundError(f"no Hydra tree: looked for {PRIMARY_CONFIG}.yaml in {places}")


def compose_config(overrides: Sequence[str] = ()) -> Config:
    """Compose, convert and check the configuration that `overrides` describe.

    Args:
        overrides: Hydra overrides, e.g. `["recipe=an4", "model.depth=8"]`.

    Raises:
        ConfigError: an unknown key or group choice (the nearest right one is named), a wrong type, or values that
            cannot work together.
    """
    register()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(config_dir()), version_base="1.3"):
            composed = compose(config_name=PRIMARY_CONFIG, overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        _explain(error, overrides)
    return to_config(composed)


def to_config(composed: DictConfig) -> Config:
    """Turn a composed tree into dataclasses, once, and check it across fields.

    Raises:
        ConfigError: an unknown key (Hydra's `+key=value` adds one), a wrong type, or values that cannot work together.
        AlphabetError: `alphabet.pieces_file` cannot be read.
    """
    known = {*_keys(OmegaConf.structured(Config))}
    for key in _keys(composed):
        if key not in known and not any(key.startswith(f"{free}.") for free in _FREE_FORM):
            _unknown(key)
    try:
        config = cast(Config, OmegaConf.to_object(composed))
    except OmegaConfBaseException as error:
        _explain(error)
    check(config)
    if config.alphabet.pieces_file and not config.alphabet.pieces:
        config.alphabet.pieces = read_pieces(Path(config.alphabet.pieces_file))
    return config


def first_of_sweep(overrides: Sequence[str]) -> list[str]:
    """Replace every sweep (`a=1,2`) by its first value, so that a multirun can be checked before it starts.

    Raises:
        ConfigError: an override is not in Hydra's grammar.
    """
    parsed = [_parse(override) for override in overrides]
    return [
        f"{override.get_key_element()}={next(iter(override.sweep_string_iterator()))}"
        if override.is_sweep_override()
        else cast(str, override.input_line)
        for override in parsed
    ]


def _parse(override: str) -> Override:
    try:
        return OverridesParser.create().parse_override(override)
    except HydraException as error:
        reason = " ".join(str(error).splitlines()[0].split())
        raise ConfigError(
            f"{override!r} is no override ({reason}): write key=value, and quote a value with blanks or brackets in it "
            "twice, once for the shell: \"alphabet.symbols='abc '\""
        ) from error


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
        _explain(error)


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


def _explain(error: Exception, overrides: Sequence[str] = ()) -> NoReturn:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, MissingConfigException):
        wanted = error.missing_cfg_file or ""
        options = list(error.options or [])
        close = difflib.get_close_matches(wanted.rsplit("/", 1)[-1], options, n=1, cutoff=0.4)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        listing = f" Available: {', '.join(options)}." if options else ""
        raise ConfigError(f"there is no config {wanted!r}{hint}{listing}") from error
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
