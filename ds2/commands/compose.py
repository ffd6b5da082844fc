"""From command-line overrides to a checked Config: Hydra's composition, with errors that name the nearest right key."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, cast

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

import ds2
from ds2.config.convert import explain, to_config
from ds2.config.schema import Config, ConfigError
from ds2.text.pieces import read_pieces

PRIMARY_CONFIG = "train"


def config_dir() -> Path:
    """The Hydra tree: `conf` beside the package in a checkout, `ds2/conf` inside an installed wheel."""
    package = Path(ds2.__file__).resolve().parent
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
    except MissingConfigException as error:
        _missing(error)
    except (HydraException, OmegaConfBaseException, ValueError) as error:  # ValueError: a number of 5000 digits
        explain(error, overrides)
    return read_config(composed)


def read_config(composed: DictConfig) -> Config:
    """Turn a composed tree into a checked Config, and read the file of pieces that it names.

    Raises:
        ConfigError: as `ds2.config.convert.to_config`.
        AlphabetError: `alphabet.pieces_file` cannot be read.
    """
    config = to_config(composed)
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
    except (HydraException, ValueError) as error:
        reason = " ".join(str(error).splitlines()[0].split())
        raise ConfigError(
            f"{override!r} is no override ({reason}): write key=value, and quote a value with blanks or brackets in it "
            "twice, once for the shell: \"alphabet.symbols='abc '\""
        ) from error


def _missing(error: MissingConfigException) -> NoReturn:
    wanted = error.missing_cfg_file or ""
    options = list(error.options or [])
    close = difflib.get_close_matches(wanted.rsplit("/", 1)[-1], options, n=1, cutoff=0.4)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    listing = f" Available: {', '.join(options)}." if options else ""
    raise ConfigError(f"there is no config {wanted!r}{hint}{listing}") from error


def register() -> None:
    """Register the schema with Hydra as `schema`, which every primary config of `conf` names first in its defaults."""
    ConfigStore.instance().store(name="schema", node=Config)
