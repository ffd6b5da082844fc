"""Transcripts aligned to their audio: word times, and transcripts that are probably wrong."""

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from ds2.data.loader import SpeechLoader
from ds2.decoding.alignment import force_align
from ds2.decoding.hypothesis import Word, spell_words
from ds2.recognition.captions import Interval
from ds2.recognition.recogniser import Recogniser
from ds2.text.alphabet import WORD_MARK, Alphabet

_MAD_TO_DEVIATION = 1.4826  # of a normal distribution
_DEVIATIONS = 6.0  # above the median: listed where there is no measured limit
_SWAPPED_SHARE = 0.05  # of swapped transcripts that are below the limit
_FEWEST_SWAPPED = 20
_MIN_SURPRISE = 2.0  # nats a label: smaller surprises are never listed


@dataclass(frozen=True)
class AlignedTranscript:
    """A transcript on its audio.

    `surprise` is how much less probable the transcript's best path is than the best path of all, in natural log a
    label: 0 if the network would have written the same, infinite if the transcript is too long for the audio.
    """

    words: tuple[Word, ...]
    surprise: float
    labels: tuple[Interval, ...] = ()  # of characters or pieces without their word mark; none of white space


def align_batch(
    log_probs: Tensor,
    lengths: Tensor,
    targets: Sequence[Sequence[int]],
    alphabet: Alphabet,
    frame_s: float,
    texts: Sequence[str] = (),
) -> list[AlignedTranscript]:
    """Align transcripts; arguments as `force_align`, `frame_s` is seconds an output frame.

    `texts`, as `Alphabet.written` returns them, say which phones are a word; without them each phone is one.
    """
    valid = torch.arange(len(log_probs), device=log_probs.device)[:, None] < lengths.to(log_probs.device)
    best = torch.where(valid, log_probs.amax(2), 0.0).sum(0, dtype=torch.float64).tolist()
    alignments = force_align(log_probs, lengths, targets)
    transcripts: list[AlignedTranscript] = []
    for alignment, top, target, text in zip(alignments, best, targets, texts or [""] * len(targets), strict=True):
        if alignment is None:
            transcripts.append(AlignedTranscript((), math.inf))
            continue
        runs = alignment.runs()
        written = (
            Interval(first * frame_s, end * frame_s, alphabet.symbols[label].strip().removeprefix(WORD_MARK))
            for label, first, end, _ in runs
        )
        spelled = tuple(interval for interval in written if interval.text)
        words = spell_words(runs, alphabet, frame_s)
        if text and alphabet.pronunciations is not None:
            words = _pronounced(words, text, alphabet)
        transcripts.append(AlignedTranscript(words, max(0.0, top - alignment.log_prob) / max(1, len(target)), spelled))
    return transcripts


def _pronounced(phones: Sequence[Word], text: str, alphabet: Alphabet) -> tuple[Word, ...]:
    """Join the phones of each word of a text."""
    left, words = iter(phones), []
    for word in text.split():
        own = list(islice(left, len(alphabet.spell(word))))
        words.append(Word(word, own[0].start_s, own[-1].end_s, math.prod(phone.confidence for phone in own)))
    return tuple(words)


def suspicious(surprises: Iterable[float], swapped: Sequence[float] = ()) -> list[int]:
    """Return the indices of transcripts that are probably wrong, worst first: above two nats, and above a limit.

    Args:
        surprises: of the transcripts, nats a label.
        swapped: of transcripts on the audio of other utterances: the limit is what 95 % of them exceed. Of fewer than
            20 no limit is taken: it is then six median deviations above the median of `surprises`.
    """
    values = list(surprises)
    finite = [value for value in values if math.isfinite(value)]
    others = sorted(value for value in swapped if math.isfinite(value))
    limit = 0.0
    if len(others) >= _FEWEST_SWAPPED:
        limit = max(_MIN_SURPRISE, others[int(_SWAPPED_SHARE * len(others))])
    elif finite:
        median = statistics.median(finite)
        deviation = _MAD_TO_DEVIATION * statistics.median(abs(value - median) for value in finite)
        limit = max(_MIN_SURPRISE, median + _DEVIATIONS * deviation)
    return sorted((i for i, value in enumerate(values) if value > limit), key=lambda i: -values[i])


def align_utterances(recogniser: Recogniser, loader: SpeechLoader) -> tuple[list[AlignedTranscript], list[float]]:
    """Align the transcripts of a loader's utterances to their audio; errors as `Recogniser.logits`.

    Characters outside the alphabet are left out.

    Returns:
        The aligned transcripts, in order; and the surprises of transcripts on the audio of another utterance of about
        the same length, as `suspicious` takes them.
    """
    alphabet, frame_s = recogniser.alphabet, recogniser.frame_s
    aligned: dict[int, AlignedTranscript] = {}
    swapped: list[float] = []
    for indices, log_probs, lengths, targets, texts in transcript_batches(recogniser, loader):
        transcripts = align_batch(log_probs, lengths, targets, alphabet, frame_s, texts)
        aligned.update(zip(indices, transcripts, strict=True))
        others = targets[1:] + targets[:1]  # a batch holds utterances of about one length
        on_others = align_batch(log_probs, lengths, others, alphabet, frame_s)
        swapped += [x.surprise for own, target, x in zip(targets, others, on_others, strict=True) if own != target]
    return [aligned[i] for i in range(len(loader.utterances))], swapped


def transcript_batches(
    recogniser: Recogniser, loader: SpeechLoader
) -> Iterator[tuple[list[int], Tensor, Tensor, list[list[int]], list[str]]]:
    """Yield batches: indices, log-probs (T', B, V), lengths (B,), labels and texts; unknown characters are left out."""
    alphabet = replace(recogniser.alphabet, unknown="drop")
    written = [alphabet.written(u.text) for u in loader.utterances]  # raises before the model runs
    for indices, logits, lengths in recogniser.logits(loader):
        texts = [written[index] for index in indices]
        yield indices, logits.float().log_softmax(2), lengths, [alphabet.spell(text) for text in texts], texts
