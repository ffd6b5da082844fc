"""Compare the words of streams and of whole files: chunks are cut at random, streams join and leave batches at random.

    python tools/bench.py same-words MODEL FOLDER [decode.KEY=VALUE ...]

Compares words, their times and scores; chunks last 10 ms to 3 s. Also counts the words that a partial result had and a
later one had not. Exit status 1 if a word differs.
"""

from __future__ import annotations

import random
import time
from itertools import takewhile

import numpy as np
from benchmarks.common import add_recogniser_options, facts, files_and_recogniser
from dispatch import new_parser, parse
from numpy.typing import NDArray

from ds2.audio.read import read_audio
from ds2.decoding.hypothesis import Hypothesis
from ds2.recognition.recogniser import Recogniser
from ds2.recognition.session import Session, decode_sessions, results
from ds2.scoring.wer import CORRECT, align

MAX_AT_ONCE = 32


class FileStreams:
    """Files that are recognised as streams, each at its own pace."""

    def __init__(self, recogniser: Recogniser, files: list[str], draw: random.Random) -> None:
        self.recogniser, self.waiting, self.draw = recogniser, list(enumerate(files)), draw
        self.active: dict[int, tuple[Session, NDArray[np.float32], int]] = {}  # with the samples, and how many it has
        self.results: dict[int, Hypothesis] = {}
        self.partial_words: dict[int, list[str]] = {}
        self.retracted = self.batches = self.streams = 0

    def run(self) -> None:
        """Recognise all files."""
        while self.waiting or self.active:
            while self.waiting and len(self.active) < MAX_AT_ONCE and self.draw.random() < 0.8:
                index, name = self.waiting.pop(0)
                samples = read_audio(name, self.recogniser.features.sample_rate_hz)
                self.active[index], self.partial_words[index] = (self.recogniser.session(), samples, 0), []
            for index in [index for index in self.active if self.draw.random() < 0.7]:
                session, samples, at = self.active[index]
                end = at + round(self.draw.uniform(0.01, 3.0) * session.sample_rate_hz)
                session.accept_waveform(samples[at:end])
                self.active[index] = (session, samples, end)
            ready = [index for index, (session, *_) in self.active.items() if session.is_ready()]
            for _ in range(self.draw.randint(0, 3)):
                decode_sessions([self.active[index][0] for index in ready])
                self._read_partials(ready)
            for index, (session, samples, at) in list(self.active.items()):
                if at >= len(samples) and not session.is_ready():
                    self.results[index] = session.finish()
                    self._count_retracted(index, self.results[index])
                    del self.active[index]

    def _read_partials(self, ready: list[int]) -> None:
        self.batches, self.streams = self.batches + 1, self.streams + len(ready)
        for index, hypothesis in zip(ready, results([self.active[index][0] for index in ready]), strict=True):
            self._count_retracted(index, hypothesis)

    def _count_retracted(self, index: int, hypothesis: Hypothesis) -> None:
        """Count the words of the last partial result, except its unfinished last one, that this result has no more."""
        whole, words = self.partial_words[index][:-1], hypothesis.text.split()
        same = takewhile(lambda pair: pair[0] == pair[1], zip(whole, words, strict=False))
        self.retracted += len(whole) - len(list(same))
        self.partial_words[index] = words


def main(arguments: list[str] | None = None) -> int:
    """Print each difference and the counts."""
    parser = new_parser(__doc__)
    add_recogniser_options(parser)
    parser.add_argument("--seed", type=int, default=0)
    options = parse(parser, arguments)
    files, recogniser = files_and_recogniser(options)
    facts(options, recogniser.device, f"streams and whole files, {options.model}")
    start_s = time.monotonic()
    wholes = [recogniser.transcribe(name) for name in files]
    whole_s = time.monotonic() - start_s
    streams = FileStreams(recogniser, files, random.Random(options.seed))
    streams.run()
    words = wrong = times = 0
    score = 0.0
    for index, whole in enumerate(wholes):
        stream, wanted = streams.results[index], whole.hypothesis
        words += len(wanted.text.split())
        edits = sum(edit != CORRECT for edit in align(wanted.text.split(), stream.text.split()))
        if edits:
            print(f"{files[index]}\n  file:   {wanted.text}\n  stream: {stream.text}")
        wrong += edits
        times += not edits and [(w.start_s, w.end_s) for w in wanted.words] != [
            (w.start_s, w.end_s) for w in stream.words
        ]
        score = max(score, abs(wanted.score - stream.score) / max(1.0, abs(wanted.score)))
    hours = sum(whole.duration_s for whole in wholes) / 3600
    print(f"{len(files)} files, {hours:.2f} h, {words} words, on {recogniser.device}: {wrong} words differ")
    print(f"{times} files have other times; scores differ by {score:.1e} at most")
    share = 100 * streams.retracted / max(1, words)
    print(f"partial results retracted {streams.retracted} words, {share:.2f} in 100")
    stream_s = time.monotonic() - start_s - whole_s
    mean = streams.streams / max(1, streams.batches)
    print(f"files {whole_s:.0f} s, streams {stream_s:.0f} s, {mean:.1f} streams a batch")
    return 1 if wrong else 0
