"""Checks of a configuration beyond types: names, ranges, and settings that do not work together."""

import logging
from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass
from typing import Any

from ds2.config.allowed import ALLOWED, REMOVED, Range
from ds2.config.schema import CODECS, Config, ConfigError
from ds2.system.terminal import warn_once

log = logging.getLogger(__name__)


def check_allowed(section: Any, key: str = "") -> None:
    """Check every setting of a dataclass, nested ones included, against its declaration.

    A setting that was removed and has a value other than its default is warned of, once a process. In messages the
    section is called `key`, such as "model".

    Raises:
        ConfigError: a value that is not allowed; the message names its key and the allowed values.
    """
    for name, value, declared in _settings(section, f"{key}." if key else ""):
        allowed, removed = declared.metadata.get(ALLOWED), declared.metadata.get(REMOVED)
        if removed is not None and value != removed[0]:
            warn_once(log, f"{name}={value} has no effect since this setting was removed: {removed[1]}")
        elif isinstance(allowed, tuple):
            _require(value in allowed, f"{name}={value!r} is not one of {', '.join(allowed)}")
        elif isinstance(allowed, Range):
            numbers = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else [value]
            fits = not allowed.lengths or len(numbers) in allowed.lengths
            _require(fits and all(number in allowed for number in numbers), f"{name}={value}: allowed are {allowed}")


def _settings(section: Any, prefix: str) -> Iterator[tuple[str, Any, Field[Any]]]:
    """Yield (key, value, declaration) of the settings of a dataclass and of the dataclasses inside it."""
    for declared in fields(section):
        value, key = getattr(section, declared.name), f"{prefix}{declared.name}"
        if is_dataclass(value):
            yield from _settings(value, f"{key}.")
        elif isinstance(value, list) and value and is_dataclass(value[0]):
            for index, entry in enumerate(value):
                yield from _settings(entry, f"{key}[{index}].")
        else:
            yield key, value, declared


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


def check(config: Config) -> None:
    """Raise ConfigError for values and combinations that cannot work."""
    check_allowed(config)
    _check_audio(config)
    _check_training(config)
    _check_ranks(config)
    symbols = config.alphabet.symbols
    _require(len(symbols) > 0, "alphabet.symbols is empty: list the characters of the transcripts")
    repeated = sorted({s for s in symbols if symbols.count(s) > 1})
    _require(not repeated, f"alphabet.symbols lists {repeated} more than once")
    _require(
        not config.model.bidirectional or config.model.max_lookahead_ms == 0,
        "model.bidirectional=true needs the whole utterance: set model.max_lookahead_ms=0 to allow it",
    )


def _check_audio(config: Config) -> None:
    """Check manifests, batches, augmentation, features and durations."""
    batching, augment, features = config.batching, config.augment, config.features
    manifests, repeats = config.data.train, config.data.repeats
    _require(
        len(repeats) in (0, len(manifests)),
        f"data.repeats={repeats} needs a number for each manifest of data.train={manifests}, or none at all",
    )
    _require(
        batching.auto or (batching.utterances > 0) != (batching.audio_s > 0),
        f"set one of batching.utterances={batching.utterances} and batching.audio_s={batching.audio_s} above 0 "
        "and the other to 0: a batch has either a fixed count or a fixed amount of audio",
    )
    for name in ("gain_db", "noise_snr_db", "room_rt60_s", "vtlp"):
        pair = getattr(augment, name)
        _require(not pair or pair[0] <= pair[1], f"augment.{name}={pair} must be [low, high]")
    _require(
        augment.noise_probability == 0 or bool(augment.noise_snr_db),
        "augment.noise_probability is set: augment.noise_snr_db=[low, high] is needed too",
    )
    _require(
        augment.time_warp_s == 0 or augment.time_warp_s >= features.step_s,
        f"augment.time_warp_s={augment.time_warp_s} is less than a frame (features.step_s={features.step_s}): set at "
        "least one frame, such as 0.8, or 0 for no time warping",
    )
    probabilities = (augment.noise_probability, augment.room_probability, augment.codec_probability)
    _require(
        augment.noisy_epochs == 0 or max(probabilities) > 0,
        f"augment.noisy_epochs={augment.noisy_epochs} ends noise, rooms and codecs, but there are none: set "
        "augment.noise_probability, augment.room_probability or augment.codec_probability above 0",
    )
    unknown = [codec for codec in augment.codecs if codec not in CODECS]
    _require(not unknown, f"augment.codecs has {unknown}, allowed are {', '.join(CODECS)}")
    for key, values in (("augment.codecs", augment.codecs), ("augment.noise_colours", augment.noise_colours)):
        _require(bool(values), f"{key} is empty: name at least one, or set the probability to 0")
    _require(
        features.step_s <= features.window_s,
        f"features.step_s={features.step_s} above features.window_s={features.window_s} would skip audio: lower it",
    )
    _require(
        config.data.min_duration_s < config.data.max_duration_s,
        f"data.min_duration_s={config.data.min_duration_s} must be below "
        f"data.max_duration_s={config.data.max_duration_s}",
    )


def _check_training(config: Config) -> None:
    _require(
        config.optim.schedule != "timed_cosine" or config.train.max_minutes > 0,
        "optim.schedule=timed_cosine ends at train.max_minutes, which is 0: set it above 0, or use cosine",
    )
    _require(
        config.train.consistency == 0 or config.augment.time_masks + config.augment.frequency_masks > 0,
        f"train.consistency={config.train.consistency} compares two differently masked views of an utterance: "
        "set augment.time_masks or augment.frequency_masks above 0",
    )
    penalty = f"train.delay_penalty={config.train.delay_penalty}"
    _require(
        config.train.delay_penalty == 0 or config.train.objective == "ctc",
        f"{penalty} weighs alignments of the CTC loss, and the denominator of train.objective=ctc_crf sums over "
        "alignments without these weights: set one of them back (delay_penalty=0 or objective=ctc)",
    )
    _require(
        config.train.delay_penalty == 0 or not config.model.bidirectional,
        f"{penalty} makes words come earlier in a stream, and model.bidirectional=true waits for the whole utterance: "
        "set train.delay_penalty=0, or model.bidirectional=false",
    )


def _check_ranks(config: Config) -> None:
    comm = config.comm
    _require(
        comm.min_ranks == 1 or comm.min_ranks <= comm.max_ranks,
        f"comm.min_ranks={comm.min_ranks} must be at most comm.max_ranks={comm.max_ranks}, how many ranks may take "
        "part (0: a fixed number, that of the launcher)",
    )
    _require(
        comm.max_ranks == 0 or config.checkpoint.resume,
        f"comm.max_ranks={comm.max_ranks} lets processes join a run that has begun: leave checkpoint.resume=true",
    )
