"""Seeded augmentation of waveforms, in the loader: speed, reverberation, noise, codecs, gain.

`augment_waveform` draws effects and applies them. A draw depends on the seed, the epoch, the utterance's index and the
effect alone, never on worker, rank or batch. A resumed run, or a run on another number of ranks, sees the same audio as
one without interruption.
"""

import io
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

from ds2.config.schema import CODECS, AugmentConfig

Waveform = NDArray[np.float32]

_BLOCK = 1 << 15  # samples of overlap-add
_FIRST_ECHO_S = 0.002
_DIRECT_DB = (0.0, 15.0)  # energy of the direct sound over that of all echoes
_TELEPHONE_HZ = 8000
_FORMATS = {
    "mulaw": ("WAV", "ULAW", _TELEPHONE_HZ),
    "alaw": ("WAV", "ALAW", _TELEPHONE_HZ),
    "gsm": ("WAV", "GSM610", _TELEPHONE_HZ),
    "adpcm": ("WAV", "IMA_ADPCM", _TELEPHONE_HZ),
    "mp3": ("MP3", "MPEG_LAYER_III", 0),
}
assert tuple(_FORMATS) == CODECS
_MP3_DELAY = 1105  # samples before the sound, of LAME and its decoder; at most sample rates no tag has them removed
_MP3_RATES_HZ = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)


def room_response(rng: np.random.Generator, sample_rate_hz: int, rt60_s: tuple[float, float]) -> Waveform:
    """Draw the impulse response of a room: the direct sound, then Gaussian echoes that decay by 60 dB in RT60.

    Polack's model of late reverberation. The direct sound is at sample 0, so speech is not delayed. Echoes begin 2 ms
    later; their energy is 0 to 15 dB below the direct sound's.

    Args:
        rt60_s: range of the reverberation time, drawn uniformly.

    Returns:
        (N,) float32 of energy 1, as long as the reverberation time.
    """
    duration_s, direct_db = rng.uniform(*rt60_s), rng.uniform(*_DIRECT_DB)
    first = max(1, round(_FIRST_ECHO_S * sample_rate_hz))
    samples = max(first + 1, round(duration_s * sample_rate_hz))
    time = np.arange(samples - first, dtype=np.float32) / np.float32(duration_s * sample_rate_hz)
    echoes = rng.standard_normal(samples - first, dtype=np.float32) * np.float32(10.0) ** (-3.0 * time)
    response = np.zeros(samples, np.float32)
    response[0] = 1.0
    response[first:] = echoes * np.float32(10.0 ** (-direct_db / 20.0) / np.sqrt(np.square(echoes).sum()))
    return response / np.float32(np.sqrt(np.square(response).sum()))


def convolve(waveform: Waveform, response: Waveform) -> Waveform:
    """Return the first N samples of the convolution of (N,) with (M,), by overlap-add."""
    if len(waveform) == 0:
        return waveform
    size = max(_BLOCK, 1 << (2 * len(response) - 1).bit_length())
    step = size - len(response) + 1
    blocks = -(-len(waveform) // step)
    padded = np.zeros((blocks, step), np.float32)
    padded.reshape(-1)[: len(waveform)] = waveform
    products = np.fft.irfft(np.fft.rfft(padded, size) * np.fft.rfft(response, size), size).astype(np.float32)
    output = np.zeros(blocks * step + size, np.float32)
    for index, product in enumerate(products):
        output[index * step : index * step + size] += product
    return output[: len(waveform)]


def coloured_noise(rng: np.random.Generator, samples: int, exponent: float) -> Waveform:
    """Draw Gaussian noise (samples,) float32 whose power falls as 1 / frequency^exponent: 0 white, 1 pink, 2 brown."""
    length = 1 << max(samples - 1, 1).bit_length()  # a power of two, for a fast transform
    bins = length // 2 + 1
    spectrum = rng.standard_normal(2 * bins, dtype=np.float32).view(np.complex64)
    spectrum[0] = 0.0
    spectrum[1:] /= np.sqrt(np.arange(1, bins, dtype=np.float32)) ** exponent
    return np.fft.irfft(spectrum, length)[:samples].astype(np.float32)


def babble(voices: Sequence[Waveform], rng: np.random.Generator, samples: int, count: int) -> Waveform:
    """Draw (samples,) float32 of several voices at equal power, each a `random_segment`, whose arguments these are."""
    mixed = np.zeros(samples, np.float32)
    for _ in range(count):
        part = random_segment(voices, rng, samples)
        power = float(np.square(part).mean()) if samples else 0.0
        if power > 0.0:
            mixed += part / np.float32(np.sqrt(power))
    return mixed


def apply_codec(waveform: Waveform, codec: str, sample_rate_hz: int) -> Waveform:
    """Return a waveform (N,) float32 after `encode` and decoding, in memory; arguments as of `encode`."""
    if len(waveform) == 0:
        return waveform
    decoded, decoded_hz = soundfile.read(io.BytesIO(encode(waveform, codec, sample_rate_hz)), dtype="float32")
    if codec == "mp3" and len(decoded) > len(waveform) * decoded_hz / sample_rate_hz + 1:
        decoded = decoded[_MP3_DELAY:]
    if decoded_hz != sample_rate_hz:
        decoded = soxr.resample(decoded, decoded_hz, sample_rate_hz)
    output = np.zeros_like(waveform)
    output[: len(decoded)] = decoded[: len(waveform)]
    return output


def encode(waveform: Waveform, codec: str, sample_rate_hz: int) -> bytes:
    """Return a waveform as an audio file, encoded by libsndfile.

    Args:
        waveform: (N,) float32; clipped to [-1, 1], as the input of a codec is.
        codec: mulaw, alaw, gsm and adpcm at 8 kHz, as on telephones; mp3 at about 24 kbit/s.
        sample_rate_hz: of the waveform; mp3 takes the nearest rate that it has.
    """
    container, subtype, rate_hz = _FORMATS[codec]
    rate_hz = rate_hz or min(_MP3_RATES_HZ, key=lambda rate_hz: abs(rate_hz - sample_rate_hz))
    narrow = waveform if rate_hz == sample_rate_hz else soxr.resample(waveform, sample_rate_hz, rate_hz)
    file = io.BytesIO()
    quality = {"bitrate_mode": "CONSTANT", "compression_level": 0.9} if codec == "mp3" else {}
    soundfile.write(file, np.clip(narrow, -1.0, 1.0), rate_hz, subtype=subtype, format=container, **quality)
    return file.getvalue()


NoiseSource = Callable[[np.random.Generator, int], Waveform]
"""(generator, number of samples) -> noise of any level."""
EffectRng = Callable[[str], np.random.Generator]
"""Name of an effect -> its generator for one utterance in one epoch: `utterance_rng` without its first arguments."""
BatchRngs = Callable[[str], Iterator[np.random.Generator]]
"""Name of an effect -> its generators for the B utterances of a batch: `utterance_rngs` without its first arguments."""


def utterance_rng(seed: int, epoch: int, index: int, effect: str) -> np.random.Generator:
    """Return the generator of one utterance's draws in one epoch; different arguments give independent generators.

    Args:
        seed, epoch, index: not negative; index is the utterance's position in the training set.
        effect: name of what is drawn; each has a generator of its own, so that a new effect does not change others.
    """
    return np.random.default_rng([seed, epoch, index, zlib.crc32(effect.encode())])


def utterance_rngs(
    seed: int, epoch: int, indices: Iterable[int], view: int, effect: str
) -> Iterator[np.random.Generator]:
    """Yield the generator of each utterance in one of several views of it; of view 0 it is that of `utterance_rng`."""
    return (utterance_rng(seed, epoch, index, f"{effect}, view {view}" if view else effect) for index in indices)


def augment_waveform(
    waveform: Waveform, config: AugmentConfig, sample_rate_hz: int, rng_of: EffectRng, noise: NoiseSource
) -> Waveform:
    """Return the waveform after speed, room, noise, codec and gain, in this order.

    Args:
        waveform: (N,) float32 in [-1, 1]; not written to.
        rng_of: the utterance's generators, by effect. Speed, noise and gain share "waveform": its four decisions are
            drawn whether used or not, so that switching one off does not change the others. Any other effect has its
            own generator, because the noise itself is drawn after the four.
        noise: source of noise, scaled to the drawn ratio of mean powers over the whole utterance. Nothing is added to
            or from digital silence, for which no ratio exists.
    Returns:
        (N',) float32, N' = N / speed factor; not clipped, so values may exceed 1.
    """
    rng = rng_of("waveform")
    speed_draw, gain_draw, noise_draw, snr_draw = rng.random(4)
    if config.speed:
        factor = config.speed[int(speed_draw * len(config.speed))]
        if factor != 1.0:
            waveform = soxr.resample(waveform, sample_rate_hz * factor, sample_rate_hz)
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


def augment_in_epoch(config: AugmentConfig, epoch: int) -> AugmentConfig:
    """Return the augmentation of an epoch, counted from 1: no noise, reverberation or codecs after `noisy_epochs`."""
    if not 0 < config.noisy_epochs < epoch:
        return config
    return replace(config, noise_probability=0.0, room_probability=0.0, codec_probability=0.0)


def speed_range(config: AugmentConfig) -> tuple[float, float]:
    """Return the least and greatest factor by which utterances may be sped up."""
    factors = config.speed or [1.0]
    return min(factors), max(factors)


def random_segment(recordings: Sequence[Waveform], rng: np.random.Generator, samples: int) -> Waveform:
    """Draw a random segment (samples,) float32 of a random recording, repeated where it is too short.

    Args:
        recordings: at least one, each (N,) float32; one is read per draw.
    """
    recording = recordings[int(rng.integers(len(recordings)))]
    start = int(rng.integers(max(1, len(recording) - samples + 1)))
    if len(recording) == 0:
        return np.zeros(samples, np.float32)
    return np.resize(recording[start : start + samples], samples)


def _mean_power(waveform: Waveform) -> float:
    return float(np.square(waveform).mean())  # not np.dot: the bits of a threaded sum depend on the machine
