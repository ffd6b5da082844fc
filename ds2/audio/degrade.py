"""What happens to speech on its way: rooms, noise of any colour, other voices, telephones. All of it drawn by seed."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

from ds2.config.schema import CODECS

Waveform = NDArray[np.float32]

_BLOCK = 1 << 15  # of overlap-add, samples
_FIRST_ECHO_S = 0.002
_DIRECT_DB = (0.0, 15.0)  # direct sound over all echoes
_TELEPHONE_HZ = 8000
_FORMATS = {
    "mulaw": ("WAV", "ULAW", _TELEPHONE_HZ),
    "alaw": ("WAV", "ALAW", _TELEPHONE_HZ),
    "gsm": ("WAV", "GSM610", _TELEPHONE_HZ),
    "adpcm": ("WAV", "IMA_ADPCM", _TELEPHONE_HZ),
    "mp3": ("MP3", "MPEG_LAYER_III", 0),
}
assert tuple(_FORMATS) == CODECS


def room_response(rng: np.random.Generator, sample_rate_hz: int, rt60_s: tuple[float, float]) -> Waveform:
    """Draw the impulse response of a room: the direct sound, then Gaussian echoes that fall by 60 dB in a drawn time.

    Polack's model of late reverberation; the direct sound is at sample 0, so that speech stays where it was. Echoes
    begin 2 ms behind it and have together 0 to 15 dB less energy.

    Args:
        rng: the utterance's own.
        sample_rate_hz: of the response.
        rt60_s: reverberation times, drawn evenly between these two.

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


def convolved(waveform: Waveform, response: Waveform) -> Waveform:
    """The first N samples of the convolution of (N,) with (M,), by overlap-add."""
    if len(waveform) == 0:
        return waveform
    size = max(_BLOCK, 1 << (2 * len(response) - 1).bit_length())
    step = size - len(response) + 1
    blocks = -(-len(waveform) // step)
    padded = np.zeros((blocks, step), np.float32)
    padded.reshape(-1)[: len(waveform)] = waveform
    products = np.fft.irfft(np.fft.rfft(padded, size) * np.fft.rfft(response, size), size).astype(np.float32)
    heard = np.zeros(blocks * step + size, np.float32)
    for index, product in enumerate(products):
        heard[index * step : index * step + size] += product
    return heard[: len(waveform)]


def coloured_noise(rng: np.random.Generator, samples: int, exponent: float) -> Waveform:
    """Draw Gaussian noise (samples,) float32 whose power falls as 1 / frequency^exponent: 0 white, 1 pink, 2 brown."""
    length = 1 << max(samples - 1, 1).bit_length()  # a power of two: the transform is quick whatever `samples` is
    bins = length // 2 + 1
    spectrum = rng.standard_normal(2 * bins, dtype=np.float32).view(np.complex64)
    spectrum[0] = 0.0
    spectrum[1:] /= np.sqrt(np.arange(1, bins, dtype=np.float32)) ** exponent
    return np.fft.irfft(spectrum, length)[:samples].astype(np.float32)


def babble(voices: Sequence[Waveform], rng: np.random.Generator, samples: int, count: int) -> Waveform:
    """Draw (samples,) float32 of several voices at once, each a random part of a random utterance at equal power.

    Args:
        voices: utterances, read lazily.
        rng: the utterance's own.
        samples: length wanted; shorter utterances are repeated.
        count: voices.
    """
    mixed = np.zeros(samples, np.float32)
    for _ in range(count):
        voice = voices[int(rng.integers(len(voices)))]
        start = int(rng.integers(max(1, len(voice) - samples + 1)))
        part = np.resize(voice[start : start + samples], samples) if len(voice) else np.zeros(samples, np.float32)
        power = float(np.square(part).mean()) if samples else 0.0
        if power > 0.0:
            mixed += part / np.float32(np.sqrt(power))
    return mixed


def coded(waveform: Waveform, codec: str, sample_rate_hz: int) -> Waveform:
    """What a codec leaves of a waveform: encoded and decoded by libsndfile, in memory.

    Args:
        waveform: (N,) float32; what exceeds 1 in size is clipped, as a codec's input is.
        codec: mulaw, alaw, gsm and adpcm at 8 kHz, as telephones do; mp3 at about 24 kbit/s.
        sample_rate_hz: of the waveform.

    Returns:
        (N,) float32.
    """
    if len(waveform) == 0:
        return waveform
    container, subtype, rate_hz = _FORMATS[codec]
    rate_hz = rate_hz or sample_rate_hz
    narrow = waveform if rate_hz == sample_rate_hz else soxr.resample(waveform, sample_rate_hz, rate_hz)
    file = io.BytesIO()
    quality = {"bitrate_mode": "CONSTANT", "compression_level": 0.9} if codec == "mp3" else {}
    soundfile.write(file, np.clip(narrow, -1.0, 1.0), rate_hz, subtype=subtype, format=container, **quality)
    file.seek(0)
    heard, decoded_hz = soundfile.read(file, dtype="float32")
    if decoded_hz != sample_rate_hz:
        heard = soxr.resample(heard, decoded_hz, sample_rate_hz)
    result = np.zeros_like(waveform)
    result[: len(heard)] = heard[: len(waveform)]
    return result
