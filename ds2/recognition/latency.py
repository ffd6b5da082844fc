"""The latency of words: how long after its end a word of a stream is first shown, and how long until it stays.

Times are seconds of audio.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ds2.audio.read import read_audio
from ds2.config.schema import ConfigError, DataConfig
from ds2.data.loader import SpeechLoader
from ds2.data.manifest import Utterance
from ds2.recognition.recogniser import Recogniser
from ds2.recognition.session import decode_sessions, final_results, results
from ds2.recognition.transcripts import align_batch, transcript_batches
from ds2.scoring.wer import CORRECT, DELETION, INSERTION, align
from ds2.system.files import read_byte_lines
from ds2.system.plain import counted, parse_object

_STREAMS = 32  # in one batch
WordEnd = tuple[str, float]
"""A word and where it ends, seconds from the start of its utterance."""


@dataclass(frozen=True)
class Latency:
    """Delays of the words that were recognised correctly and have a known end; in seconds, (N,) each."""

    first_s: NDArray[np.float64]  # from the end of a word until it was first shown; negative: before its end
    final_s: NDArray[np.float64]  # until it was shown for good
    words: int  # of all references

    def facts(self) -> dict[str, float | int | None]:
        """Return the numbers of a report; those of no words are None."""
        numbers: dict[str, float | int | None] = {"latency_words": len(self.final_s), "latency_of_words": self.words}
        for name, delays in (("first", self.first_s), ("final", self.final_s)):
            for share, percent in (("median", 50), ("p95", 95)):
                value = round(float(np.percentile(delays, percent)), 3) if len(delays) else None
                numbers[f"latency_{name}_{share}_s"] = value
        return numbers

    def __str__(self) -> str:
        numbers = self.facts()
        if not len(self.final_s):
            return f"latency: none of {self.words} words was right, so there is nothing to measure"
        first, final = (
            f"median {numbers[f'latency_{name}_median_s']:.2f} s, 95 % {numbers[f'latency_{name}_p95_s']:.2f} s"
            for name in ("first", "final")
        )
        return (
            f"latency after the end of a word, {len(self.final_s)} of {self.words} words (those that are right): "
            f"first shown {first}; stays {final}"
        )


def measure_latency(
    recogniser: Recogniser,
    utterances: Sequence[Utterance],
    references: Sequence[Sequence[str]],
    ends: Sequence[Sequence[WordEnd]],
    data: DataConfig,
) -> Latency:
    """Stream utterances and measure when each word that is right in the final text was shown; errors as `Session`.

    A block's results count as shown when its last sample has arrived; computation takes no time. After the last sample
    the stream goes on: blocks that only bring the model's lookahead come one by one, as those of silence would.

    Args:
        recogniser: with a unidirectional model and a decoder that streams.
        utterances: N.
        references: their words.
        ends: their words with times, as `aligned_ends` or `WordEnds.of` return them.
        data: of the model's config: how audio is read.
    """
    first, final = list[float](), list[float]()
    order = sorted(range(len(utterances)), key=lambda index: utterances[index].duration_s)
    for start in range(0, len(order), _STREAMS):
        indices = order[start : start + _STREAMS]
        for index, history in zip(indices, _stream(recogniser, [utterances[i] for i in indices], data), strict=True):
            for shown_s, stays_s, end_s in word_delays(references[index], ends[index], history):
                first.append(shown_s - end_s)
                final.append(stays_s - end_s)
    return Latency(np.array(first), np.array(final), sum(map(len, references)))


def _stream(
    recogniser: Recogniser, utterances: Sequence[Utterance], data: DataConfig
) -> list[list[tuple[float, list[str]]]]:
    """Return the words that each stream showed after each block, with the audio time in seconds; the last are final."""
    sessions = [recogniser.session() for _ in utterances]
    for session, u in zip(sessions, utterances, strict=True):
        session.accept_waveform(
            read_audio(u.audio_filepath, data.sample_rate_hz, u.offset_s, u.duration_s, data.channel)
        )
        session.input_finished()
    features, frames = recogniser.features, sessions[0].block_frames
    arrived = features.samples(frames)  # at the end of the first block
    histories: list[list[tuple[float, list[str]]]] = [[] for _ in sessions]
    while ready := [index for index, session in enumerate(sessions) if session.is_ready()]:
        decode_sessions([sessions[index] for index in ready])
        for index, hypothesis in zip(ready, results([sessions[index] for index in ready]), strict=True):
            histories[index].append((arrived / features.sample_rate_hz, hypothesis.text.split()))
        arrived += frames * features.step_samples
    for history, hypothesis in zip(histories, final_results(sessions), strict=True):
        history.append((history[-1][0] if history else 0.0, hypothesis.text.split()))
    return histories


def word_delays(
    reference: Sequence[str], ends: Sequence[WordEnd], history: Sequence[tuple[float, Sequence[str]]]
) -> Iterator[tuple[float, float, float]]:
    """Yield for each word that is right when it was first shown, since when it stays, and its end, in seconds.

    Args:
        ends: words with times; those that are not the reference's are left out.
        history: the words shown at each time, in order; the last are the final ones.
    """
    final = history[-1][1]
    first, since = [float("inf")] * len(final), [float("inf")] * len(final)
    for time_s, words in history:
        matched = {place for place, _ in _pairs(final, words, same=True)}
        for place in range(len(final)):
            if place in matched:
                first[place], since[place] = min(first[place], time_s), min(since[place], time_s)
            else:
                since[place] = float("inf")
    end_s = {place: ends[other][1] for place, other in _pairs(reference, [word for word, _ in ends], same=False)}
    for place, other in _pairs(reference, final, same=True):
        if place in end_s:
            yield first[other], since[other], end_s[place]


def _pairs(reference: Sequence[str], words: Sequence[str], *, same: bool) -> Iterator[tuple[int, int]]:
    """Yield the places of words that an alignment pairs; only those of equal words if `same`."""
    i = j = 0
    for edit in align(list(reference), list(words)):
        if edit == CORRECT or (edit not in (INSERTION, DELETION) and not same):
            yield i, j
        i, j = i + (edit != INSERTION), j + (edit != DELETION)


def aligned_ends(recogniser: Recogniser, loader: SpeechLoader) -> list[list[WordEnd]]:
    """Return where each word of the loader's transcripts ends by a forced alignment of the model itself.

    The end is that of the frames of the word's last label. A model that writes its labels late has late ends too.
    Where the recogniser writes phones, each phone is a word. Errors as `Recogniser.logits`.
    """
    ends: dict[int, list[WordEnd]] = {}
    for indices, log_probs, lengths, targets, texts in transcript_batches(recogniser, loader):
        joined = () if recogniser.writes_phones else texts
        aligned = align_batch(log_probs, lengths, targets, recogniser.alphabet, recogniser.frame_s, joined)
        ends.update((i, [(w.text, w.end_s) for w in a.words]) for i, a in zip(indices, aligned, strict=True))
    return [ends[index] for index in range(len(loader.utterances))]


@dataclass(frozen=True)
class WordEnds:
    """Where words end, by a file of `ds2 align --out`, of another model say."""

    path: Path
    ends: dict[tuple[str, float], list[WordEnd]]  # by the path of the audio and the offset, seconds

    def of(self, utterances: Sequence[Utterance]) -> list[list[WordEnd]]:
        """Return the ends of the words of each utterance; raises ConfigError for one that the file lacks."""
        keys = [(str(u.audio_filepath), round(u.offset_s, 3)) for u in utterances]
        missing = [u.name for u, key in zip(utterances, keys, strict=True) if key not in self.ends]
        if missing:
            raise ConfigError(
                f"{self.path} has no words of {len(missing)} of {counted(len(keys), 'utterance')}, the first is "
                f"{missing[0]}: make it with `ds2 align MODEL MANIFEST --out FILE` from the same manifest"
            )
        return [self.ends[key] for key in keys]


def read_ends(path: Path) -> WordEnds:
    """Read a file of `ds2 align --out`.

    Raises:
        UserError: the file cannot be read.
        ConfigError: a line that such a file does not have.
    """
    known: dict[tuple[str, float], list[WordEnd]] = {}
    for number, line in read_byte_lines(path):
        try:
            record = parse_object(line)
            words = [(str(word["text"]), float(word["end_s"])) for word in record["words"]]
            known[str(record["audio_filepath"]), round(float(record["offset"]), 3)] = words
        except (ValueError, KeyError, TypeError, OverflowError) as error:  # OverflowError: a number of 400 digits
            raise ConfigError(
                f"{path}, line {number}: no line of `ds2 align --out` ({type(error).__name__}: {error}): make the file "
                "with `ds2 align MODEL MANIFEST --out FILE`"
            ) from error
    return WordEnds(path, known)
