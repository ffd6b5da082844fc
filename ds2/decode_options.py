"""Which decoder settings a command uses: those given, else those tuned for the model, else those of its config."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from ds2.commands.compose import compose_config
from ds2.config.convert import nearest_key, to_config
from ds2.config.schema import Config, ConfigError, DecodeConfig
from ds2.system.files import write_text


def tuned_file(model_file: Path) -> Path:
    """Where the tuned settings of a model file lie: best.safetensors has best-decode.yaml."""
    return model_file.with_name(f"{model_file.stem}-decode.yaml")


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part `decode=NAME` and `decode.KEY=VALUE` from the other arguments of a command line: (overrides, others)."""
    mine = [a for a in arguments if a.startswith(("decode=", "decode."))]
    return mine, [a for a in arguments if a not in mine]


def resolve_options(overrides: Sequence[str], model_file: Path, config: Config) -> DecodeConfig:
    """Return the settings that apply.

    `decode=NAME` starts from conf/decode/NAME.yaml; without it the file that `ds2 lm tune` wrote beside the model is
    the start, or without that the model's own config. `decode.KEY=VALUE` changes single values.

    Raises:
        ConfigError: an unknown name, key, type or value, or a tuned file that does not fit.
    """
    if any(override.startswith("decode=") for override in overrides):
        return compose_config(overrides).decode
    file = tuned_file(model_file)
    try:
        base = OmegaConf.structured(Config(decode=config.decode, run_dir=config.run_dir))
        if file.is_file():
            base = OmegaConf.merge(base, {"decode": OmegaConf.load(file)})
        merged = OmegaConf.merge(base, OmegaConf.from_dotlist(list(overrides)))
    except OmegaConfBaseException as error:
        place = f"{file}, {' '.join(overrides)}" if file.is_file() else " ".join(overrides)
        unknown = isinstance(error, ConfigKeyError | ConfigAttributeError)
        near = nearest_key(str(error.full_key)) if unknown else None
        hint = f"; did you mean {near!r}?" if near else ""
        raise ConfigError(f"{place}: {str(error).splitlines()[0]}{hint}") from error
    return to_config(cast(DictConfig, merged)).decode


def save_options(options: DecodeConfig, path: Path) -> None:
    """Write settings where `resolve_options` picks them up."""
    write_text(path, OmegaConf.to_yaml(OmegaConf.structured(options)))
