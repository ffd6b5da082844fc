"""Distinct n-grams of a text and their counts, order by order, on disk: sorted runs of packed integers, merged.

An n-gram of order n is the integer (position of its prefix among those of order n - 1) x V + last word, so that any
order fits 64 bits. What the text holds at each token is kept as a stream of positions, one file an order, and all is
done in chunks: memory does not grow with the text.
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

from ds2.lm.ngram import END, START, UNKNOWN, LanguageModelError, blocks
from ds2.system.files import temporary_folder

Ints = NDArray[np.int64]
UNKNOWN_ID, START_ID, END_ID = 0, 1, 2
_BYTES_PER_TOKEN = 64  # of a chunk, with its temporary arrays


class Scratch:
    """Arrays in a temporary folder, mapped into memory; a full disk is an error, not a signal."""

    def __init__(self, folder: Path | None) -> None:
        self._open = ExitStack()
        try:
            self._folder = self._open.enter_context(temporary_folder(folder or Path(tempfile.gettempdir()), "ds2-lm"))
        except OSError as error:
            raise LanguageModelError(
                f"no temporary folder in {folder}: {error}; choose another with --temp-dir"
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
                f"the n-grams do not fit {self._folder.parent} ({error}): choose another folder with --temp-dir"
            ) from error

    def _path(self) -> Path:
        self._files += 1
        return self._folder / str(self._files)

    def zeros(self, length: int, dtype: type = np.int64) -> NDArray[Any]:
        """An array (length,) of zeros whose space on disk is reserved."""
        path = self._path()
        with open(path, "wb") as out:
            os.posix_fallocate(out.fileno(), 0, max(1, length * np.dtype(dtype).itemsize))
        return np.memmap(path, dtype, "r+", shape=(length,)) if length else np.zeros(0, dtype)

    def append(self, parts: Iterable[NDArray[Any]], dtype: type = np.int64) -> NDArray[Any]:
        """The parts (N,), one after the other."""
        return self.append_pairs(((part,) for part in parts), (dtype,))[0]

    def append_pairs(self, parts: Iterable[tuple[NDArray[Any], ...]], dtypes: tuple[type, ...]) -> list[NDArray[Any]]:
        """As `append`, for several arrays that come together."""
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
class Counted:
    """The distinct n-grams of one order, sorted by key."""

    keys: Ints  # prefix position x V + last word
    counts: Ints  # occurrences
    suffix: Ints  # position, one order below, of the n-gram without its first word
    from_start: NDArray[np.bool_]  # begins with <s>


def count_ngrams(
    sentences: Iterable[list[str]], order: int, memory_bytes: int, scratch: Scratch
) -> tuple[list[str], list[Counted]]:
    """Count the n-grams of orders 1 .. `order` of sentences, each as <s> tokens </s>.

    Returns:
        The vocabulary (<unk>, <s>, </s>, then in order of appearance) and the n-grams by order.

    Raises:
        LanguageModelError: no sentence, no n-gram of some order, or no space on the disk.
    """
    chunk = max(1024, memory_bytes // _BYTES_PER_TOKEN)
    vocabulary = _Vocabulary()
    words = scratch.append(_encoded(sentences, vocabulary, chunk), np.int32)
    if not len(words):
        raise LanguageModelError("the text is empty: no line holds a token that can be counted")
    size = len(vocabulary)
    counts = scratch.zeros(size)
    for part in blocks(len(words), chunk):
        counts += np.bincount(words[part], minlength=size)
    from_start = np.zeros(size, np.bool_)
    from_start[START_ID] = True
    counted = [Counted(np.arange(size), counts, np.zeros(size, np.int64), from_start)]
    positions: Ints = words
    for n in range(2, order + 1):
        level, positions = _count_order(positions, words, counted[-1], size, chunk, scratch)
        if not len(level.keys):
            raise LanguageModelError(
                f"the text has no {n}-gram: its longest line is shorter; choose --order {n - 1} or less"
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
    shorter: Ints, words: NDArray[np.int32], below: Counted, size: int, chunk: int, scratch: Scratch
) -> tuple[Counted, Ints]:
    """Count the n-grams that end at each token, from the (n-1)-grams that end there (-1: none within the sentence)."""

    def packed(part: slice) -> tuple[Ints, NDArray[np.bool_]]:
        prefix = shorter[max(part.start - 1, 0) : part.stop - 1].astype(np.int64)
        if part.start == 0:
            prefix = np.concatenate((np.full(1, -1), prefix))
        valid = (prefix >= 0) & (words[part] != START_ID)
        return prefix[valid] * size + words[part][valid], valid

    runs = [
        scratch.append_pairs([_summed(np.sort(packed(part)[0]))], (np.int64, np.int64))
        for part in blocks(len(words), chunk)
    ]
    keys, counts = runs[0] if len(runs) == 1 else scratch.append_pairs(merge_runs(runs, chunk), (np.int64, np.int64))
    suffix = scratch.zeros(len(keys))

    def located() -> Iterator[Ints]:
        for part in blocks(len(words), chunk):
            wanted, valid = packed(part)
            found = np.searchsorted(keys, wanted)
            suffix[found] = shorter[part][valid]
            positions = np.full(len(valid), -1)
            positions[valid] = found
            yield positions

    positions = scratch.append(located())
    from_start = scratch.append((below.from_start[keys[part] // size] for part in blocks(len(keys), chunk)), np.bool_)
    return Counted(keys, counts, suffix, from_start), positions


def _summed(keys: Ints, counts: Ints | None = None) -> tuple[Ints, Ints]:
    """Distinct keys of a sorted array, and the sums of their counts (of ones where none are given)."""
    first = np.flatnonzero(np.concatenate((np.ones(min(1, len(keys)), np.bool_), keys[1:] != keys[:-1])))
    if counts is None:
        return keys[first], np.diff(first, append=len(keys))
    return keys[first], np.add.reduceat(counts, first)


def merge_runs(runs: list[list[Ints]], chunk: int) -> Iterator[tuple[Ints, Ints]]:
    """Merge sorted runs of (keys, counts) block by block: each round takes what no unread key can precede."""
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
        yield _summed(keys[order], counts[order])
        for r in unread:
            at[r] = stops[r]
