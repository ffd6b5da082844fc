"""What a configuration must hold beyond its types: named values, ranges, and settings that fit together."""

from __future__ import annotations

from typing import Any

from ds2.config.schema import Config, ConfigError

DECODE_METHODS = ("greedy", "beam", "native", "ctcdecode")
_CHOICES: dict[str, tuple[str, ...]] = {
    "data.on_bad_utterance": ("stop", "skip"),
    "data.cache": ("none", "disk"),
    "alphabet.case": ("lower", "upper", "keep"),
    "alphabet.unknown": ("stop", "drop"),
    "features.kind": ("log_spectrogram", "log_mel"),
    "features.normalise": ("corpus", "none"),
    "model.cell": ("rnn", "lstm", "gru"),
    "model.nonlinearity": ("relu", "clipped_relu", "tanh"),
    "model.skip_first": ("none", "projection"),
    "model.backend": ("auto", "persistent", "gemm", "cpu", "reference"),
    "optim.name": ("sgd", "adamw"),
    "optim.schedule": ("anneal", "cosine", "constant"),
    "train.precision": ("auto", "fp32", "bf16"),
    "train.graphs": ("auto", "on", "off"),
    "comm.backend": ("auto", "single", "mpi", "nccl"),
    "comm.batch_norm": ("shared", "local"),
    "decode.method": DECODE_METHODS,
}
_POSITIVE = (
    "data.sample_rate_hz",
    "features.window_s",
    "features.step_s",
    "features.mels",
    "features.statistics_utterances",
    "batching.buckets",
    "model.hidden",
    "model.depth",
    "model.clip",
    "optim.learning_rate",
    "optim.anneal",
    "train.epochs",
    "train.accumulate",
    "train.evaluate_every_epochs",
    "train.evaluate_from_epoch",
    "train.log_every_steps",
    "checkpoint.keep_last",
    "comm.bucket_mib",
    "comm.timeout_s",
)
_NOT_NEGATIVE = (
    "augment.frequency_masks",
    "augment.time_masks",
    "augment.frequency_width",
    "augment.time_width_s",
    "model.skip",
    "model.row_convs",
    "model.row_conv_context",
    "model.max_lookahead_ms",
    "model.dropout",
    "optim.weight_decay",
    "optim.warmup_steps",
    "optim.clip_norm",
    "train.max_minutes",
    "train.max_steps",
    "train.early_stop_epochs",
    "train.max_skipped_steps",
    "checkpoint.every_minutes",
    "checkpoint.every_steps",
)


def _value(config: Config, key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        node = getattr(node, part)
    return node


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


def check(config: Config) -> None:
    """Raise `ConfigError` for values and combinations that compose but cannot work."""
    for key, allowed in _CHOICES.items():
        value = _value(config, key)
        _require(value in allowed, f"{key}={value!r} is not one of {', '.join(allowed)}")
    for key in _POSITIVE:
        _require(_value(config, key) > 0, f"{key}={_value(config, key)} must be above 0")
    for key in _NOT_NEGATIVE:
        _require(_value(config, key) >= 0, f"{key}={_value(config, key)} must not be below 0")
    batching, augment, features = config.batching, config.augment, config.features
    _require(
        (batching.utterances > 0) != (batching.audio_s > 0),
        f"set one of batching.utterances={batching.utterances} and batching.audio_s={batching.audio_s} above 0 "
        "and the other to 0: batches hold either a fixed count or a budget of audio",
    )
    for key, pair in (("augment.gain_db", augment.gain_db), ("augment.noise_snr_db", augment.noise_snr_db)):
        _require(not pair or (len(pair) == 2 and pair[0] <= pair[1]), f"{key}={pair} must be [low, high]")
    _require(
        0 <= augment.noise_probability <= 1, f"augment.noise_probability={augment.noise_probability} is not in 0..1"
    )
    _require(
        all(0.25 <= s <= 4 for s in augment.speed), f"augment.speed={augment.speed}: factors lie between 0.25 and 4"
    )
    _require(
        augment.noise_probability == 0 or bool(augment.noise_snr_db),
        "augment.noise_probability is set: augment.noise_snr_db=[low, high] is needed too",
    )
    _require(0 <= augment.time_fraction <= 1, f"augment.time_fraction={augment.time_fraction} is not in 0..1")
    _require(
        features.step_s <= features.window_s,
        f"features.step_s={features.step_s} above features.window_s={features.window_s} would skip audio",
    )
    _require(
        config.data.min_duration_s < config.data.max_duration_s,
        f"data.min_duration_s={config.data.min_duration_s} must be below "
        f"data.max_duration_s={config.data.max_duration_s}",
    )
    _require(config.data.workers >= -1, f"data.workers={config.data.workers}: give -1 (automatic), 0 or a count")
    _require(0 <= config.train.average_decay < 1, f"train.average_decay={config.train.average_decay} is not in [0, 1)")
    _require(
        config.optim.name != "sgd" or 0 <= config.optim.momentum < 1,
        f"optim.momentum={config.optim.momentum} is not in [0, 1)",
    )
    _require(len(config.optim.betas) == 2, f"optim.betas={config.optim.betas} must be two numbers")
    symbols = config.alphabet.symbols
    _require(len(symbols) > 0, "alphabet.symbols is empty: list every character that transcripts may hold")
    repeated = sorted({s for s in symbols if symbols.count(s) > 1})
    _require(not repeated, f"alphabet.symbols lists {repeated} more than once")
    _require(
        config.model.bidirectional is False or config.model.max_lookahead_ms == 0,
        "model.bidirectional=true sees the whole utterance: set model.max_lookahead_ms=0 to say that this is meant",
    )
