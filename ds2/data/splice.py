"""Spliced speech: pieces of a speaker's recordings, joined in the middle of their labels, say a text.

A network that trains on such speech learns words and spellings of the texts. So a few hours of recordings and much text
give fewer errors than the recordings alone (docs/results/accuracy.md).
"""

import functools
import io
import logging
import random
import shutil
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import soundfile
from numpy.typing import NDArray

from ds2.data.audio_cache import SPARE_BYTES, AudioStore
from ds2.data.manifest import Utterance, write_manifest
from ds2.data.shards import MANIFEST
from ds2.system import UserError
from ds2.system.files import name_errors
from ds2.system.machine import usable_cores
from ds2.system.plain import grouped
from ds2.system.signals import worker_processes
from ds2.system.terminal import ProgressBar

log = logging.getLogger(__name__)

_BEGIN, _END, _FIRST_SYMBOL = "\0", "\1", 2
_LONGEST = 7  # labels of a piece
_SHORTER = 0.35  # of the pieces are shorter than they could be: texts repeat, and their speech should not
_FADE_S, _SEARCH_S = 0.008, 0.004  # of a join, and how far it may move
_TEXTS_OF_A_JOB = 32  # by the voice of one speaker, whose recordings are read once
_MOST_FAILURES = 1000  # texts without speech, before any has some
Speech = tuple["SplicedText", str, bytes, int]  # text, speaker, WAV file, samples


@dataclass(frozen=True)
class SplicedText:
    """A text to be spoken: its words, and the labels (integers from 1) of each."""

    words: tuple[str, ...]
    labels: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class LabelledRecording:
    """Labels of a recording, words apart, and the times of each label: (begin, end) in seconds.

    `position` is that of its audio in the `AudioStore`.
    """

    position: int
    speaker: str
    labels: tuple[tuple[int, ...], ...]
    times_s: tuple[tuple[float, float], ...]
    duration_s: float


@dataclass(frozen=True)
class Piece:
    """Samples `first` to `stop` of the recording at `position`."""

    position: int
    first: int
    stop: int


def _symbols(words: Iterable[Sequence[int]]) -> str:
    """One character for each label, another one where it ends a word; and for both ends of the text."""
    inner = (
        chr(_FIRST_SYMBOL + 2 * label + (place == len(word) - 1)) for word in words for place, label in enumerate(word)
    )
    return _BEGIN + "".join(inner) + _END


def _without_word_ends(symbols: str) -> str:
    return "".join(chr(ord(symbol) & ~1) if ord(symbol) >= _FIRST_SYMBOL else symbol for symbol in symbols)


class _Bank:
    """The labels of recordings in a row, as characters: where a run of labels occurs, and the samples of each."""

    def __init__(self, recordings: Sequence[LabelledRecording], rate_hz: int) -> None:
        self.symbols = "".join(_symbols(recording.labels) for recording in recordings)
        self.labels = _without_word_ends(self.symbols)
        self.starts: list[int] = []  # where each recording begins in `symbols`
        self.positions = [recording.position for recording in recordings]
        times: list[tuple[float, float]] = []
        for recording in recordings:
            self.starts.append(len(times))
            first_s, last_s = recording.times_s[0][0], recording.times_s[-1][1]
            times += [(0.0, first_s), *recording.times_s, (last_s, recording.duration_s)]
        self.times = np.rint(np.array(times) * rate_hz).astype(np.int64)  # (N, 2) samples
        middles = self.times.mean(1).astype(np.int64)
        # A text begins with the first sample of a recording and ends with the last one of another.
        begins, ends = np.array(list(self.symbols)) == _BEGIN, np.array(list(self.symbols)) == _END
        self.middles = np.where(begins, self.times[:, 0], np.where(ends, self.times[:, 1], middles))

    def find(self, run: str, draw: random.Random, *, word_ends: bool = True) -> int:
        """Return a random place where the run of symbols occurs; -1 if there is none."""
        row = self.symbols if word_ends else self.labels
        place = row.find(run, draw.randrange(len(row)))
        return place if place >= 0 else row.find(run)

    def piece(self, first: int, last: int, *, begin: int | None = None, end: int | None = None) -> Piece:
        """From the middle of the label at `first` to that of the label at `last`, or from `begin`, or to `end`."""
        position = self.positions[bisect_right(self.starts, first) - 1]
        start = int(self.middles[first]) if begin is None else begin
        return Piece(position, start, int(self.middles[last]) if end is None else end)


class Splicer:
    """Makes speech of texts from recordings whose labels have times.

    Args:
        recordings: those of one speaker are joined; where that speaker lacks two labels in a row, any other's serve.
        audio: of the recordings, see `LabelledRecording.position`.
    """

    def __init__(self, recordings: Sequence[LabelledRecording], audio: AudioStore) -> None:
        if not recordings:
            raise UserError(
                "no recording has labels with times: the model writes other words in each, or cannot write their "
                "transcripts: train it longer, or take one of the language and alphabet of the recordings"
            )
        self.audio, self.rate_hz = audio, audio.sample_rate_hz
        by_speaker = grouped(recordings, lambda recording: recording.speaker)
        self.banks = {speaker: _Bank(own, self.rate_hz) for speaker, own in by_speaker.items()}
        self.seconds = {speaker: sum(r.duration_s for r in own) for speaker, own in by_speaker.items()}
        self.everyone = _Bank(recordings, self.rate_hz)

    def pieces(self, labels: Sequence[Sequence[int]], speaker: str, draw: random.Random) -> list[Piece]:
        """Return pieces that say the labels of words; each begins with the label that the one before ends with.

        Empty if no recording has one of the labels.
        """
        text, place, chosen = _symbols(labels), 0, list[Piece]()
        banks = (self.banks[speaker], self.everyone)
        while place < len(text) - 1:
            run = next(filter(None, (self._longest(bank, text, place, draw) for bank in banks)), None)
            if run:
                size, piece = run
                chosen.append(piece)
                place += size - 1
                continue
            pair = _without_word_ends(text[place : place + 2])
            halves = next(filter(None, (_halves(bank, pair, draw) for bank in banks)), None)
            if halves is None:
                return []
            chosen += halves
            place += 1
        return chosen

    @staticmethod
    def _longest(bank: _Bank, text: str, place: int, draw: random.Random) -> tuple[int, Piece] | None:
        """Return the labels of the longest run from `place` on that the bank has, at most 7, and its piece."""
        for size in range(min(_LONGEST, len(text) - place), 1, -1):
            first = bank.find(text[place : place + size], draw)
            if first >= 0:
                taken = draw.randint(3, size - 1) if size > 3 and draw.random() < _SHORTER else size
                if taken < size:
                    first = bank.find(text[place : place + taken], draw)
                return taken, bank.piece(first, first + taken - 1)
        return None

    def join(self, pieces: Sequence[Piece]) -> NDArray[np.float32]:
        """Return the waveform (N,) of pieces. Each fades in where it resembles the end of the one before most."""
        fade, search = round(_FADE_S * self.rate_hz), round(_SEARCH_S * self.rate_hz)
        ramp = np.linspace(0, 1, fade, dtype=np.float32)
        parts: list[NDArray[np.float32]] = []
        tail = np.zeros(0, np.float32)
        for piece in pieces:
            waveform, first = self._waveform(piece.position), piece.first
            if len(tail) == fade:
                lowest = max(0, first - search - fade // 2)
                near = waveform[lowest : lowest + 2 * search + fade]
                if len(near) >= fade:
                    energy = np.convolve(near * near, np.ones(fade, np.float32), "valid")
                    alike = np.correlate(near, tail, "valid") / np.sqrt(energy + 1e-6)
                    first = lowest + int(alike.argmax())
                    tail = tail * (1 - ramp) + waveform[first : first + fade] * ramp
                    first += fade
            parts.append(tail)
            stop = max(piece.stop - fade // 2, first)
            parts.append(waveform[first:stop])
            tail = waveform[stop : stop + fade]
        return np.concatenate([*parts, tail])

    @functools.lru_cache(maxsize=64)  # noqa: B019 (a splicer lives as long as its process)
    def _waveform(self, position: int) -> NDArray[np.float32]:
        return self.audio[position]

    def speak(self, number: int, texts: Sequence[SplicedText], seed: int) -> list[Speech | None]:
        """Return the speech of texts by one speaker; None for a text with a label that no recording has.

        The speaker is drawn by `number` and `seed`, each in proportion to the length of that speaker's recordings.
        """
        draw = random.Random(f"{seed} {number}")
        speaker = draw.choices(list(self.seconds), list(self.seconds.values()))[0]
        return [self._speech(text, speaker, draw) for text in texts]

    def _speech(self, text: SplicedText, speaker: str, draw: random.Random) -> Speech | None:
        pieces = self.pieces(text.labels, speaker, draw)
        if not pieces:
            return None
        waveform, file = self.join(pieces), io.BytesIO()
        soundfile.write(file, waveform, self.rate_hz, format="WAV", subtype="PCM_16")
        return text, speaker, file.getvalue(), len(waveform)


def _halves(bank: _Bank, pair: str, draw: random.Random) -> list[Piece] | None:
    """Two labels in a row: wherever a word ends, or the second half of the one and the first half of the other."""
    both = bank.find(pair, draw, word_ends=False)
    if both >= 0:
        return [bank.piece(both, both + 1)]
    first, second = (bank.find(label, draw, word_ends=False) for label in pair)
    if first < 0 or second < 0:
        return None
    end, begin = int(bank.times[first, 1]), int(bank.times[second, 0])
    return [bank.piece(first, first, end=end), bank.piece(second, second, begin=begin)]


def check_folder(folder: Path, hours: float, rate_hz: int) -> None:
    """Check before recordings are aligned that a folder can take so much speech.

    Raises:
        UserError: it has a manifest, whose files would get other speech, or its disk is too small.
    """
    if (folder / MANIFEST).exists():
        raise UserError(f"{folder / MANIFEST} exists already: choose another folder, or remove it")
    digits = "[0-9]" * 6
    own = sum(path.stat().st_size for path in folder.glob(f"{digits}/{digits}.wav"))  # of a killed attempt
    needed, free = round(7200 * hours * rate_hz), shutil.disk_usage(folder).free - SPARE_BYTES + own
    if needed > free:
        raise UserError(
            f"{hours:g} hours take {needed / 1e9:.2f} GB in {folder}, and {max(0, free) / 1e9:.2f} GB are free: take "
            "fewer --hours, or a folder on a larger disk"
        )


def write_spliced(
    splicer: Splicer, texts: Iterator[SplicedText], folder: Path, hours: float, seed: int
) -> list[Utterance]:
    """Write speech of texts: `folder/000000/000000.wav`, ... and, after the last, `folder/manifest.jsonl`.

    Texts are taken until `hours` of speech are written, or they end. Which speech a text gets depends on its number and
    the seed alone.

    Raises:
        UserError: no text can be spoken, or a process was killed.
        OSError: a file cannot be written.
    """
    jobs = enumerate(iter(lambda: list(islice(texts, _TEXTS_OF_A_JOB)), []))
    written, samples, wanted, failures = list[Utterance](), 0, 3600 * hours * splicer.rate_hz, 0
    global _splicer  # noqa: PLW0603 (forked processes share its tables and the open audio)
    _splicer = splicer
    with (
        worker_processes(usable_cores(), "fork") as pool,
        ProgressBar("splicing", 3600 * hours, "s of audio") as progress,
    ):
        running = deque(pool.submit(_spoken, *job, seed) for job in islice(jobs, 2 * usable_cores()))
        while running and samples < wanted and (written or failures < _MOST_FAILURES):
            try:
                spoken = running.popleft().result()
            except BrokenProcessPool as error:
                raise UserError("a process was killed, as where memory runs out: take fewer recordings") from error
            running.extend(pool.submit(_spoken, *job, seed) for job in islice(jobs, 1))
            failures += spoken.count(None)
            for text, speaker, wav, count in filter(None, spoken):
                if samples >= wanted:
                    break
                path = _file(folder, len(written))
                path.parent.mkdir(parents=True, exist_ok=True)
                with name_errors(path):
                    path.write_bytes(wav)
                duration_s = count / splicer.rate_hz
                written.append(Utterance(path.absolute(), duration_s, " ".join(text.words), speaker=speaker))
                samples += count
                progress.update(samples / splicer.rate_hz)
        for job in running:
            job.cancel()
    if failures:
        log.warning("%d texts left out: they have labels that no recording has", failures)
    if not written:
        raise UserError("no text can be spoken with these recordings: the texts have labels that no recording has")
    unlisted = len(written)  # of a longer attempt that was killed
    while (path := _file(folder, unlisted)).exists():
        path.unlink()
        unlisted += 1
    write_manifest(folder / MANIFEST, written)
    return written


def _file(folder: Path, number: int) -> Path:
    return folder / f"{number // 1000:06d}" / f"{number:06d}.wav"


_splicer: Splicer


def _spoken(number: int, texts: Sequence[SplicedText], seed: int) -> list[Speech | None]:
    return _splicer.speak(number, texts, seed)
