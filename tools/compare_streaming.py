"""Whether streams hear what `ds2 transcribe` hears: every file, cut at random, joining and leaving batches at random.

    python tools/compare_streaming.py MODEL FOLDER [decode.KEY=VALUE ...]

Words, their times and scores of the whole file stand against those of the stream, in chunks of 10 ms to 3 s; also how
many words partial results took back. Exit status 1 if a word differs.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

from ds2.audio.read import read_audio
from ds2.commands.decode_options import resolve_options
from ds2.commands.transcribe import audio_files
from ds2.config.device import resolve_device
from ds2.decoding.hypothesis import Hypothesis
from ds2.model.checkpoint import find_model, load_model
from ds2.recognition.recogniser import Recogniser
from ds2.recognition.session import Session, decode_sessions, results
from ds2.scoring.wer import CORRECT, align

MOST_AT_ONCE = 32


class Streams:
    """Files on their way, each at its own pace."""

    def __init__(self, recogniser: Recogniser, files: list[str], draw: random.Random) -> None:
        self.recogniser, self.waiting, self.draw = recogniser, list(enumerate(files)), draw
        self.here: dict[int, tuple[Session, object, int]] = {}
        self.found: dict[int, Hypothesis] = {}
        self.told: dict[int, list[str]] = {}
        self.taken_back = self.partials = self.batches = self.streams = 0

    def run(self) -> None:
        """Hear all files."""
        while self.waiting or self.here:
            while self.waiting and len(self.here) < MOST_AT_ONCE and self.draw.random() < 0.8:
                index, name = self.waiting.pop(0)
                samples = read_audio(name, self.recogniser.features.sample_rate_hz)
                self.here[index], self.told[index] = (self.recogniser.session(), samples, 0), []
            for index in [index for index in self.here if self.draw.random() < 0.7]:
                session, samples, at = self.here[index]
                end = at + round(self.draw.uniform(0.01, 3.0) * session.sample_rate_hz)
                session.accept_waveform(samples[at:end])  # type: ignore[index]
                self.here[index] = (session, samples, end)
            ready = [index for index, (session, *_) in self.here.items() if session.is_ready()]
            for _ in range(self.draw.randint(0, 3)):
                decode_sessions([self.here[index][0] for index in ready])
                self._tell(ready)
            for index, (session, samples, at) in list(self.here.items()):
                if at >= len(samples) and not session.is_ready():  # type: ignore[arg-type]
                    self.found[index] = session.finish()
                    self._changed(index, self.found[index])
                    del self.here[index]

    def _tell(self, ready: list[int]) -> None:
        self.batches, self.streams = self.batches + 1, self.streams + len(ready)
        for index, hypothesis in zip(ready, results([self.here[index][0] for index in ready]), strict=True):
            self._changed(index, hypothesis)

    def _changed(self, index: int, hypothesis: Hypothesis) -> None:
        """Count the words, the unfinished last one apart, that were told and are not there any more."""
        before, words = self.told[index], hypothesis.text.split()
        whole = before[:-1]
        kept = next((at for at, pair in enumerate(zip(whole, words, strict=False)) if pair[0] != pair[1]), None)
        self.taken_back += len(whole) - (min(len(whole), len(words)) if kept is None else kept)
        self.told[index] = words


def main() -> int:
    """Print what was compared and what differs."""
    parser = argparse.ArgumentParser(description="streams beside whole files")
    parser.add_argument("model", type=Path)
    parser.add_argument("files", nargs="+", help="audio files or folders of them, then decode.KEY=VALUE")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    decode = [argument for argument in given.files if argument.startswith("decode.")]
    files = list(audio_files([argument for argument in given.files if argument not in decode]))
    device, file = resolve_device(given.device), find_model(given.model)
    loaded = load_model(file, device)
    recogniser = Recogniser.of(loaded, resolve_options(decode, file, loaded.config), device, given.precision)
    start_s = time.monotonic()
    wholes = [recogniser.transcribe(name) for name in files]
    whole_s = time.monotonic() - start_s
    streams = Streams(recogniser, files, random.Random(given.seed))
    streams.run()
    words = wrong = times = 0
    score = 0.0
    for index, whole in enumerate(wholes):
        found, wanted = streams.found[index], whole.hypothesis
        words += len(wanted.text.split())
        edits = sum(edit != CORRECT for edit in align(wanted.text.split(), found.text.split()))
        if edits:
            print(f"{files[index]}\n  file:   {wanted.text}\n  stream: {found.text}")
        wrong += edits
        times += not edits and [(w.start_s, w.end_s) for w in wanted.words] != [
            (w.start_s, w.end_s) for w in found.words
        ]
        score = max(score, abs(wanted.score - found.score) / max(1.0, abs(wanted.score)))
    hours = sum(whole.duration_s for whole in wholes) / 3600
    print(f"{len(files)} files, {hours:.2f} h, {words} words, on {device}: {wrong} words differ")
    print(f"{times} files have other times; scores differ by {score:.1e} at most")
    share = 100 * streams.taken_back / max(1, words)
    print(f"partial results took {streams.taken_back} words back, {share:.2f} in 100")
    stream_s = time.monotonic() - start_s - whole_s
    mean = streams.streams / max(1, streams.batches)
    print(f"files {whole_s:.0f} s, streams {stream_s:.0f} s, {mean:.1f} streams a batch")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
