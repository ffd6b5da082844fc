"""The decoder settings of a model: those tuned for it, or without them those of its config."""

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ds2.config.check import check
from ds2.config.convert import declared_settings, read_yaml, to_config
from ds2.config.schema import Config, ConfigError, DecodeConfig
from ds2.system.files import write_text

_MAX_BYTES = 1 << 20  # of a file of tuned settings


def tuned_file(model_file: Path) -> Path:
    """The path of a model file's tuned settings: best-decode.yaml for best.safetensors."""
    return model_file.with_name(f"{model_file.stem}-decode.yaml")


def decode_settings(
    model_file: Path, config: Config, changes: Sequence[str] = (), *, tuned: bool = True
) -> DecodeConfig:
    """Return the settings that apply to a model.

    Args:
        model_file: `ds2 lm tune` writes tuned settings next to it; without them the model's own are used.
        changes: values that override them, `decode.KEY=VALUE`.
        tuned: whether to use tuned settings.

    Raises:
        ConfigError: an unknown key, a wrong type or value, or a tuned file that does not fit.
    """
    file = tuned_file(model_file)
    place = ", ".join([str(file)] * file.is_file() + list(changes))
    values = asdict(config.decode)
    if tuned and file.is_file():
        values |= _located(file, _read(file))
    try:
        for key, _, text in (change.partition("=") for change in changes):
            values[key.removeprefix("decode.")] = _value(key, text)
        changed = to_config({"decode": values, "run_dir": ""})
        check(changed)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{place}: not a value ({reason}); write values as in YAML: 0.5, true, [a,b]") from error
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error
    return changed.decode


def _value(key: str, text: str) -> object:
    """Read a value of the command line: texts, also those in lists, stay as they are, [yes, 007]."""
    if "${" in text:
        text = str(OmegaConf.create({"text": text}).text)
    _, kind = declared_settings().get(key, (None, None))
    if kind is str:
        return text
    return yaml.load(text, Loader=yaml.BaseLoader) if kind == list[str] else read_yaml(text)


def _read(file: Path) -> dict[str, Any]:
    """The values of a tuned file; errors as `decode_settings`."""
    try:
        if (size := file.stat().st_size) > _MAX_BYTES:
            raise ConfigError(f"{file}: has {size} bytes, {_MAX_BYTES} at most; delete it or run `ds2 lm tune` again")
        text = file.read_text(encoding="utf-8")
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):  # a few lines may become gigabytes
            raise ConfigError(f"{file}: holds an alias (*NAME); write the value out, or run `ds2 lm tune` again")
        values = read_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, numbers of 5000 digits
        reason = " ".join(str(error).split())
        raise ConfigError(f"{file}: no YAML ({reason}); delete it or run `ds2 lm tune` again") from error
    if not isinstance(values, dict | None):
        raise ConfigError(f"{file}: expected lines `KEY: VALUE`; delete it or run `ds2 lm tune` again")
    return values or {}


def _located(file: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Find language models that a tuned file names in its own folder, so that this can be moved."""
    for key in ("lm", "rescore"):
        path = values.get(key)
        if isinstance(path, str) and path and os.path.isfile(file.parent / path):  # a stranger's may be too long
            values[key] = str(file.parent / path)
    return values


def save_settings(options: DecodeConfig, path: Path) -> None:
    """Write settings to a file that `decode_settings` reads."""
    write_text(path, OmegaConf.to_yaml(OmegaConf.structured(options)))
