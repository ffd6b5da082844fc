"""Which decoder settings a model is recognised with: those tuned for it, else those of its own config."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from ds2.config.convert import nearest_key, to_config
from ds2.config.schema import Config, ConfigError, DecodeConfig
from ds2.system.files import write_text


def tuned_file(model_file: Path) -> Path:
    """Where the tuned settings of a model file lie: best.safetensors has best-decode.yaml."""
    return model_file.with_name(f"{model_file.stem}-decode.yaml")


def decode_settings(model_file: Path, config: Config, changes: Sequence[str] = ()) -> DecodeConfig:
    """Return the settings that apply to a model.

    Args:
        model_file: beside which `ds2 lm tune` may have written tuned settings; without them the model's own are used.
        config: of the model.
        changes: single values on top, `decode.KEY=VALUE`.

    Raises:
        ConfigError: an unknown key, a wrong type or value, or a tuned file that does not fit.
    """
    file = tuned_file(model_file)
    try:
        base = OmegaConf.structured(Config(decode=config.decode, run_dir=config.run_dir))
        if file.is_file():
            base = OmegaConf.merge(base, {"decode": OmegaConf.load(file)})
        merged = OmegaConf.merge(base, OmegaConf.from_dotlist(list(changes)))
    except OmegaConfBaseException as error:
        place = f"{file}, {' '.join(changes)}" if file.is_file() else " ".join(changes)
        unknown = isinstance(error, ConfigKeyError | ConfigAttributeError)
        near = nearest_key(str(error.full_key)) if unknown else None
        hint = f"; did you mean {near!r}?" if near else ""
        raise ConfigError(f"{place}: {str(error).splitlines()[0]}{hint}") from error
    return to_config(cast(DictConfig, merged)).decode


def save_settings(options: DecodeConfig, path: Path) -> None:
    """Write settings where `decode_settings` picks them up."""
    write_text(path, OmegaConf.to_yaml(OmegaConf.structured(options)))
