"""The decoder settings of a model: those tuned for it, or without them those of its config."""

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import cast

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from ds2.config.convert import expected, nearest_key, read_yaml, text_keys, to_config, to_tree
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
    _refuse_interpolation(model_file, repr(config.decode))
    if not place:
        return deepcopy(config.decode)  # it was checked when the model was read
    try:
        base: DictConfig | ListConfig = to_tree(Config(decode=config.decode, run_dir=""))
        if tuned and file.is_file():
            base = OmegaConf.merge(base, {"decode": _located(file, _read(file))})
        texts = {key: value for change in changes for key, _, value in [change.partition("=")] if key in text_keys()}
        others = [change for change in changes if change.partition("=")[0] not in text_keys()]
        merged = OmegaConf.merge(base, OmegaConf.from_dotlist(others))
        for key, value in texts.items():  # not parsed: YAML would read some paths as lists, and words as numbers
            listed = isinstance(OmegaConf.select(merged, key), ListConfig)
            OmegaConf.update(merged, key, _words(key, value) if listed else value)
    except OverflowError as error:  # a number of 400 digits
        raise ConfigError(f"{place}: {str(error).splitlines()[0]}") from error
    except (yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{place}: not a value ({reason}); write values as in YAML: 0.5, true, [a,b]") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{place}: {_reason(error, changes)}") from error
    return to_config(cast(DictConfig, merged)).decode


def _reason(error: OmegaConfBaseException, changes: Sequence[str]) -> str:
    """Return the key that OmegaConf refuses, what it allows, or the nearest key if there is none of this name."""
    key = str(error.full_key or "")
    mappings = [name for name, _, value in (change.partition("=") for change in changes) if value.startswith("{")]
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        near = nearest_key(key)
        wrong, hint = [name for name in mappings if name != key], f"; did you mean {near!r}?" if near else ""
    else:
        wrong, hint = [key, *mappings], ""
    reason = next(filter(None, (expected(name, error.value) for name in wrong)), str(error).splitlines()[0])
    return f"{key}: {reason}{hint}" if key else f"{reason}{hint}"


def _words(key: str, value: str) -> list[str]:
    """Read a list of words, each as it is written: [yes, 007]."""
    try:
        words = yaml.load(value, Loader=yaml.BaseLoader)  # texts, lists and mappings only
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{key}={value} is no list: {' '.join(str(error).split())}") from error
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ConfigError(f"{key}={value}: {expected(key, words)}")
    return words


def _read(file: Path) -> DictConfig:
    """The values of a tuned file; errors as `decode_settings`, those of OmegaConf as they are."""
    try:
        if (size := file.stat().st_size) > _MAX_BYTES:
            raise ConfigError(f"{file}: has {size} bytes, {_MAX_BYTES} at most; delete it or run `ds2 lm tune` again")
        text = file.read_text(encoding="utf-8")
        _refuse_interpolation(file, text)
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):  # a few lines may become gigabytes
            raise ConfigError(f"{file}: holds an alias (*NAME); write the value out, or run `ds2 lm tune` again")
        values = read_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, numbers of 5000 digits
        reason = " ".join(str(error).split())
        raise ConfigError(f"{file}: no YAML ({reason}); delete it or run `ds2 lm tune` again") from error
    if not isinstance(values, dict | None):
        raise ConfigError(f"{file}: expected lines `KEY: VALUE`; delete it or run `ds2 lm tune` again")
    return OmegaConf.create(values or {})


def _located(file: Path, values: DictConfig) -> DictConfig:
    """Find language models that a tuned file names in its own folder, so that this can be moved."""
    for key in ("lm", "rescore"):
        path = values.get(key)
        if isinstance(path, str) and path and (file.parent / path).is_file():
            values[key] = str(file.parent / path)
    return values


def _refuse_interpolation(file: Path, text: str) -> None:
    """Refuse interpolations: values in files are data, OmegaConf must not look them up in the environment."""
    if "${" in text:
        raise ConfigError(f"{file}: decode: holds '${{', but settings in files are plain values: write them out")


def save_settings(options: DecodeConfig, path: Path) -> None:
    """Write settings to a file that `decode_settings` reads."""
    write_text(path, OmegaConf.to_yaml(OmegaConf.structured(options)))
