"""How long after the last word final text comes, and how often a pause inside an utterance ends a segment.

    python tools/bench.py endpoints MODEL AUDIO... --after-speech-s 0.4 0.8 1.2

Each file is an utterance, and its own background noise follows it. Speech ends with the last 20 ms that are at most
30 dB below the loud parts. The delay is from there to the final text, as a speaker feels it: the pause of the rule, the
lookahead, blocks, chunks and computation. A chunk's computation counts as if all before it had been on time. "cut" are
utterances in more than one segment; "changed" are words of all segments that differ from the text of the whole file.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from benchmarks.common import RATE_HZ, Table, add_recogniser_options, facts, files_and_recogniser
from dispatch import new_parser, parse
from numpy.typing import NDArray

from ds2.audio.read import read_audio
from ds2.recognition.recogniser import Recogniser
from ds2.recognition.session import Endpoints, decode_sessions
from ds2.scoring.wer import CORRECT, align

FRAME_S = 0.02
SPEECH_DB = -30.0  # of the last speech, to the 95th percentile of the file
CHUNK_S = 0.1  # audio that comes at once
BACKGROUND_S = 0.3  # of the file's quietest part, which is repeated after it


@dataclass
class Segments:
    """The texts of the segments of an utterance, when the last one came, and what was left at the end of the noise."""

    texts: list[str]
    last_s: float = 0.0
    rest: list[str] = field(default_factory=list)


def changed_words(segments: Segments, whole: Sequence[str]) -> int:
    """How many words of all segments differ from those of the whole file."""
    words = " ".join([*segments.texts, *segments.rest]).split()
    return sum(edit != CORRECT for edit in align(list(whole), words))


def levels(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    """Mean squares of frames of 20 ms."""
    size = round(FRAME_S * RATE_HZ)
    frames = samples[: len(samples) // size * size].reshape(-1, size)
    squares: NDArray[np.float32] = np.square(frames).mean(1)
    return squares


def speech_end_s(samples: NDArray[np.float32]) -> float:
    """Return the end of the speech in a recording, seconds."""
    squares = levels(samples)
    loud = np.flatnonzero(squares >= 10 ** (SPEECH_DB / 10) * np.percentile(squares, 95))
    return float((loud[-1] + 1) * FRAME_S)


def with_background(samples: NDArray[np.float32], seconds: float) -> NDArray[np.float32]:
    """Repeat the quietest part of a recording after it."""
    width = round(BACKGROUND_S / FRAME_S)
    sums = np.convolve(levels(samples), np.ones(width), "valid")
    first = round(int(sums.argmin()) * FRAME_S * RATE_HZ)
    quiet = samples[first : first + round(BACKGROUND_S * RATE_HZ)]
    forth_and_back = np.concatenate([quiet, quiet[::-1]])
    noise = np.tile(forth_and_back, -(-round(seconds * RATE_HZ) // len(forth_and_back)))
    return np.concatenate([samples, noise])


def in_process(recogniser: Recogniser, samples: NDArray[np.float32], rules: Sequence[Endpoints]) -> list[Segments]:
    """The segments of each rule; all rules share batches."""
    lives = [recogniser.live(sample_rate_hz=RATE_HZ, endpoints=rule) for rule in rules]
    results = [Segments([]) for _ in rules]
    size = round(CHUNK_S * RATE_HZ)
    for start in range(0, len(samples), size):
        started_s = time.perf_counter()
        for live in lives:
            live.accept_waveform(samples[start : start + size])
        while any(live.is_ready() for live in lives):
            decode_sessions(lives)
        now_s = (start + size) / RATE_HZ + time.perf_counter() - started_s
        for at, live in enumerate(lives):
            if live.segments:
                results[at].texts += [segment.hypothesis.text for segment in live.segments]
                results[at].last_s = now_s
                live.segments.clear()
    for live, result in zip(lives, results, strict=True):
        live.flush()
        result.rest = [segment.hypothesis.text for segment in live.segments]
    return results


def main(arguments: list[str] | None = None) -> int:
    """Measure each rule."""
    parser = new_parser(__doc__)
    add_recogniser_options(parser)
    parser.add_argument("--after-speech-s", type=float, nargs="+", default=[Endpoints().after_speech_s])
    options = parse(parser, arguments)
    files, recogniser = files_and_recogniser(options)
    rules = [Endpoints(after_speech_s=value) for value in options.after_speech_s]
    noise_s = max(options.after_speech_s) + recogniser.model.lookahead_ms / 1000 + 1.0
    recordings = [read_audio(name, RATE_HZ) for name in files]
    noisy = [with_background(samples, noise_s) for samples in recordings]
    wholes = [recogniser.transcribe(samples, RATE_HZ).text.split() for samples in noisy]
    ends_s = [speech_end_s(samples) for samples in recordings]
    by_rule = zip(*(in_process(recogniser, samples, rules) for samples in noisy), strict=True)
    minutes = sum(map(len, recordings)) / RATE_HZ / 60
    title = f"{len(files)} utterances, {minutes:.1f} minutes, {options.model}, chunks of {CHUNK_S:g} s"
    facts(options, recogniser.device, f"{title}, lookahead {recogniser.model.lookahead_ms:g} ms")
    columns = {"after_speech_s": "{rule:g}", "delay p50 s": "{p50:.2f}", "p95 s": "{p95:.2f}", "cut %": "{cut:.1f}"}
    table = Table(columns | {"cuts a minute": "{rate:.2f}", "words changed in 100": "{changed:.2f}"})
    for value, results in zip(options.after_speech_s, by_rule, strict=True):
        delays_s = [s.last_s - end_s for s, end_s in zip(results, ends_s, strict=True) if s.texts]
        p50, p95 = np.percentile(delays_s, [50, 95]) if delays_s else (None, None)
        cuts = [max(0, len(segments.texts) - 1) for segments in results]
        shares = {"cut": 100 * np.count_nonzero(cuts) / len(cuts), "rate": sum(cuts) / minutes}
        changed = sum(map(changed_words, results, wholes)) / max(1, sum(map(len, wholes)))
        table.print_row({"rule": value, "p50": p50, "p95": p95, "changed": 100 * changed} | shares)
    return 0
