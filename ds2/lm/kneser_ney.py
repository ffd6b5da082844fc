"""Interpolated modified Kneser-Ney estimation with count pruning.

Chen and Goodman 1998, "An Empirical Study of Smoothing Techniques for Language Modeling", section 3 and equation (26);
Heafield, Pouzyrevsky, Clark and Koehn 2013, "Scalable Modified Kneser-Ney Language Model Estimation", sections 2 and 3.
With a the adjusted count, u v w an n-gram and v w its suffix:

    p(w | u v) = (a(u v w) - D(a(u v w))) / sum_x a(u v x)  +  gamma(u v) p(w | v)

N-grams are counted order by order, by an external merge sort: memory does not grow with the text. The key of an n-gram
of order n is (position of its prefix among the n-grams of order n - 1) x V + last word, so that keys of any order fit
64 bits. A file of positions says for each token of the text which n-gram ends there.
"""

import logging
import os
import tempfile
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds2.lm.ngram import END, START, UNKNOWN, LanguageModelError, Level, NGram, from_levels, slices
from ds2.system.files import temporary_folder

log = logging.getLogger(__name__)
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
UNKNOWN_ID, START_ID, END_ID = 0, 1, 2
_BYTES_PER_TOKEN = 64  # of a chunk, including temporary arrays
MAX_ORDER = 20
DEFAULT_MEMORY_BYTES = 512 << 20
_FALLBACK_DISCOUNTS = (0.0, 0.5, 1.0, 1.5)
_MIN_MASS = 1e-99  # keeps the logarithm of a back-off weight of zero finite


class Scratch:
    """Memory-mapped arrays in a folder, whose space is reserved so that a full disk raises an error."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._files = folder, 0

    def _path(self) -> Path:
        self._files += 1
        return self._folder / str(self._files)

    def zeros(self, length: int, dtype: type = np.int64) -> NDArray[Any]:
        """Return an array (length,) of zeros."""
        path = self._path()
        with open(path, "wb") as out:
            os.posix_fallocate(out.fileno(), 0, max(1, length * np.dtype(dtype).itemsize))
        return np.memmap(path, dtype, "r+", shape=(length,)) if length else np.zeros(0, dtype)

    def append(self, parts: Iterable[NDArray[Any]], dtype: type = np.int64) -> NDArray[Any]:
        """Return the concatenation of the parts."""
        return self.append_pairs(((part,) for part in parts), (dtype,))[0]

    def append_pairs(self, parts: Iterable[tuple[NDArray[Any], ...]], dtypes: tuple[type, ...]) -> list[NDArray[Any]]:
        """Return the concatenations of the parts of several arrays."""
        paths = [self._path() for _ in dtypes]
        with ExitStack() as stack:
            outs = [stack.enter_context(open(path, "wb")) for path in paths]
            for part in parts:
                for out, values, dtype in zip(outs, part, dtypes, strict=True):
                    out.write(np.ascontiguousarray(values, dtype).data)
        return [
            np.memmap(path, dtype, "r+") if path.stat().st_size else np.zeros(0, dtype)
            for path, dtype in zip(paths, dtypes, strict=True)
        ]


@contextmanager
def temporary_scratch(folder: Path | None) -> Iterator[Scratch]:
    """Yield arrays in a new folder within `folder`, by default that of the system for temporary files.

    Raises:
        LanguageModelError: the new folder cannot be made, or the disk is full.
    """
    parent, problem = folder or Path(tempfile.gettempdir()), "no temporary folder can be created"
    try:
        with temporary_folder(parent, "ds2-lm") as own:
            problem = "the n-grams do not fit"
            yield Scratch(own)
    except OSError as error:
        raise LanguageModelError(f"{problem} in {parent} ({error}): choose another folder with --temp-dir") from error


@dataclass
class NgramCounts:
    """The n-grams of one order, sorted by key."""

    keys: Ints  # prefix position x V + last word
    counts: Ints  # occurrences
    suffix: Ints  # position, one order below, of the n-gram without its first word
    from_start: NDArray[np.bool_]  # starts with <s>


def count_ngrams(
    sentences: Iterable[list[str]], order: int, memory_bytes: int, scratch: Scratch
) -> tuple[list[str], list[NgramCounts]]:
    """Count the n-grams of orders 1 .. `order` of sentences, each as <s> tokens </s>.

    Returns:
        The vocabulary (<unk>, <s>, </s>, then in order of appearance) and the n-grams by order.

    Raises:
        LanguageModelError: there is no sentence, no n-gram of some order, or the disk is full.
    """
    chunk = max(1024, memory_bytes // _BYTES_PER_TOKEN)
    vocabulary = defaultdict[str, int](None, {UNKNOWN: UNKNOWN_ID, START: START_ID, END: END_ID})
    vocabulary.default_factory = vocabulary.__len__  # a new token gets the next number
    words = scratch.append(_encoded(sentences, vocabulary, chunk), np.int32)
    if not len(words):
        raise LanguageModelError("the text is empty: no line has a token")
    size = len(vocabulary)
    counts = scratch.zeros(size)
    for part in slices(len(words), chunk):
        counts += np.bincount(words[part], minlength=size)
    from_start = np.zeros(size, np.bool_)
    from_start[START_ID] = True
    counted = [NgramCounts(np.arange(size), counts, np.zeros(size, np.int64), from_start)]
    positions: Ints = words
    for n in range(2, order + 1):
        level, positions = _count_order(positions, words, counted[-1], size, chunk, scratch)
        if not len(level.keys):
            raise LanguageModelError(
                f"the text has no {n}-gram: its longest line is too short; choose --order {n - 1} or less"
            )
        counted.append(level)
    return list(vocabulary), counted


def _encoded(sentences: Iterable[list[str]], vocabulary: dict[str, int], chunk: int) -> Iterator[NDArray[np.int32]]:
    ids = array("i")
    for tokens in sentences:
        ids.append(START_ID)
        ids.extend(map(vocabulary.__getitem__, tokens))
        ids.append(END_ID)
        if len(ids) >= chunk:
            yield np.frombuffer(ids, np.int32)
            ids = array("i")
    yield np.frombuffer(ids, np.int32)


def _count_order(
    shorter: Ints, words: NDArray[np.int32], below: NgramCounts, size: int, chunk: int, scratch: Scratch
) -> tuple[NgramCounts, Ints]:
    """Count n-grams; `shorter` has the position of the (n-1)-gram that ends at each token, -1 if there is none."""

    def keys_of(part: slice) -> tuple[Ints, NDArray[np.bool_]]:
        prefix = shorter[max(part.start - 1, 0) : part.stop - 1].astype(np.int64)
        if part.start == 0:
            prefix = np.concatenate((np.full(1, -1), prefix))
        valid = (prefix >= 0) & (words[part] != START_ID)
        return prefix[valid] * size + words[part][valid], valid

    runs = [
        scratch.append_pairs([_sum_counts(np.sort(keys_of(part)[0]))], (np.int64, np.int64))
        for part in slices(len(words), chunk)
    ]
    keys, counts = runs[0] if len(runs) == 1 else scratch.append_pairs(merge_runs(runs, chunk), (np.int64, np.int64))
    suffix = scratch.zeros(len(keys))

    def find_positions() -> Iterator[Ints]:
        for part in slices(len(words), chunk):
            queries, valid = keys_of(part)
            indices = np.searchsorted(keys, queries)
            suffix[indices] = shorter[part][valid]
            positions = np.full(len(valid), -1)
            positions[valid] = indices
            yield positions

    positions = scratch.append(find_positions())
    from_start = scratch.append((below.from_start[keys[part] // size] for part in slices(len(keys), chunk)), np.bool_)
    return NgramCounts(keys, counts, suffix, from_start), positions


def _sum_counts(keys: Ints, counts: Ints | None = None) -> tuple[Ints, Ints]:
    """Return the distinct keys of a sorted array and the sums of their counts, by default 1 for each."""
    first = np.flatnonzero(np.concatenate((np.ones(min(1, len(keys)), np.bool_), keys[1:] != keys[:-1])))
    if counts is None:
        return keys[first], np.diff(first, append=len(keys))
    return keys[first], np.add.reduceat(counts, first)


def merge_runs(runs: list[list[Ints]], chunk: int) -> Iterator[tuple[Ints, Ints]]:
    """Merge sorted runs of (keys, counts) block by block; each round takes the keys below every unread key."""
    block = max(1, chunk // len(runs))
    at = [0] * len(runs)
    while unread := [r for r, (keys, _) in enumerate(runs) if at[r] < len(keys)]:
        bound = min(runs[r][0][min(at[r] + block, len(runs[r][0])) - 1] for r in unread)
        stops = {
            r: at[r] + int(np.searchsorted(runs[r][0][at[r] : at[r] + block], bound, side="right")) for r in unread
        }
        keys = np.concatenate([runs[r][0][at[r] : stops[r]] for r in unread])
        counts = np.concatenate([runs[r][1][at[r] : stops[r]] for r in unread])
        order = np.argsort(keys, kind="stable")
        yield _sum_counts(keys[order], counts[order])
        for r in unread:
            at[r] = stops[r]


@dataclass(frozen=True)
class Estimate:
    """A model and the statistics of its estimation."""

    model: NGram
    counts: tuple[int, ...]  # distinct n-grams by order, before pruning
    remaining_counts: tuple[int, ...]  # n-grams by order, after pruning
    discounts: tuple[tuple[float, ...], ...]  # D1, D2, D3+ by order


def estimate(
    sentences: Iterable[list[str]],
    order: int,
    prune: Sequence[int] = (),
    *,
    unit: str = "word",
    alphabet: Mapping[str, Any] | None = None,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    temp_dir: Path | None = None,
) -> Estimate:
    """Estimate a model from sentences of tokens.

    Args:
        sentences: tokens of each, without <s> and </s>.
        order: the longest n-gram, in tokens.
        prune: n-grams of order n with at most prune[n - 1] occurrences are pruned; non-decreasing, 0 for unigrams, the
            last value applies to higher orders.
        unit, alphabet: stored in the model.
        memory_bytes: of working arrays, without the vocabulary and the finished model.
        temp_dir: folder for counts, 40 bytes for each distinct n-gram and 8 for each token.

    Raises:
        LanguageModelError: invalid settings, an empty text, an order without n-grams in the text or after pruning, or
            a full disk.
    """
    if not 1 <= order <= MAX_ORDER:
        raise LanguageModelError(f"order {order} is not in 1 .. {MAX_ORDER}")
    thresholds = [*prune, *([prune[-1] if prune else 0] * (order - len(prune)))]
    if len(thresholds) > order or thresholds[0] != 0 or sorted(thresholds) != thresholds:
        raise LanguageModelError(
            f"prune {' '.join(map(str, prune))} must be at most {order} thresholds that start with 0 (no "
            "unigram is pruned) and never decrease: the prefix of an n-gram must stay"
        )
    with temporary_scratch(temp_dir) as scratch:
        vocabulary, counted = count_ngrams(sentences, order, memory_bytes, scratch)
        adjusted = [
            _adjusted_counts(level, above, scratch) for level, above in zip(counted, [*counted[1:], None], strict=True)
        ]
        adjusted[0][[UNKNOWN_ID, START_ID]] = 0  # neither is predicted from counts
        estimated = [_discounts(counts) for counts in adjusted]
        if without := [f"{n}-grams" for n, values in enumerate(estimated, start=1) if values is None]:
            fallback = ", ".join(map(str, _FALLBACK_DISCOUNTS[1:]))
            log.warning(
                "%s: too few occur once, twice and three times to estimate discounts from, so D1, D2, D3+ are %s. This "
                "is normal for short texts and for characters", ", ".join(without), fallback,
            )  # fmt: skip
        discounts = [np.array(_FALLBACK_DISCOUNTS) if values is None else values for values in estimated]
        thresholds[0] = -1  # no unigram is pruned, not even <unk>, which does not occur
        levels = _levels(counted, adjusted, discounts, thresholds, len(vocabulary), scratch)
    model = from_levels(levels, vocabulary, unit, alphabet)
    counts = tuple(len(level.keys) for level in counted)
    return Estimate(model, counts, tuple(map(len, levels)), tuple(tuple(d[1:].tolist()) for d in discounts))


def _adjusted_counts(level: NgramCounts, above: NgramCounts | None, scratch: Scratch) -> Ints:
    """Return occurrences at the highest order and after <s>, else the number of distinct words before the n-gram."""
    adjusted: Ints = scratch.zeros(len(level.keys))
    if above is None:
        adjusted[:] = level.counts
        return adjusted
    for part in slices(len(above.keys)):
        suffixes, times = np.unique(above.suffix[part], return_counts=True)
        adjusted[suffixes] += times
    for part in slices(len(level.keys)):
        adjusted[part] = np.where(level.from_start[part], level.counts[part], adjusted[part])
    return adjusted


def _discounts(adjusted: Ints) -> Floats | None:
    """Return D(0) = 0, D(1), D(2), D(3 and more) by Chen and Goodman, equation (26), or None if there are none."""
    t = sum((np.bincount(adjusted[part].clip(max=5), minlength=6) for part in slices(len(adjusted))), np.zeros(6))
    if t[1:4].all():
        y = t[1] / (t[1] + 2 * t[2])
        j = np.arange(1, 4)
        discounts = j - (j + 1) * y * t[2:5] / t[1:4]
        if ((discounts >= 0) & (discounts <= j)).all():
            return np.concatenate(([0.0], discounts))
    return None


def _levels(
    counted: Sequence[NgramCounts],
    adjusted: Sequence[Ints],
    discounts: Sequence[Floats],
    thresholds: Sequence[int],
    size: int,
    scratch: Scratch,
) -> list[Level]:
    """Return the n-grams after pruning with their probabilities and back-offs."""
    levels: list[Level] = []
    lower = np.full(1, 1.0 / (size - 1))  # below unigrams: uniform over all words but <s>
    new_position = np.zeros(1, np.int64)  # of the n-grams one order below, after pruning
    for n, (level, counts, discount, threshold) in enumerate(
        zip(counted, adjusted, discounts, thresholds, strict=True), start=1
    ):
        total, gamma = _masses(level, counts, discount, threshold, len(lower), size, scratch)
        if n > 1:
            for part in slices(len(gamma)):
                at, stays = new_position[part], new_position[part] >= 0
                levels[-1].backoff[at[stays]] = np.log(np.maximum(gamma[part][stays], _MIN_MASS))
        terms = _Terms(discount, total, gamma, lower)
        made, probability, position = _pruned_level(level, counts, terms, threshold, new_position, size, scratch)
        if not len(made):
            raise LanguageModelError(
                f"pruning {n}-grams with at most {threshold} occurrences removes all: lower the threshold or the order"
            )
        levels.append(made)
        lower, new_position = probability, position
    return levels


@dataclass(frozen=True)
class _Terms:
    """The terms of the probabilities of one order, by history; `lower` are the probabilities of the order below."""

    discount: Floats
    total: Floats
    gamma: Floats
    lower: Floats


def _pruned_level(
    level: NgramCounts, counts: Ints, terms: _Terms, threshold: int, new_position: Ints, size: int, scratch: Scratch
) -> tuple[Level, Floats, Ints]:
    """Return the n-grams of one order after pruning; for all n-grams the probability and the position after pruning."""
    probability = scratch.zeros(len(counts), np.float64)
    position = scratch.zeros(len(counts))
    parts: list[tuple[NDArray[Any], ...]] = []  # the first three columns of `Level`
    done = 0
    for part in slices(len(counts)):
        prefix, word = np.divmod(level.keys[part], size)
        a = counts[part]
        shorter = terms.lower[level.suffix[part]]
        p = (a - terms.discount[a.clip(max=3)]) / terms.total[prefix] + terms.gamma[prefix] * shorter
        if len(terms.lower) == 1:  # unigrams
            p[word == START_ID] = 1.0  # scoring <s> as a token changes nothing
        probability[part] = p
        stays = level.counts[part] > threshold
        position[part] = np.where(stays, done - 1 + np.cumsum(stays), -1)
        done += int(np.count_nonzero(stays))
        logs = np.minimum(0.0, np.log(p[stays])).astype(np.float32)
        parts.append((new_position[prefix[stays]], word[stays].astype(np.int32), logs))
    prefixes, words, log_probs = map(np.concatenate, zip(*parts, strict=True))
    return Level(prefixes, words, log_probs, np.zeros(done, np.float32)), probability, position


def _masses(
    level: NgramCounts, counts: Ints, discount: Floats, threshold: int, contexts: int, size: int, scratch: Scratch
) -> tuple[Floats, Floats]:
    """Return for each history the sum of adjusted counts and gamma, the share of discounts and pruned n-grams."""
    total, gamma = scratch.zeros(contexts, np.float64), scratch.zeros(contexts, np.float64)
    for part in slices(len(counts)):
        prefix = level.keys[part] // size
        at = slice(int(prefix[0]), int(prefix[-1]) + 1)
        a = counts[part]
        discounted = np.where(level.counts[part] > threshold, discount[a.clip(max=3)], a)
        total[at] += np.bincount(prefix - at.start, a)
        gamma[at] += np.bincount(prefix - at.start, discounted)
    for part in slices(contexts):  # histories without continuation back off with weight 1
        gamma[part] = np.divide(gamma[part], total[part], where=total[part] > 0, out=np.ones(len(gamma[part])))
    return total, gamma
