"""A corpus that needs no corpus: spoken digits from a small formant synthesiser, several voices, pauses and noise.

Voiced sound is a sum of the harmonics of a gliding pitch, weighted by the formants of the phone; fricatives and bursts
are noise shaped in the frequency domain (Klatt 1980 in outline; formant frequencies after Peterson and Barney 1952). It
is no benchmark: an installation can train, evaluate and transcribe with it within minutes and without downloads.
N samples, C control points.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
from numpy.typing import NDArray

from ds2.data.corpora.common import ImporterError
from ds2.data.manifest import Utterance

SAMPLE_RATE_HZ = 16000
UTTERANCES = {"train": 600, "dev": 50, "test": 50}
_SEED = 1  # of voices, texts and noise
_SPEAKERS = {"train": 16, "dev": 4, "test": 4}  # nobody speaks in two parts
_WORDS_PER_UTTERANCE = (2, 5)
_CONTROL_S = 0.005
_BANDWIDTHS_HZ = np.array([80.0, 110.0, 160.0])
_FORMANT_GAINS = np.array([1.0, 0.6, 0.25])
_TOP_HZ = 5000.0  # harmonics above carry nothing
_Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Phone:
    """A sound: where its formants lie and how strongly the voice and noise excite it."""

    formants_hz: tuple[float, float, float]
    duration_s: float
    voice: float = 0.0
    noise: float = 0.0
    noise_hz: float = 0.0
    noise_width_hz: float = 1.0


_PHONES = {
    "iy": Phone((270, 2290, 3010), 0.13, voice=1.0),
    "ih": Phone((390, 1990, 2550), 0.09, voice=1.0),
    "eh": Phone((530, 1840, 2480), 0.10, voice=1.0),
    "ah": Phone((640, 1190, 2390), 0.10, voice=1.0),
    "aa": Phone((730, 1090, 2440), 0.11, voice=1.0),
    "ao": Phone((570, 840, 2410), 0.13, voice=1.0),
    "ow": Phone((450, 880, 2300), 0.12, voice=1.0),
    "uw": Phone((300, 870, 2240), 0.14, voice=1.0),
    "r": Phone((310, 1060, 1380), 0.07, voice=0.7),
    "w": Phone((290, 610, 2150), 0.07, voice=0.7),
    "n": Phone((250, 1300, 2300), 0.07, voice=0.4),
    "v": Phone((280, 1100, 2300), 0.06, voice=0.4, noise=0.03, noise_hz=4500, noise_width_hz=2500),
    "z": Phone((250, 1400, 2500), 0.08, voice=0.25, noise=0.10, noise_hz=6300, noise_width_hz=1200),
    "s": Phone((300, 1500, 2600), 0.11, noise=0.22, noise_hz=6300, noise_width_hz=1200),
    "f": Phone((300, 1100, 2300), 0.10, noise=0.07, noise_hz=4500, noise_width_hz=3000),
    "th": Phone((300, 1400, 2600), 0.08, noise=0.06, noise_hz=5500, noise_width_hz=2500),
    "closure": Phone((300, 1500, 2600), 0.05),
    "t": Phone((350, 1800, 2700), 0.03, noise=0.25, noise_hz=4500, noise_width_hz=1500),
    "k": Phone((350, 1900, 2500), 0.03, noise=0.25, noise_hz=2200, noise_width_hz=600),
}
WORDS = {
    "zero": ("z", "ih", "r", "ow"),
    "one": ("w", "ah", "n"),
    "two": ("closure", "t", "uw"),
    "three": ("th", "r", "iy"),
    "four": ("f", "ao", "r"),
    "five": ("f", "aa", "iy", "v"),
    "six": ("s", "ih", "closure", "k", "s"),
    "seven": ("s", "eh", "v", "ah", "n"),
    "eight": ("eh", "iy", "closure", "t"),
    "nine": ("n", "aa", "iy", "n"),
}


@dataclass(frozen=True)
class Voice:
    """A speaker: pitch, length of the vocal tract, rate of speech and how noisy the room is."""

    pitch_hz: float
    tract: float  # factor on every formant frequency
    rate: float  # factor on every duration
    noise_db: float  # background below the speech

    @classmethod
    def draw(cls, rng: np.random.Generator) -> "Voice":
        """Draw a voice; a high pitch goes with a short tract, as in people."""
        height = rng.uniform(0, 1)
        return cls(
            float(95 + 125 * height + rng.uniform(-10, 10)),
            float(0.92 + 0.22 * height + rng.uniform(-0.03, 0.03)),
            float(rng.uniform(0.85, 1.2)),
            float(rng.uniform(20, 35)),
        )


def make_corpus(folder: str | Path) -> dict[str, list[Utterance]]:
    """Write spoken digits as 16-bit wav files and return the utterances of train, dev and test.

    The files, in one folder a part, are the same each time. Speakers of the three parts differ. About 22 minutes of
    audio, 42 MB.

    Raises:
        ImporterError: a file cannot be written.
    """
    corpus: dict[str, list[Utterance]] = {}
    for number, (part, count) in enumerate(UTTERANCES.items()):
        target = Path(folder).resolve() / part
        target.mkdir(parents=True, exist_ok=True)
        voices = [Voice.draw(np.random.default_rng([_SEED, number, s])) for s in range(_SPEAKERS[part])]
        corpus[part] = []
        for index in range(count):
            rng = np.random.default_rng([_SEED, number, _SPEAKERS[part], index])
            speaker = index % len(voices)
            words = rng.choice(list(WORDS), size=rng.integers(*_WORDS_PER_UTTERANCE, endpoint=True)).tolist()
            waveform = speak(words, voices[speaker], rng)
            path = target / f"{part}-s{speaker:02d}-{index:04d}.wav"
            try:
                soundfile.write(path, waveform, SAMPLE_RATE_HZ, subtype="PCM_16")
            except soundfile.SoundFileError as error:
                free = shutil.disk_usage(target).free / 1e6
                raise ImporterError(
                    f"{path} cannot be written ({error}): {free:.0f} MB are free there, the corpus takes 42; free some "
                    "or give another data.work_dir"
                ) from error
            duration_s = len(waveform) / SAMPLE_RATE_HZ
            corpus[part].append(Utterance(path, duration_s, " ".join(words), speaker=f"{part}-s{speaker:02d}"))
    return corpus


def speak(words: Sequence[str], voice: Voice, rng: np.random.Generator) -> NDArray[np.float32]:
    """Return words spoken by a voice as a waveform (N,) float32 in [-1, 1] at 16 kHz.

    `rng` draws pauses, durations, intonation and noise.
    """
    phones = [_silence(rng, 0.1, 0.25)]
    for word in words:
        phones += [_PHONES[name] for name in WORDS[word]]
        phones.append(_silence(rng, 0.03, 0.15))
    phones.append(_silence(rng, 0.05, 0.2))
    lengths_s = np.array([p.duration_s * voice.rate * rng.uniform(0.85, 1.2) for p in phones])
    count = int(lengths_s.sum() * SAMPLE_RATE_HZ)
    control_s = np.arange(0, lengths_s.sum() + _CONTROL_S, _CONTROL_S)
    which = np.minimum(np.searchsorted(np.cumsum(lengths_s), control_s, side="right"), len(phones) - 1)
    formants_hz = _smooth(np.array([phones[i].formants_hz for i in which]) * voice.tract, 9)
    strength = _smooth(np.array([[phones[i].voice] for i in which]), 5)[:, 0]
    speech = _voiced(formants_hz, strength, control_s, count, voice, rng)
    starts = (np.concatenate([[0.0], np.cumsum(lengths_s)]) * SAMPLE_RATE_HZ).astype(int)
    for phone, first, last in zip(phones, starts[:-1], np.minimum(starts[1:], count), strict=True):
        if phone.noise:
            speech[first:last] += _hiss(phone, last - first, rng)
    speech *= rng.uniform(0.2, 0.6) / np.abs(speech).max()
    background = rng.standard_normal(count)
    background *= np.sqrt(np.mean(speech**2)) * 10 ** (-voice.noise_db / 20)
    return np.clip(speech + background, -1, 1).astype(np.float32)


def _silence(rng: np.random.Generator, low_s: float, high_s: float) -> Phone:
    return Phone((500, 1500, 2500), float(rng.uniform(low_s, high_s)))


def _voiced(
    formants_hz: _Floats, strength: _Floats, control_s: _Floats, count: int, voice: Voice, rng: np.random.Generator
) -> _Floats:
    """Return the sum of harmonics (N,) under formants (C, 3) and the voice's strength (C,)."""
    # Pitch falls over the utterance, as in a statement, and wavers.
    waver = _smooth(rng.standard_normal((len(control_s), 1)), 41)[:, 0]
    pitch_hz = voice.pitch_hz * (1.1 - 0.2 * control_s / control_s[-1]) * (1 + 0.15 * waver)
    time_s = np.arange(count) / SAMPLE_RATE_HZ
    phase = 2 * np.pi * np.cumsum(np.interp(time_s, control_s, pitch_hz)) / SAMPLE_RATE_HZ
    speech = np.zeros(count)
    for harmonic in range(1, int(_TOP_HZ / pitch_hz.min()) + 1):
        frequency_hz = (harmonic * pitch_hz)[:, None]
        resonance = _FORMANT_GAINS / (1 + ((frequency_hz - formants_hz) / (_BANDWIDTHS_HZ / 2)) ** 2) ** 0.5
        amplitude = strength * resonance.sum(axis=1) * (frequency_hz[:, 0] < _TOP_HZ) / harmonic**0.5
        speech += np.interp(time_s, control_s, amplitude) * np.sin(harmonic * phase)
    return speech


def _hiss(phone: Phone, count: int, rng: np.random.Generator) -> _Floats:
    """Return noise (N,) in the phone's band, faded at both ends."""
    frequency_hz = np.fft.rfftfreq(count, 1 / SAMPLE_RATE_HZ)
    band = np.exp(-0.5 * ((frequency_hz - phone.noise_hz) / phone.noise_width_hz) ** 2)
    noise = np.fft.irfft(np.fft.rfft(rng.standard_normal(count)) * band, count)
    fade = np.minimum(1, 4 * np.minimum(np.arange(count), np.arange(count)[::-1]) / count)
    return phone.noise * 2 * fade * noise / np.std(noise)


def _smooth(values: _Floats, width: int) -> _Floats:
    """Return values (C, n) averaged over `width` control points, so that sounds glide into each other."""
    padded = np.pad(values, ((width // 2, width // 2), (0, 0)), mode="edge")
    return np.stack([np.convolve(column, np.full(width, 1 / width), "valid") for column in padded.T], axis=1)
