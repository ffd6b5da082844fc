"""Word and character error rates: alignment of texts, counts of errors, reports of a corpus.

The rate of a corpus is the sum of errors over the sum of reference words, not a mean of rates.
"""

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeVar

import numpy as np

from ds2.scoring.statistics import ConfidenceInterval, bootstrap_interval
from ds2.system import UserError
from ds2.system.plain import grouped

CORRECT, SUBSTITUTION, DELETION, INSERTION = "C", "S", "D", "I"
MAX_CELLS = 10**11  # of the table of one utterance, a minute or two
MAX_CELLS_APART = 10**10  # of texts that have less than half of their tokens in common: no long recording is so wrong
STORED_CELLS = 10**8  # tables up to this size are stored whole, in 25 MB
_MASK_BYTES = 2**25  # cache of the masks of frequent tokens
Key = TypeVar("Key", str, int)
# Rows of the table by length: the largest number of words of each but the last, and the label of each.
_LENGTH_LIMITS_WORDS = (0, 5, 10, 20, 40)
_LENGTH_LABELS = ("0", "1-5", "6-10", "11-20", "21-40", "41+")


@dataclass(frozen=True, slots=True)
class ErrorCounts:
    """Counts of edits between references and hypotheses; `a + b` adds two corpora."""

    correct: int = 0
    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0

    def __add__(self, other: "ErrorCounts") -> "ErrorCounts":
        return ErrorCounts(
            self.correct + other.correct,
            self.substitutions + other.substitutions,
            self.deletions + other.deletions,
            self.insertions + other.insertions,
        )

    @property
    def errors(self) -> int:
        """Substitutions, deletions and insertions."""
        return self.substitutions + self.deletions + self.insertions

    @property
    def reference_length(self) -> int:
        """Number of words (or characters) of the references."""
        return self.correct + self.substitutions + self.deletions

    @property
    def rate(self) -> float:
        """Errors over reference length; for an empty reference 0 without errors and infinite with errors."""
        if self.reference_length:
            return self.errors / self.reference_length
        return math.inf if self.errors else 0.0


def align(reference: Sequence[Hashable], hypothesis: Sequence[Hashable], name: str = "an utterance") -> str:
    """Align two sequences with the fewest edits (Levenshtein distance).

    A column of the table is an integer with a bit for each reference token (Myers 1999, Hyyrö 2003), so that a token of
    the hypothesis costs a few integer operations. Among several shortest alignments the result is that of rapidfuzz
    and jiwer: not only the sum but also the kinds of errors agree.

    Args:
        reference: tokens (words of a list, characters of a string).
        hypothesis: tokens.
        name: of the utterance, for error messages.

    Returns:
        A letter for each edit, in order: C correct, S substituted, D deleted (reference only), I inserted (hypothesis
        only).

    Raises:
        UserError: the table, without equal tokens at both ends, has more than `MAX_CELLS` cells, or more than
            `MAX_CELLS_APART` where the texts have less than half of their tokens in common.
    """
    if reference == hypothesis:
        return CORRECT * len(reference)
    shorter = min(len(reference), len(hypothesis))
    head = next((i for i in range(shorter) if reference[i] != hypothesis[i]), shorter)
    tail = next((i for i in range(shorter - head) if reference[-1 - i] != hypothesis[-1 - i]), shorter - head)
    middle = _align_bits(reference[head : len(reference) - tail], hypothesis[head : len(hypothesis) - tail], name)
    return CORRECT * head + middle + CORRECT * tail


def _align_bits(reference: Sequence[Hashable], hypothesis: Sequence[Hashable], name: str) -> str:
    """Align sequences without equal ends.

    Let D[i][j] be the distance of the first i reference and j hypothesis tokens. Bit i - 1 of the j-th rise means
    D[i][j] = D[i-1][j] + 1, that of the j-th fall D[i][j] = D[i-1][j] - 1. Of a large table only some columns are
    kept; the others are computed again when the path is traced back.
    """
    cells, shorter = len(reference) * len(hypothesis), min(len(reference), len(hypothesis))
    common = (Counter(reference) & Counter(hypothesis)).total()
    if not common:
        more, fewer = len(hypothesis) - shorter, len(reference) - shorter
        return INSERTION * more + SUBSTITUTION * shorter + DELETION * fewer  # in rapidfuzz's order
    allowed = MAX_CELLS if 2 * common >= shorter else MAX_CELLS_APART
    if cells > allowed:
        apart = "" if allowed == MAX_CELLS else f", of which {common} are common,"
        raise UserError(
            f"{name}: {len(reference)} and {len(hypothesis)} words or characters{apart} take too long to align: their "
            f"product may be {allowed:.0e} at most; split it into utterances"
        )
    masks = _masks(reference)
    full = (1 << len(reference)) - 1
    block = len(hypothesis) if cells <= STORED_CELLS else math.isqrt(len(hypothesis)) + 1
    firsts = range(0, len(hypothesis), block)
    checkpoints = [(full, 0)]
    for first in firsts[:-1]:
        checkpoints.append(_columns(hypothesis[first : first + block], masks, full, checkpoints[-1])[-1])
    edits = []
    size = len(reference) // 8 + 1
    i, j = len(reference), len(hypothesis)
    for first in reversed(firsts):
        columns = [
            (rise.to_bytes(size, "little"), fall.to_bytes(size, "little"))  # a bit of an int costs its length
            for rise, fall in _columns(hypothesis[first : first + block], masks, full, checkpoints.pop())
        ]
        while i and j > first:
            byte, bit = divmod(i - 1, 8)
            if columns[j - first][0][byte] >> bit & 1:
                i -= 1
                edits.append(DELETION)
            elif columns[j - first - 1][1][byte] >> bit & 1:
                j -= 1
                edits.append(INSERTION)
            else:
                i, j = i - 1, j - 1
                edits.append(CORRECT if reference[i] == hypothesis[j] else SUBSTITUTION)
    edits.append(DELETION * i + INSERTION * j)
    return "".join(reversed(edits))


def _masks(reference: Sequence[Hashable]) -> Callable[[Hashable], int]:
    """Return the function token -> integer whose bit i says that reference[i] is the token.

    Time and memory are linear in the reference: positions are listed once, and masks are made when they are needed.
    """
    positions = grouped(range(len(reference)), reference.__getitem__)
    size = len(reference) // 8 + 1

    @lru_cache(maxsize=max(1, _MASK_BYTES // size))
    def mask(token: Hashable) -> int:
        bits = bytearray(size)
        for i in positions.get(token, ()):
            bits[i >> 3] |= 1 << (i & 7)
        return int.from_bytes(bits, "little")

    return mask


def _columns(
    tokens: Sequence[Hashable], masks: Callable[[Hashable], int], full: int, column: tuple[int, int]
) -> list[tuple[int, int]]:
    """Return a column of the table, as (rise, fall), and the columns after each token."""
    rise, fall = column
    columns = [column]
    for token in tokens:
        equal = masks(token)
        diagonal_equal = (((equal & rise) + rise) ^ rise) | equal | fall
        across_rise = (fall | (full & ~(diagonal_equal | rise))) << 1 | 1
        across_fall = diagonal_equal & rise
        rise = (across_fall << 1 | ~(diagonal_equal | across_rise)) & full
        fall = across_rise & diagonal_equal & full
        columns.append((rise, fall))
    return columns


def count_edits(edits: str) -> ErrorCounts:
    return ErrorCounts(edits.count(CORRECT), edits.count(SUBSTITUTION), edits.count(DELETION), edits.count(INSERTION))


def word_errors(reference: str, hypothesis: str) -> ErrorCounts:
    return count_edits(align(reference.split(), hypothesis.split()))


def character_errors(reference: str, hypothesis: str, name: str = "an utterance") -> ErrorCounts:
    """Count the character errors between two texts; words are separated by one space."""
    return count_edits(align(" ".join(reference.split()), " ".join(hypothesis.split()), name))


@dataclass(frozen=True, slots=True)
class AlignedUtterance:
    """An utterance of a report: its texts, the edits of their words (see :func:`align`) and their counts."""

    name: str
    speaker: str
    reference_text: str
    hypothesis_text: str
    edits: str
    words: ErrorCounts

    @property
    def reference(self) -> list[str]:
        return self.reference_text.split()

    @property
    def hypothesis(self) -> list[str]:
        return self.hypothesis_text.split()

    def pairs(self) -> list[tuple[str, str, str]]:
        """Return the alignment as (edit, reference word or '', hypothesis word or '')."""
        reference, hypothesis = iter(self.reference), iter(self.hypothesis)
        return [
            (edit, "" if edit == INSERTION else next(reference), "" if edit == DELETION else next(hypothesis))
            for edit in self.edits
        ]


class Report:
    """The errors of a corpus; expensive properties are computed when they are first read."""

    def __init__(self, utterances: list[AlignedUtterance]) -> None:
        self.utterances = utterances
        self.words = sum((u.words for u in utterances), ErrorCounts())

    @property
    def wer(self) -> float:
        """Word errors over reference words of the whole corpus (0.07 is 7 %)."""
        return self.words.rate

    @property
    def cer(self) -> float:
        """Character errors over reference characters of the whole corpus, including the spaces between words."""
        return self.characters.rate

    @cached_property
    def characters(self) -> ErrorCounts:
        """Character errors of the whole corpus."""
        counts = (character_errors(u.reference_text, u.hypothesis_text, u.name) for u in self.utterances)
        return sum(counts, ErrorCounts())

    @property
    def wrong_utterances(self) -> int:
        """Number of utterances with errors."""
        return sum(u.words.errors > 0 for u in self.utterances)

    @cached_property
    def by_speaker(self) -> dict[str, ErrorCounts]:
        """Word errors of each speaker, highest rate first; empty if no speaker is known."""
        groups = _grouped(self.utterances, lambda u: u.speaker) if any(u.speaker for u in self.utterances) else {}
        return dict(sorted(groups.items(), key=lambda item: (-item[1].rate, item[0])))

    @cached_property
    def by_length(self) -> dict[str, ErrorCounts]:
        """Word errors by number of words in the reference, short utterances first."""
        groups = _grouped(self.utterances, lambda u: bisect_left(_LENGTH_LIMITS_WORDS, u.words.reference_length))
        return {_LENGTH_LABELS[row]: groups[row] for row in sorted(groups)}

    @cached_property
    def confusions(self) -> Counter[tuple[str, str, str]]:
        """Count of each error (edit, reference word or '', hypothesis word or '')."""
        return Counter(pair for u in self.utterances if u.words.errors for pair in u.pairs() if pair[0] != CORRECT)

    @cached_property
    def interval(self) -> ConfidenceInterval:
        """95 % bootstrap interval of the WER over utterances."""
        return bootstrap_interval(*self.errors_and_lengths())

    @cached_property
    def speaker_interval(self) -> ConfidenceInterval | None:
        """95 % bootstrap interval of the WER over speakers; None if fewer than two are known."""
        speakers = [u.speaker for u in self.utterances]
        if len(set(speakers)) < 2:
            return None
        return bootstrap_interval(*self.errors_and_lengths(), groups=speakers)

    def errors_and_lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Word errors and reference words of each utterance, both (U,) int64."""
        errors = np.array([u.words.errors for u in self.utterances], dtype=np.int64)
        return errors, np.array([u.words.reference_length for u in self.utterances], dtype=np.int64)


def corpus_report(
    references: Sequence[str],
    hypotheses: Sequence[str],
    *,
    names: Sequence[str] | None = None,
    speakers: Sequence[str] | None = None,
) -> Report:
    """Align a corpus utterance by utterance.

    Args:
        references: texts, split into words at white space and not normalised further.
        hypotheses: texts in the same order.
        names: of the utterances; default: their 1-based positions.
        speakers: of the utterances; '' if unknown.

    Raises:
        ValueError: the sequences differ in length.
        UserError: an utterance is too long to align.
    """
    names = [str(1 + i) for i in range(len(references))] if names is None else names
    speakers = [""] * len(references) if speakers is None else speakers
    if not len(references) == len(hypotheses) == len(names) == len(speakers):
        raise ValueError(
            f"{len(references)} references, {len(hypotheses)} hypotheses, {len(names)} names, {len(speakers)} speakers"
            ": each utterance needs one of each"
        )
    utterances = []
    for reference, hypothesis, name, speaker in zip(references, hypotheses, names, speakers, strict=True):
        edits = align(reference.split(), hypothesis.split(), name)
        utterances.append(AlignedUtterance(name, speaker, reference, hypothesis, edits, count_edits(edits)))
    return Report(utterances)


def _grouped(utterances: Iterable[AlignedUtterance], key: Callable[[AlignedUtterance], Key]) -> dict[Key, ErrorCounts]:
    groups = defaultdict[Key, ErrorCounts](ErrorCounts)
    for utterance in utterances:
        groups[key(utterance)] += utterance.words
    return groups
