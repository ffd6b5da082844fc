"""Decoder settings on a command line: `decode=NAME` and `decode.KEY=VALUE`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ds2.commands.compose import compose_config
from ds2.config.schema import Config, DecodeConfig
from ds2.recognition.settings import decode_settings


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments `decode=NAME` and `decode.KEY=VALUE`, and the others."""
    overrides = [a for a in arguments if a.startswith(("decode=", "decode."))]
    return overrides, [a for a in arguments if a not in overrides]


def resolve_options(overrides: Sequence[str], model_file: Path, config: Config, *, tuned: bool = True) -> DecodeConfig:
    """Return the decoder settings of a command line.

    The first that exists is the base: conf/decode/NAME.yaml of `decode=NAME`, the file that `ds2 lm tune` wrote beside
    the model (unless `tuned` is False), the model's own config. `decode.KEY=VALUE` changes single values.

    Raises:
        ConfigError: an unknown name, key, type or value, or a tuned file that does not fit.
    """
    if any(override.startswith("decode=") for override in overrides):
        return compose_config([_quoted(override) for override in overrides]).decode
    return decode_settings(model_file, config, overrides, tuned=tuned)


def _quoted(override: str) -> str:
    """Quote the path of a language model for Hydra, in whose grammar brackets and commas mean lists."""
    key, _, value = override.partition("=")
    if key not in ("decode.lm", "decode.rescore") or value[:1] in ("'", '"') or "${" in value:
        return override
    escaped = value.replace("\\", "\\\\").replace("'", "\\'") if "'" in value else value
    return f"{key}='{escaped}'"
