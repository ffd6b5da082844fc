"""Counts of the n-grams of a text, order by order, by an external merge sort: memory does not grow with the text.

The key of an n-gram of order n is (position of its prefix among the n-grams of order n - 1) x V + last word, so that
keys of any order fit 64 bits. A file of positions says for each token of the text which n-gram ends there.
"""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds2.lm.ngram import END, START, UNKNOWN, LanguageModelError, slices
from ds2.system.files import temporary_folder

Ints = NDArray[np.int64]
UNKNOWN_ID, START_ID, END_ID = 0, 1, 2
_BYTES_PER_TOKEN = 64  # of a chunk, including temporary arrays


class Scratch:
    """Memory-mapped arrays in a temporary folder, whose space is reserved so that a full disk raises an error."""

    def __init__(self, folder: Path | None) -> None:
        self._open = ExitStack()
        try:
            self._folder = self._open.enter_context(temporary_folder(folder or Path(tempfile.gettempdir()), "ds2-lm"))
        except OSError as error:
            raise LanguageModelError(
                f"no temporary folder can be created in {folder}: {error}; choose another folder with --temp-dir"
            ) from error
        self._files = 0

    def __enter__(self) -> Scratch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
        if isinstance(error, OSError):
            raise LanguageModelError(
                f"the n-grams do not fit in {self._folder.parent} ({error}): choose another folder with --temp-dir"
            ) from error

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
    vocabulary = _Vocabulary()
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


class _Vocabulary(dict[str, int]):
    def __init__(self) -> None:
        super().__init__({UNKNOWN: UNKNOWN_ID, START: START_ID, END: END_ID})

    def __missing__(self, token: str) -> int:
        self[token] = len(self)
        return len(self) - 1


def _encoded(sentences: Iterable[list[str]], vocabulary: _Vocabulary, chunk: int) -> Iterator[NDArray[np.int32]]:
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
