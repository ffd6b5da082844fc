"""Confidence intervals of word error rates and tests of two systems, by resampling of utterances or speakers."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ds2.system import UserError

Counts = NDArray[np.int64]
_REPLICATES = 2000  # resampled corpora
_CONFIDENCE = 0.95
_DRAWS_AT_ONCE = 2**22  # bounds the memory of resampling


@dataclass(frozen=True)
class ConfidenceInterval:
    """An interval of a rate or a difference of rates, as fractions; `units` is the number of resampled units."""

    low: float
    high: float
    units: int
    confidence: float


@dataclass(frozen=True)
class PairedTest:
    """A comparison of system B with system A on the same utterances.

    `difference` is the WER of B minus the WER of A (negative: B is better), `interval` its bootstrap interval, and
    `p_value` the two-sided probability of a difference this large if the systems were interchangeable.
    """

    difference: float
    interval: ConfidenceInterval
    p_value: float


def bootstrap_interval(errors: Counts, lengths: Counts, groups: Sequence[Hashable] | None = None) -> ConfidenceInterval:
    """Return the 95 % percentile bootstrap interval of sum(errors) / sum(lengths) (Bisani and Ney 2004).

    The errors of a speaker's utterances are correlated. Resampling of speakers (`groups`) gives a wider interval that
    is valid for new speakers; with fewer than ten speakers it is inaccurate.

    Args:
        errors: (U,) of each utterance; may be differences of two systems' errors.
        lengths: (U,) reference words of each utterance.
        groups: the group of each utterance, which is resampled as a whole. None: utterances are resampled.

    Returns:
        The interval; NaN at both ends if no reference has a word.
    """
    errors, lengths = _by_group(errors, groups), _by_group(lengths, groups)
    units = len(errors)
    if not lengths.sum():
        return ConfidenceInterval(math.nan, math.nan, units, _CONFIDENCE)
    # Units with equal errors and words are interchangeable: the counts of each kind have a multinomial distribution.
    base = int(lengths.max()) + 1
    kinds, alike = np.unique(errors * base + lengths, return_counts=True)
    rng = np.random.default_rng(1)
    rates = []
    for count in _chunks(len(kinds)):
        drawn = rng.multinomial(units, alike / units, size=count)
        words = drawn @ (kinds % base)
        rates.append((drawn @ (kinds // base))[words > 0] / words[words > 0])
    tail = 50 * (1 - _CONFIDENCE)
    low, high = np.percentile(np.concatenate(rates), [tail, 100 - tail])
    return ConfidenceInterval(float(low), float(high), units, _CONFIDENCE)


def paired_test(
    errors_a: Counts, errors_b: Counts, lengths: Counts, groups: Sequence[Hashable] | None = None
) -> PairedTest:
    """Compare two systems on the same utterances.

    The interval, of 95 %, is the paired bootstrap of Bisani and Ney (2004). The p-value is that of a matched-pairs
    randomisation test (Noreen 1989): the results of the two systems are swapped at random for each utterance or
    speaker, and differences at least as large as the measured one are counted. The test assumes no distribution. The
    smallest p-value is 1 / 2001.

    Args:
        errors_a, errors_b: (U,) word errors of the systems A and B.
        lengths: (U,) reference words.
        groups: as in :func:`bootstrap_interval`.

    Raises:
        UserError: no reference has a word.
    """
    if not lengths.sum():
        raise UserError("no reference has a word: systems cannot be compared by WER")
    difference = errors_b - errors_a
    interval = bootstrap_interval(difference, lengths, groups)
    swapped = _by_group(difference, groups)
    sizes, alike = np.unique(np.abs(swapped), return_counts=True)
    rng = np.random.default_rng(1)
    as_large = 0
    for count in _chunks(len(sizes)):
        unswapped = rng.binomial(alike, 0.5, size=(count, len(sizes)))  # number of unswapped units of each size
        as_large += int((np.abs((2 * unswapped - alike) @ sizes) >= abs(swapped.sum())).sum())
    rate = float(difference.sum() / lengths.sum())
    return PairedTest(rate, interval, (as_large + 1) / (_REPLICATES + 1))


def _by_group(values: Counts, groups: Sequence[Hashable] | None) -> Counts:
    if groups is None:
        return values
    numbers: dict[Hashable, int] = {}
    index = [numbers.setdefault(group, len(numbers)) for group in groups]
    sums = np.zeros(len(numbers), dtype=np.int64)
    np.add.at(sums, index, values)
    return sums


def _chunks(kinds: int) -> list[int]:
    size = max(1, _DRAWS_AT_ONCE // max(1, kinds))
    return [min(size, _REPLICATES - start) for start in range(0, _REPLICATES, size)]
