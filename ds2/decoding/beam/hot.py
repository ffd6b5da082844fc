"""Hot words and phrases of single sessions: each has a root of its own in the trie that all share.

A session's root is a copy of the trie's, in which only the nodes on the ways of its phrases are copies too: a handful
of rows beside a vocabulary of any size. A word that ends within phrases leads to a root of what may follow it, where
the phrases' next words are promised their share of the bonus; after others the session's own root comes again.

Shapes: N trie nodes, A characters with the empty one.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds2.decoding.lexicon import OFF, ROOT, HotWords, LexiconError, Spelling, Trie

_SPARE = 1024  # nodes that there is place for at first
MOST_PHRASES = 1000
MOST_CHARACTERS = 200  # of a phrase


@dataclass
class Nodes:
    """What searches read of a trie; the last rows are spare."""

    children: Tensor  # (N, A) int32
    word: Tensor  # (N,) int64 vocabulary id of the word that ends here, or -1
    is_word: Tensor  # (N,) bool: a word of the lexicon or a hot one ends here
    hot: Tensor  # (N,) float64 bonus of the hot words and phrases that end here
    unfinished: Tensor  # (N,) float64 what a prefix is worth that is written as far as here
    follow: Tensor  # (N,) int32 where the next word starts after one that ends here; 0: at the session's root


@dataclass
class _Planted:
    """Nodes of phrases, and how many decodings use them."""

    key: frozenset[tuple[tuple[str, ...], float]]
    nodes: int
    users: int = 0


class Forest:
    """A trie with a place for the hot words of sessions; sessions may come and go in any thread.

    Args:
        trie: of known words and of those that are hot for all, on the CPU.
        spelling: of the labels.
        hot_bonus: of the words that are hot for all.
        ahead: what the log-prob of the likeliest word ahead is multiplied by; 0: it does not count.
        unknown: log-prob of a word that is not known, where `ahead` counts.
        device: of the searches.
    """

    def __init__(
        self, trie: Trie, spelling: Spelling, hot_bonus: float, ahead: float, unknown: float, device: torch.device
    ) -> None:
        self.codes, self.alpha, self.unknown, self.has_hot = spelling.codes, ahead, unknown, bool(trie.hot.any())
        self.children, self.word, self.is_word = (t.numpy() for t in (trie.children, trie.word, trie.is_word))
        self.bonus = hot_bonus
        self.hot, self.share = hot_bonus * trie.hot.numpy(), hot_bonus * trie.hot_part.numpy()
        self.ahead = trie.ahead.numpy().astype(np.float64)
        unfinished = self.share + self.alpha * self.ahead if self.alpha else self.share.copy()
        if self.alpha:
            unfinished[OFF] = -math.inf
        follow = np.zeros(len(self.word), np.int32)
        arrays = (self.children, self.word, self.is_word, self.hot, unfinished, follow)
        self.nodes = Nodes(*(_with_spare(torch.from_numpy(a).to(device), _SPARE) for a in arrays))
        self._lock = threading.Lock()
        self.planted: dict[int, _Planted] = {}  # by root, which is its first node
        self.roots: dict[frozenset[tuple[tuple[str, ...], float]], int] = {}

    @torch.inference_mode()  # the nodes may have grown in it
    def plant(self, phrases: HotWords) -> int:
        """Make a root of a session's own.

        Raises:
            LexiconError: phrases that are empty or hold what the network does not write, or too many of them; a bonus
                that is no finite number.
        """
        words = {tuple(p.split()): self.bonus if bonus is None else float(bonus) for p, bonus in phrases.items()}
        self._check(phrases, words)
        key = frozenset(words.items())
        with self._lock:
            if key not in self.roots:
                grafts = _Grafts(self, words)
                first = self._find(len(grafts.word))
                grafts.write(self.nodes, first)
                self.roots[key], self.planted[first] = first, _Planted(key, len(grafts.word))
                self.has_hot = True
            self.planted[self.roots[key]].users += 1
            return self.roots[key]

    def uproot(self, root: int) -> None:
        """Undo a `plant`; its nodes are free once all users have."""
        with self._lock:
            self.planted[root].users -= 1
            if not self.planted[root].users:
                del self.roots[self.planted.pop(root).key]

    def _check(self, phrases: HotWords, words: Mapping[tuple[str, ...], float]) -> None:
        if len(phrases) > MOST_PHRASES:
            raise LexiconError(f"{len(phrases)} hot phrases: {MOST_PHRASES} at most")
        bad = [" ".join(p) for p in words if not p or not self.codes.keys() >= set("".join(p))]
        if bad:
            wanted = "".join(sorted(self.codes))
            raise LexiconError(f"hot phrases {bad}: give words in the characters that the network writes: {wanted}")
        long = [phrase[:20] for phrase in phrases if len(phrase) > MOST_CHARACTERS]
        if long:
            raise LexiconError(f"hot phrases {long}...: {MOST_CHARACTERS} characters at most")
        if not all(math.isfinite(bonus) for bonus in words.values()):
            raise LexiconError("what a hot phrase is worth is a finite number, natural log")

    def _find(self, count: int) -> int:
        """The first of so many nodes that are free, making place if need be."""
        start = len(self.word)
        for first, planted in sorted(self.planted.items()):
            if first - start >= count:
                break
            start = first + planted.nodes
        missing = start + count - len(self.nodes.word)
        if missing > 0:
            spare = max(missing, len(self.nodes.word) - len(self.word))
            self.nodes = Nodes(*(_with_spare(tensor, spare) for tensor in vars(self.nodes).values()))
        return start


def _with_spare(tensor: Tensor, rows: int) -> Tensor:
    return torch.cat([tensor, tensor.new_zeros(rows, *tensor.shape[1:])])


def _suffix(
    prefix: tuple[str, ...], suffixes: Mapping[tuple[str, ...], tuple[str, ...]], roots: Mapping[tuple[str, ...], int]
) -> tuple[str, ...]:
    """The longest end of a prefix, shorter than itself, that has a root: found by those of shorter prefixes, as the
    failure links of Aho and Corasick are, so all together take as long as the phrases are."""
    before = prefix[:-1]
    while before:
        before = suffixes[before]
        if (suffix := (*before, prefix[-1])) in roots:
            return suffix
    return ()


class _Grafts:
    """The nodes of one session, numbered -1, -2, ... until they have their place."""

    def __init__(self, forest: Forest, phrases: Mapping[tuple[str, ...], float]) -> None:
        self.forest = forest
        self.children: list[NDArray[np.int64]] = []
        self.word: list[int] = []
        self.is_word: list[bool] = []
        self.hot: list[float] = []
        self.share: list[float] = []
        self.ahead: list[float] = []
        self.follow: list[int] = []
        totals = {phrase: sum(map(len, phrase)) for phrase in phrases}
        roots: dict[tuple[str, ...], int] = {(): self._copy(ROOT)}
        ends: dict[tuple[str, ...], int] = {}
        suffixes: dict[tuple[str, ...], tuple[str, ...]] = {}  # of a root's words, the longest that have a root too
        for length in range(max(map(len, phrases), default=0)):
            with_prefix: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
            for phrase in phrases:
                if len(phrase) > length:
                    with_prefix.setdefault(phrase[:length], []).append(phrase)
            for prefix in sorted(with_prefix) if length else []:
                suffix = suffixes[prefix] = _suffix(prefix, suffixes, roots)
                roots[prefix] = self._copy(roots[suffix])
                self.follow[~ends[prefix]] = roots[prefix]
            for prefix in sorted(with_prefix):
                mine: set[int] = set()
                done = sum(map(len, prefix))
                for phrase in with_prefix[prefix]:
                    bonus = phrases[phrase]
                    self._promise(roots[prefix], bonus * done / totals[phrase])
                    node = self._insert(roots[prefix], mine, phrase[length], done, totals[phrase], bonus)
                    ends[phrase[: length + 1]] = node
                    if len(phrase) == length + 1:
                        self.hot[~node] = bonus + (self.hot[~node] if length else 0.0)

    def _insert(self, root: int, mine: set[int], word: str, done: int, total: int, bonus: float) -> int:
        """Make the way of a word from a root its own, with its share of a bonus; return its last node."""
        node, way = root, []
        for position, character in enumerate(word, start=1):
            code = self.forest.codes[character]
            child = int(self.children[~node][code])
            if child not in mine:
                child = self._copy(child)
                mine.add(child)
                self.children[~node][code] = child
            node = child
            way.append(node)
            self._promise(node, bonus * (done + position) / total)
        if self.word[~node] < 0:
            for position, passed in enumerate(way, start=1):
                charge = self.forest.unknown * position / len(word)
                self.ahead[~passed] = max(self.ahead[~passed], charge)
        self.is_word[~node] = True
        return node

    def _promise(self, node: int, share: float) -> None:
        """What is promised here is the largest share of any phrase that may go on."""
        if abs(share) > abs(self.share[~node]):
            self.share[~node] = share

    def _copy(self, node: int) -> int:
        """A node like another: the trie's, one of ours, or nothing yet."""
        base = self.forest
        if node < 0:
            at = ~node
            numbers = (self.hot[at], self.share[at], self.ahead[at])
            self._add(self.children[at].copy(), self.word[at], self.is_word[at], numbers, self.follow[at])
        elif node == OFF:
            self._add(np.zeros(base.children.shape[1], np.int64), -1, False, (0.0, 0.0, -math.inf), 0)
        else:
            numbers = (float(base.hot[node]), float(base.share[node]), float(base.ahead[node]))
            self._add(base.children[node].astype(np.int64), int(base.word[node]), bool(base.is_word[node]), numbers, 0)
        return -len(self.word)

    def _add(
        self, children: NDArray[np.int64], word: int, is_word: bool, numbers: tuple[float, float, float], follow: int
    ) -> None:
        self.children.append(children)
        self.word.append(word)
        self.is_word.append(is_word)
        for column, number in zip((self.hot, self.share, self.ahead), numbers, strict=True):
            column.append(number)
        self.follow.append(follow)

    def write(self, nodes: Nodes, first: int) -> None:
        """Take the place from node `first` on."""
        numbered = (np.stack(self.children), np.array(self.follow))
        children, follow = (np.where(a < 0, first - 1 - a, a).astype(np.int32) for a in numbered)
        unfinished = np.array(self.share)
        if self.forest.alpha:
            unfinished += self.forest.alpha * np.array(self.ahead)
        arrays = (children, np.array(self.word), np.array(self.is_word), np.array(self.hot), unfinished, follow)
        for tensor, array in zip(vars(nodes).values(), arrays, strict=True):
            tensor[first : first + len(array)] = torch.from_numpy(array).to(tensor.device)
