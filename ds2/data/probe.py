"""What reading an utterance's audio shows: the part of `ds2 data check` for many processes, light to import."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ds2.audio.read import END_TOLERANCE_S, AudioError, EmptyAudioError, audio_blocks, audio_info
from ds2.data.manifest import Utterance

FULL_SCALE = 0.999
_CLIPPED_RUN = 3  # samples in a row at full scale: fewer occur in sound that just reaches it


@dataclass(frozen=True)
class Probe:
    """Measurements of an utterance's samples, or why there are none."""

    error: str = ""
    kind: str = ""  # of the error: unreadable | empty | duration
    rate_hz: int = 0  # of the file
    file_s: float = 0.0  # length of the file
    peak: float = 0.0  # full scale = 1
    rms: float = 0.0
    clipped: float = 0.0  # fraction of samples in runs at full scale
    digest: str = ""  # of the samples at 16 bits


def probe(utterances: Sequence[Utterance], sample_rate_hz: int) -> list[Probe]:
    """Read utterances whole, each in bounded memory, and measure them at `sample_rate_hz`."""
    return [_probe(utterance, sample_rate_hz) for utterance in utterances]


def _probe(utterance: Utterance, sample_rate_hz: int) -> Probe:
    path = utterance.audio_filepath
    try:
        info = audio_info(path, sample_rate_hz)
        if utterance.duration_s <= 0:
            return Probe("the manifest gives it a duration of 0 s", "empty")
        end_s = utterance.offset_s + utterance.duration_s
        if end_s > info.duration_s + END_TOLERANCE_S:
            return Probe(f"the manifest has it end at {end_s:.3f} s, {path} at {info.duration_s:.3f} s", "duration")
        peak, squares, clipped, count = 0.0, 0.0, 0, 0
        digest = hashlib.sha256()
        for block in audio_blocks(path, sample_rate_hz, utterance.offset_s, utterance.duration_s):
            peak = max(peak, float(np.abs(block).max()))
            squares += float(np.square(block, dtype=np.float64).sum())
            clipped += _clipped_samples(block)
            count += len(block)
            digest.update(np.rint(block * 32767).astype(np.int16).tobytes())
    except EmptyAudioError as error:
        return Probe(str(error), "empty")
    except AudioError as error:
        return Probe(str(error), "unreadable")
    rms = math.sqrt(squares / max(count, 1))
    fraction = clipped / max(count, 1)
    return Probe("", "", info.sample_rate_hz, info.duration_s, peak, rms, fraction, digest.hexdigest())


def _clipped_samples(block: NDArray[np.float32]) -> int:
    """Count the samples in runs of at least _CLIPPED_RUN at full scale."""
    edges = np.diff(np.concatenate([[0], np.abs(block) >= FULL_SCALE, [0]]).astype(np.int8))
    runs = np.flatnonzero(edges < 0) - np.flatnonzero(edges > 0)
    return int(runs[runs >= _CLIPPED_RUN].sum())
