"""Fine-tuning: which settings a run takes over from the model that it starts from."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any

from ds2.config.schema import AlphabetConfig, Config

_SECTIONS = ("model", "features", "alphabet")
_OF_THE_RUN = ("model.backend",)  # what the machine can do, not what the model is
_LABELS = ("symbols", "pieces", "pieces_file")


@dataclass(frozen=True)
class Inheritance:
    """What came of two configurations: sentences for the log, each empty where there is nothing to say."""

    replaced: str  # values of a recipe or a default that gave way to the model's
    differing: str  # values that were given and are not the model's


def inherit(config: Config, stored: Config, given: Collection[str]) -> Inheritance:
    """Give `config` the architecture, features, sample rate and alphabet of another run, but for what was given.

    What a recipe says of model and features gives way: it is meant for training from nothing. What it says of the
    alphabet is of the language and stays, as do values given on the command line.

    Args:
        config: changed in place.
        stored: of the model that this run starts from.
        given: keys and groups of the command line, such as `model`, `model.depth`, `alphabet.symbols`.
    """
    replaced, differing = [], []
    for section in _SECTIONS:
        for name in (field.name for field in fields(getattr(config, section))):
            key = f"{section}.{name}"
            if key in _OF_THE_RUN:
                continue
            mine, theirs = getattr(getattr(config, section), name), getattr(getattr(stored, section), name)
            if mine == theirs:
                continue
            if _explicit(config, section, name, given):
                if name != "pieces_file":
                    differing.append(f"{key}={_short(mine)} (there {_short(theirs)})")
            else:
                setattr(getattr(config, section), name, theirs)
                replaced.append(f"{key}={_short(theirs)} (not {_short(mine)})")
    rate_hz, theirs_hz = config.data.sample_rate_hz, stored.data.sample_rate_hz
    if rate_hz != theirs_hz:
        if "data.sample_rate_hz" in given:
            differing.append(f"data.sample_rate_hz={rate_hz} (there {theirs_hz})")
        else:
            config.data.sample_rate_hz = theirs_hz
            replaced.append(f"data.sample_rate_hz={theirs_hz} (not {rate_hz})")
    return Inheritance(", ".join(replaced), ", ".join(differing))


def _explicit(config: Config, section: str, name: str, given: Collection[str]) -> bool:
    names = _LABELS if section == "alphabet" and name in _LABELS else (name,)
    if section in given or any(f"{section}.{one}" in given for one in names):
        return True
    default = AlphabetConfig()
    return section == "alphabet" and any(getattr(config.alphabet, one) != getattr(default, one) for one in names)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
