"""What decoders return: hypotheses of words with times, and the error of what cannot be decoded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ds2.system.errors import UserError
from ds2.text.alphabet import WORD_MARK, Alphabet


class DecodeError(UserError):
    """Logits that cannot be decoded; `rows` are the utterances' places in the batch."""

    def __init__(self, message: str, rows: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.rows = list(rows)


@dataclass(frozen=True)
class Word:
    """A word and where it was heard.

    `confidence`, 0 to 1, is the product of its labels' probabilities, each at its most certain frame; where
    `decode.confidence` was fitted on a dev set, the share of such words that were right there.
    """

    text: str
    start_s: float
    end_s: float
    confidence: float


def word_record(word: Word) -> dict[str, str | float]:
    """Return a word for JSON: times to the millisecond, which is finer than any output frame."""
    return {
        "text": word.text,
        "start_s": round(word.start_s, 3),
        "end_s": round(word.end_s, 3),
        "confidence": round(word.confidence, 4),
    }


@dataclass(frozen=True)
class Hypothesis:
    """What was recognised in one utterance; scores are natural logarithms.

    `score` is Q(y) = acoustic + alpha x lm + bonus, of a greedy one the best path's log-prob.
    """

    text: str
    score: float
    labels: tuple[int, ...]
    words: tuple[Word, ...]
    acoustic: float = 0.0  # log p_ctc(y|x), summed over the alignments that the search followed
    lm: float = 0.0  # log p_lm(y), not weighted
    bonus: float = 0.0  # beta x words + hot words


EMPTY = Hypothesis("", 0.0, (), ())  # of what is too short for a frame


Run = tuple[int, int, int, float]
"""A label, its first frame, the frame after its last, its highest natural log-prob."""


def spell_words(runs: Sequence[Run], alphabet: Alphabet, frame_s: float) -> tuple[Word, ...]:
    """Gather labels into words, at white space or, in alphabets of pieces, before the word mark.

    Args:
        runs: of the labels, in order.
        alphabet: symbols of the labels.
        frame_s: seconds an output frame.
    """
    spelled: list[list[Run]] = [[]]
    for run in runs:
        symbol = alphabet.symbols[run[0]]
        if symbol.isspace() or symbol.startswith(WORD_MARK):
            spelled.append([])
        if symbol.strip().removeprefix(WORD_MARK):
            spelled[-1].append(run)
    return tuple(
        Word(
            alphabet.decode(label for label, *_ in word).replace(WORD_MARK, ""),
            word[0][1] * frame_s,
            word[-1][2] * frame_s,
            math.exp(sum(peak for *_, peak in word)),
        )
        for word in spelled
        if word
    )
