"""Seeded augmentation of waveforms, in the loader: speed, tempo, reverberation, noise, codecs, gain.

Every draw depends on the seed, the epoch, the utterance's index and the effect alone, never on worker, rank or batch.
A resumed run, or a run on another number of ranks, sees the same audio as one without interruption.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import soxr
from numpy.typing import NDArray

from ds2.audio.effects import apply_codec, change_tempo, convolve, room_response
from ds2.config.schema import AugmentConfig

Waveform = NDArray[np.float32]
NoiseSource = Callable[[np.random.Generator, int], Waveform]
"""(generator, number of samples) -> noise of any level."""
EffectRng = Callable[[str], np.random.Generator]
"""Name of an effect -> its generator for one utterance in one epoch: `utterance_rng` without its first arguments."""


def utterance_rng(seed: int, epoch: int, index: int, effect: str) -> np.random.Generator:
    """Return the generator of one utterance's draws in one epoch; different arguments give independent generators.

    Args:
        seed, epoch, index: not negative; index is the utterance's position in the training set.
        effect: name of what is drawn; each has a generator of its own, so that a new effect does not change others.
    """
    return np.random.default_rng([seed, epoch, index, zlib.crc32(effect.encode())])


def of_view(effect: str, view: int) -> str:
    """Return the name of an effect in one of several views of an utterance; that of view 0 is `effect` itself."""
    return f"{effect}, view {view}" if view else effect


def augment_waveform(
    waveform: Waveform, config: AugmentConfig, sample_rate_hz: int, rng_of: EffectRng, noise: NoiseSource
) -> Waveform:
    """Return the waveform after speed, tempo, room, noise, codec and gain, in this order.

    Args:
        waveform: (N,) float32 in [-1, 1]; not written to.
        config: kinds and their ranges.
        sample_rate_hz: of the waveform.
        rng_of: the utterance's generators, by effect. Speed, noise and gain share "waveform": its four decisions are
            drawn whether used or not, so that switching one off does not change the others. Any other effect has its
            own generator, because the noise itself is drawn after the four.
        noise: source of noise, scaled to the drawn ratio of mean powers over the whole utterance. Nothing is added to
            or from digital silence, for which no ratio exists.
    Returns:
        (N',) float32, N' = N / (speed factor x tempo factor); not clipped, so values may exceed 1.
    """
    rng = rng_of("waveform")
    speed_draw, gain_draw, noise_draw, snr_draw = rng.random(4)
    if config.speed:
        factor = config.speed[int(speed_draw * len(config.speed))]
        if factor != 1.0:
            waveform = soxr.resample(waveform, sample_rate_hz * factor, sample_rate_hz)
    if config.tempo:
        waveform = change_tempo(
            waveform, config.tempo[int(rng_of("tempo").integers(len(config.tempo)))], sample_rate_hz
        )
    if config.room_probability and len(waveform):
        room_rng = rng_of("room")
        if room_rng.random() < config.room_probability:
            low, high = config.room_rt60_s
            waveform = convolve(waveform, room_response(room_rng, sample_rate_hz, (low, high)))
    if noise_draw < config.noise_probability and len(waveform):
        added = noise(rng, len(waveform))
        speech_power, noise_power = _mean_power(waveform), _mean_power(added)
        if speech_power > 0.0 and noise_power > 0.0:
            low, high = config.noise_snr_db
            snr = 10.0 ** ((low + snr_draw * (high - low)) / 10.0)
            waveform = waveform + added * np.float32(np.sqrt(speech_power / (noise_power * snr)))
    if config.codec_probability:
        codec = rng_of("codec")
        if codec.random() < config.codec_probability:
            waveform = apply_codec(waveform, config.codecs[int(codec.integers(len(config.codecs)))], sample_rate_hz)
    if config.gain_db:
        low, high = config.gain_db
        waveform = waveform * np.float32(10.0 ** ((low + gain_draw * (high - low)) / 20.0))
    return waveform


def of_epoch(config: AugmentConfig, epoch: int) -> AugmentConfig:
    """Return the augmentation of an epoch, counted from 1: no noise, reverberation or codecs after `noisy_epochs`."""
    if not 0 < config.noisy_epochs < epoch:
        return config
    return replace(config, noise_probability=0.0, room_probability=0.0, codec_probability=0.0)


def speed_range(config: AugmentConfig) -> tuple[float, float]:
    """Return the least and greatest factor by which utterances may be sped up: speed times tempo."""
    factors = [speed * tempo for speed in config.speed or [1.0] for tempo in config.tempo or [1.0]]
    return min(factors), max(factors)


def recorded_noise(recordings: Sequence[Waveform], rng: np.random.Generator, samples: int) -> Waveform:
    """Draw a random segment (samples,) float32 of a random recording, repeated where it is too short.

    Args:
        recordings: at least one, each (N,) float32; one is read per draw.
        rng: the utterance's generator.
        samples: length.
    """
    recording = recordings[int(rng.integers(len(recordings)))]
    start = int(rng.integers(max(1, len(recording) - samples + 1)))
    if len(recording) == 0:
        return np.zeros(samples, np.float32)
    return np.resize(recording[start : start + samples], samples)


def _mean_power(waveform: Waveform) -> float:
    return float(np.square(waveform).mean())  # not np.dot: the bits of a threaded sum depend on the machine
