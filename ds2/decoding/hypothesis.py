"""Hypotheses, which decoders return: texts with scores, labels, and words with times; and the error of decoding."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ds2.system import UserError
from ds2.text.alphabet import WORD_MARK, Alphabet


class DecodeError(UserError):
    """Logits that cannot be decoded; `rows` are the indices of the utterances in the batch."""

    def __init__(self, message: str, rows: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.rows = list(rows)


@dataclass(frozen=True)
class Word:
    """A recognised word and its time span.

    `confidence`, 0 to 1, is the product of the probabilities of its labels, each at its most certain frame. With
    `decode.confidence` fitted on a dev set it is the estimated probability that the word is right.
    """

    text: str
    start_s: float
    end_s: float
    confidence: float


def clip_words(words: tuple[Word, ...], duration_s: float) -> tuple[Word, ...]:
    """Return the words so that they end with their audio: the last output frame may reach beyond it."""
    if not words or words[-1].end_s <= duration_s:
        return words
    return tuple(replace(word, end_s=min(word.end_s, duration_s)) for word in words)


def span_record(start_s: float, end_s: float) -> dict[str, float]:
    """Return a time span for JSON, rounded to milliseconds."""
    return {"start_s": round(start_s, 3), "end_s": round(end_s, 3)}


def word_record(word: Word) -> dict[str, str | float]:
    """Return a word for JSON, with times rounded to milliseconds."""
    times = span_record(word.start_s, word.end_s)
    return {"text": word.text, **times, "confidence": round(word.confidence, 4)}


def times_record(word: Word, offset_s: float = 0.0) -> dict[str, float]:
    """Return times and confidence of a word for JSON, by the names of OpenAI and Deepgram; the times with an offset."""
    start, end = round(offset_s + word.start_s, 3), round(offset_s + word.end_s, 3)
    return {"start": start, "end": end, "confidence": round(word.confidence, 4)}


@dataclass(frozen=True)
class Hypothesis:
    """One transcription of one utterance; all scores are natural logarithms.

    `score` is Q(y) = acoustic + alpha x lm + bonus; for greedy decoding it is the log-prob of the best path.
    """

    text: str
    score: float
    labels: tuple[int, ...]
    words: tuple[Word, ...]
    acoustic: float = 0.0  # log p_ctc(y|x), over the alignments that the search followed
    lm: float = 0.0  # log p_lm(y), unweighted
    bonus: float = 0.0  # beta x words + hot words
    fixed_words: int = field(default=0, compare=False)  # of a stream: the first words, which no later frame changes


EMPTY = Hypothesis("", 0.0, (), ())  # of an utterance shorter than one frame


Run = tuple[int, int, int, float]
"""A label, its first frame, the frame after its last, its highest natural log-prob."""


def spell_words(runs: Sequence[Run], alphabet: Alphabet, frame_s: float) -> tuple[Word, ...]:
    """Group labels, in order, into words: white space separates them; a word mark starts one; each phone is one."""
    spelled: list[list[Run]] = [[]]
    for run in runs:
        if alphabet.starts_word[run[0]]:
            spelled.append([])
        if alphabet.writes[run[0]]:
            spelled[-1].append(run)
    return tuple(
        [
            Word(
                alphabet.decode([run[0] for run in word]).replace(WORD_MARK, ""),
                word[0][1] * frame_s,
                word[-1][2] * frame_s,
                math.exp(sum([run[3] for run in word])),
            )
            for word in spelled
            if word
        ]
    )
