"""Seeded augmentation of waveforms, in the loader: speed, tempo, rooms, noise, codecs, gain.

Every draw depends on the seed, the epoch, the utterance's index and the purpose alone, never on worker, rank or
batch: a resumed run, or one on another number of ranks, hears what the unbroken one heard.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import soxr
from numpy.typing import NDArray

from ds2.audio.degrade import coded, convolved, room_response
from ds2.audio.tempo import stretched
from ds2.config.schema import AugmentConfig

Waveform = NDArray[np.float32]
NoiseSource = Callable[[np.random.Generator, int], Waveform]
"""Draws that many samples of noise at any level."""
Draws = Callable[[str], np.random.Generator]
"""The generator of one utterance's draws of one purpose in one epoch: `utterance_rng` but for its last argument."""


def utterance_rng(seed: int, epoch: int, index: int, purpose: str) -> np.random.Generator:
    """Return the generator of one utterance's draws in one epoch; streams of different arguments are independent.

    Args:
        seed, epoch, index: not negative; index is the utterance's position in the training set.
        purpose: names what is drawn, so that a new kind of draw never shifts the others.
    """
    return np.random.default_rng([seed, epoch, index, zlib.crc32(purpose.encode())])


def of_view(purpose: str, view: int) -> str:
    """The purpose of draws for one of several views of an utterance; the first one's is `purpose` itself."""
    return f"{purpose}, view {view}" if view else purpose


def augment_waveform(
    waveform: Waveform, config: AugmentConfig, sample_rate_hz: int, draws: Draws, noise: NoiseSource
) -> Waveform:
    """Return the waveform after speed, tempo, room, noise, codec and gain, in this order.

    Args:
        waveform: (N,) float32 in [-1, 1]; not written to.
        config: which of them, and their ranges.
        sample_rate_hz: of the waveform.
        draws: the utterance's generators, by purpose. Speed, noise and gain share one, whose four decisions are drawn
            whether used or not, so switching one kind off leaves the others as they were; another kind takes a purpose
            of its own, since what follows the four is the noise.
        noise: source of noise, scaled here to the drawn ratio of mean powers over the whole utterance. Without speech
            or noise power (digital silence) no ratio exists and nothing is added.
    Returns:
        (N',) float32, N' = N / (speed factor x tempo factor); gain and noise may exceed 1 in size: nothing is clipped.
    """
    rng = draws("waveform")
    speed_draw, gain_draw, noise_draw, snr_draw = rng.random(4)
    if config.speed:
        factor = config.speed[int(speed_draw * len(config.speed))]
        if factor != 1.0:
            waveform = soxr.resample(waveform, sample_rate_hz * factor, sample_rate_hz)
    if config.tempo:
        waveform = stretched(waveform, config.tempo[int(draws("tempo").integers(len(config.tempo)))], sample_rate_hz)
    if config.room_probability and len(waveform):
        room = draws("room")
        if room.random() < config.room_probability:
            low, high = config.room_rt60_s
            waveform = convolved(waveform, room_response(room, sample_rate_hz, (low, high)))
    if noise_draw < config.noise_probability and len(waveform):
        added = noise(rng, len(waveform))
        speech_power, noise_power = _mean_power(waveform), _mean_power(added)
        if speech_power > 0.0 and noise_power > 0.0:
            low, high = config.noise_snr_db
            snr = 10.0 ** ((low + snr_draw * (high - low)) / 10.0)
            waveform = waveform + added * np.float32(np.sqrt(speech_power / (noise_power * snr)))
    if config.codec_probability:
        codec = draws("codec")
        if codec.random() < config.codec_probability:
            waveform = coded(waveform, config.codecs[int(codec.integers(len(config.codecs)))], sample_rate_hz)
    if config.gain_db:
        low, high = config.gain_db
        waveform = waveform * np.float32(10.0 ** ((low + gain_draw * (high - low)) / 20.0))
    return waveform


def of_epoch(config: AugmentConfig, epoch: int) -> AugmentConfig:
    """What is done to waveforms in an epoch, 1-based: after `noisy_epochs` no noise, rooms and codecs."""
    if not 0 < config.noisy_epochs < epoch:
        return config
    return replace(config, noise_probability=0.0, room_probability=0.0, codec_probability=0.0)


def paces(config: AugmentConfig) -> tuple[float, float]:
    """Return the least and the greatest factor by which utterances may pass faster: speed times tempo."""
    factors = [speed * tempo for speed in config.speed or [1.0] for tempo in config.tempo or [1.0]]
    return min(factors), max(factors)


def recorded_noise(recordings: Sequence[Waveform], rng: np.random.Generator, samples: int) -> Waveform:
    """Draw a random segment (samples,) float32 of a random recording, repeated where it is too short.

    Args:
        recordings: at least one, each (N,) float32; read lazily, one a draw.
        rng: the utterance's own.
        samples: length wanted.
    """
    recording = recordings[int(rng.integers(len(recordings)))]
    start = int(rng.integers(max(1, len(recording) - samples + 1)))
    if len(recording) == 0:
        return np.zeros(samples, np.float32)
    return np.resize(recording[start : start + samples], samples)


def _mean_power(waveform: Waveform) -> float:
    return float(np.square(waveform).mean())  # not np.dot: a threaded sum's bits would depend on the machine
