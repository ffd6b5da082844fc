"""What a configuration must hold beyond its types: named values, ranges, and settings that fit together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from ds2.config.allowed import KEY, Range
from ds2.config.schema import Config, ConfigError


def check_allowed(section: Any, key: str = "") -> None:
    """Check every setting of a dataclass, and of those inside it, against what its declaration allows.

    Args:
        section: an instance of a class of `ds2.config.schema`.
        key: its name in messages, such as "model".
    Raises:
        ConfigError: the first value that is not allowed; names its key and what is.
    """
    for name, value, allowed in _settings(section, f"{key}." if key else ""):
        if isinstance(allowed, tuple):
            _require(value in allowed, f"{name}={value!r} is not one of {', '.join(allowed)}")
        elif isinstance(allowed, Range):
            given = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else [value]
            fits = not allowed.lengths or len(given) in allowed.lengths
            _require(fits and all(number in allowed for number in given), f"{name}={value}: allowed are {allowed}")


def _settings(section: Any, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, value, what is allowed or None) of a dataclass's settings and of those of dataclasses within."""
    for declared in fields(section):
        value, key = getattr(section, declared.name), f"{prefix}{declared.name}"
        if is_dataclass(value):
            yield from _settings(value, f"{key}.")
        elif isinstance(value, list) and value and is_dataclass(value[0]):
            for index, entry in enumerate(value):
                yield from _settings(entry, f"{key}[{index}].")
        else:
            yield key, value, declared.metadata.get(KEY)


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


def check(config: Config) -> None:
    """Raise `ConfigError` for values and combinations that compose but cannot work."""
    check_allowed(config)
    batching, augment, features = config.batching, config.augment, config.features
    _require(
        batching.auto or (batching.utterances > 0) != (batching.audio_s > 0),
        f"set one of batching.utterances={batching.utterances} and batching.audio_s={batching.audio_s} above 0 "
        "and the other to 0: batches hold either a fixed count or a budget of audio",
    )
    for key, pair in (("augment.gain_db", augment.gain_db), ("augment.noise_snr_db", augment.noise_snr_db)):
        _require(not pair or pair[0] <= pair[1], f"{key}={pair} must be [low, high]")
    _require(
        augment.noise_probability == 0 or bool(augment.noise_snr_db),
        "augment.noise_probability is set: augment.noise_snr_db=[low, high] is needed too",
    )
    _require(
        features.step_s <= features.window_s,
        f"features.step_s={features.step_s} above features.window_s={features.window_s} would skip audio",
    )
    _require(
        config.data.min_duration_s < config.data.max_duration_s,
        f"data.min_duration_s={config.data.min_duration_s} must be below "
        f"data.max_duration_s={config.data.max_duration_s}",
    )
    symbols = config.alphabet.symbols
    _require(len(symbols) > 0, "alphabet.symbols is empty: list every character that transcripts may hold")
    repeated = sorted({s for s in symbols if symbols.count(s) > 1})
    _require(not repeated, f"alphabet.symbols lists {repeated} more than once")
    _require(
        config.model.bidirectional is False or config.model.max_lookahead_ms == 0,
        "model.bidirectional=true sees the whole utterance: set model.max_lookahead_ms=0 to say that this is meant",
    )
