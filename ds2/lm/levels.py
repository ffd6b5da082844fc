"""From n-grams listed order by order to the automaton that answers queries, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds2.lm.ngram import LanguageModelError, NGram, longest_match

_BLOCK = 1 << 19  # n-grams handled at once: what bounds temporary arrays


@dataclass(frozen=True)
class Level:
    """All n-grams of one order, sorted by (prefix, word)."""

    prefix: NDArray[np.int64]  # (n,) position, one level below, of the n-gram without its last word; 0 for unigrams
    word: NDArray[np.int32]  # (n,) last word
    log_prob: NDArray[np.float32]  # (n,) natural log
    backoff: NDArray[np.float32]  # (n,) natural log; zeros at the highest order

    def __len__(self) -> int:
        return len(self.word)


def blocks(length: int, block: int = _BLOCK) -> Iterator[slice]:
    """Cut range(length) into slices of at most `block`."""
    return (slice(start, min(start + block, length)) for start in range(0, length, block))


def link(
    levels: Sequence[Level], vocabulary: Sequence[str], unit: str, alphabet: Mapping[str, Any] | None = None
) -> NGram:
    """Join levels to an automaton; level 1 holds every vocabulary entry in order of id.

    A state is kept for each n-gram that others extend or that has a back-off. A missing suffix (some tools prune it)
    acts as one without back-off.

    Raises:
        LanguageModelError: more states than the file format numbers.
    """
    size, order = len(vocabulary), len(levels)
    kept = []
    for level, above in pairwise(levels):
        flags = level.backoff != 0
        flags[above.prefix] = True
        kept.append(flags)
    entry_starts = np.cumsum([0, *map(len, levels)]).tolist()
    state_starts = np.cumsum([0, 1, *(np.count_nonzero(flags) for flags in kept)]).tolist()
    if state_starts[-1] > np.iinfo(np.int32).max:
        raise LanguageModelError(f"{state_starts[-1]} histories are more than 2^31: prune more, or lower the order")
    keys = np.empty(entry_starts[-1], np.int64)
    log_prob = np.empty(entry_starts[-1], np.float32)
    next_state = np.empty(entry_starts[-1], np.int32)
    backoff = np.zeros(state_starts[-1], np.float32)
    suffix = np.zeros(state_starts[-1], np.int32)
    prefix_state = np.zeros(1, np.int32)  # of the n-grams one level below; the empty history first
    for n, level in enumerate(levels, start=1):
        first, end = entry_starts[n - 1], entry_starts[n]
        log_prob[first:end] = level.log_prob
        for part in blocks(len(level)):
            at = slice(first + part.start, first + part.stop)
            parents, words = prefix_state[level.prefix[part]], level.word[part]
            keys[at] = parents.astype(np.int64) * size + words
            shorter = (torch.from_numpy(suffix[parents]), torch.from_numpy(words))
            next_state[at] = 0 if n == 1 else next_state[_entries(keys[:first], suffix, size, n - 1, *shorter)]
        if n < order:
            flags = kept[n - 1]
            states = slice(state_starts[n], state_starts[n + 1])
            suffix[states] = next_state[first:end][flags]
            backoff[states] = level.backoff[flags]
            next_state[first:end][flags] = np.arange(states.start, states.stop, dtype=np.int32)
            prefix_state = next_state[first:end]
    return NGram(
        tuple(vocabulary),
        keys=torch.from_numpy(keys),
        log_prob=torch.from_numpy(log_prob),
        next_state=torch.from_numpy(next_state),
        backoff=torch.from_numpy(backoff),
        suffix=torch.from_numpy(suffix),
        entry_starts=tuple(entry_starts),
        state_starts=tuple(state_starts),
        unit=unit,
        alphabet=alphabet,
    )


def _entries(
    keys: NDArray[np.int64], suffix: NDArray[np.int32], size: int, order: int, states: Tensor, words: Tensor
) -> NDArray[np.int64]:
    """The entries of the longest n-grams, of at most `order` words, that end with these words after these states."""
    _, found, shortened = longest_match(torch.from_numpy(keys), torch.from_numpy(suffix), size, order, states, words)
    entries: NDArray[np.int64] = found.gather(1, shortened)[:, 0].numpy()
    return entries


def unlink(model: NGram) -> list[Level]:
    """The inverse of `link`."""
    size = len(model.vocabulary)
    keys, log_prob, following, state_backoff = (
        tensor.cpu().numpy() for tensor in (model.keys, model.log_prob, model.next_state, model.backoff)
    )
    levels, positions = [], np.zeros(1, np.int64)  # of the states one level below, in their level
    for n in range(1, model.order + 1):
        at = slice(model.entry_starts[n - 1], model.entry_starts[n])
        parents, words = np.divmod(keys[at], size)
        backoff = np.zeros(len(words), np.float32)
        prefix = positions[parents - model.state_starts[n - 1]]
        if n < model.order:
            positions = np.flatnonzero(following[at] >= model.state_starts[n])  # an n-gram that is itself a state
            backoff[positions] = state_backoff[model.state_starts[n] : model.state_starts[n + 1]]
        levels.append(Level(prefix, words.astype(np.int32), log_prob[at], backoff))
    return levels
