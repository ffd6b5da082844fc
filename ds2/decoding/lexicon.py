"""Words as a search sees them: what each label writes, a trie of known words, and hot words.

`SessionTrie` gives each set of hot words a root of its own in the shared trie: a copy of the root, in which only
the nodes on the paths of its phrases are copied, a handful of rows for a vocabulary of any size. A word that ends
within a phrase leads to a root from which the next word of the phrase gets its share of the bonus; after other words
that root follows again.

Shapes: V labels (0 is the CTC blank), L most characters of a label, A characters with the empty one, N trie nodes.
"""

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds2.decoding.phrases import HotWords, LexiconError, check_characters
from ds2.text.alphabet import WORD_MARK, Alphabet

OFF, ROOT = 0, 1  # trie nodes: outside the trie, the empty prefix
SPARE_NODES = 1024  # of a trie, for hot words; more are added when they are needed


@dataclass(frozen=True)
class Spelling:
    """The characters that each label writes."""

    starts_word: Tensor  # (V,) bool: a space, or a piece with the word mark; it completes the word before it
    characters: Tensor  # (V, L) int64 character codes after the mark, 0 pads
    counts: Tensor  # (V,) int64 characters
    space: int  # the label that only separates words, or -1
    codes: Mapping[str, int]  # character to code, from 1
    sounds: Tensor | None = None  # (V,) int64: labels of one sound, which need a blank between them; None: all differ

    @classmethod
    def of(cls, alphabet: Alphabet) -> Self:
        """Return the spelling of an alphabet of characters or of word-marked pieces."""
        bare = [symbol.removeprefix(WORD_MARK) for symbol in alphabet.symbols]
        spaces = [label for label, symbol in enumerate(alphabet.symbols) if symbol and symbol.isspace()]
        if len(spaces) > 1:
            raise LexiconError("the alphabet has more than one kind of white space: keep one as the word separator")
        written = ["" if label in spaces else text for label, text in enumerate(bare)]
        codes = {character: code for code, character in enumerate(sorted(set("".join(written))), start=1)}
        width = max(1, *map(len, written))
        characters = torch.zeros(len(written), width, dtype=torch.int64)
        for label, text in enumerate(written):
            characters[label, : len(text)] = torch.tensor([codes[c] for c in text], dtype=torch.int64)
        starts = torch.tensor(alphabet.starts_word)
        return cls(starts, characters, (characters > 0).sum(1), spaces[0] if spaces else -1, codes)

    def to(self, device: torch.device) -> Self:
        tensors: dict[str, Any] = {n: value.to(device) for n, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)


def walk(children: Tensor, nodes: Tensor, characters: Tensor) -> Tensor:
    """Return the nodes that `characters` (..., L), zero-padded codes, lead to from `nodes` (...)."""
    width = children.shape[1]
    for position in range(characters.shape[-1]):
        codes = characters[..., position]
        nodes = torch.where(codes == 0, nodes, children.view(-1).take(nodes * width + codes).long())
    return nodes


def _insert(
    words: Sequence[str], values: NDArray[np.float32], codes: Mapping[str, int]
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
    """Insert all words at once, level by level.

    Returns:
        The end node of each word, the child table (N, A), and the largest value (N,) of the words through a node; the
        last `SPARE_NODES` rows are no nodes.
    """
    order = np.array(sorted(range(len(words)), key=words.__getitem__), np.int64)
    spelled = [words[number] for number in order]
    lengths = np.array(list(map(len, spelled)), np.int64)
    text = np.array(spelled, np.str_)
    characters = text.view(np.uint32).reshape(len(words), text.dtype.itemsize // 4)  # padded with 0
    code_of = np.zeros(max(map(ord, codes), default=0) + 1, np.int64)
    code_of[list(map(ord, codes))] = list(codes.values())
    # In sorted order a word shares its first nodes with the word before it, and has the others to itself so far.
    differs = characters[1:] != characters[:-1]
    shared = np.zeros(len(words), np.int64)
    shared[1:] = np.minimum(np.where(differs.any(1), differs.argmax(1), characters.shape[1]), lengths[:-1])
    total, width = ROOT + 1, len(codes) + 1
    nodes = np.full(len(words), ROOT, np.int64)
    keys, largest = [np.empty(0, np.int64)], [np.zeros(ROOT + 1, np.float32)]
    for position in range(lengths.max(initial=0)):
        live = np.flatnonzero(lengths > position)
        fresh = shared[live] <= position
        keys.append((nodes[live] * width + code_of[characters[live, position]])[fresh])
        nodes[live] = total - 1 + np.cumsum(fresh)
        largest.append(np.maximum.reduceat(values[order[live]], np.flatnonzero(fresh)))
        total += len(keys[-1])
    children = np.zeros((total + SPARE_NODES, width), np.int32)
    children.reshape(-1)[np.concatenate(keys)] = np.arange(ROOT + 1, total, dtype=np.int32)
    ends = np.empty_like(nodes)
    ends[order] = nodes
    return ends, children, np.concatenate([*largest, np.zeros(SPARE_NODES, np.float32)])


@dataclass
class Nodes:
    """The tables of a trie that searches read; the last rows are spare."""

    children: Tensor  # (N, A) int32
    word: Tensor  # (N,) int64 vocabulary id of the word that ends here, or -1
    is_word: Tensor  # (N,) bool: a known or hot word ends here
    hot: Tensor  # (N,) float64 bonus of the hot words and phrases that end here
    unfinished: Tensor  # (N,) float64 added to the score of a prefix whose unfinished word ends here
    follow: Tensor  # (N,) int32 root of the next word after one that ends here; 0: the root of the session


@dataclass
class _Phrases:
    """The nodes of one set of phrases, and the number of its users."""

    key: frozenset[tuple[tuple[str, ...], float]]
    nodes: int
    users: int = 0


class SessionTrie:
    """A trie of known words, and of the hot words of decoders and sessions, which may begin and end in any thread.

    Node `OFF` is everything else, node `ROOT` the empty prefix.

    Args:
        words: known words and their positions. Those that the labels cannot spell are left out: the network never
            writes them.
        unigrams: (W,) natural log-probs of the known words by position.
        hot_bonus: of hot words that have none of their own.
        alpha: factor of the log-prob of the most probable word through a node, the look-ahead; None: no look-ahead,
            and words outside the trie are allowed.
        unknown: log-prob of an unknown word, with look-ahead. A prefix of an unknown hot word is charged the share of
            it that is written, as its bonus is paid: the whole would prune the word before the bonus outweighs it.
    """

    def __init__(
        self,
        words: Mapping[str, int],
        unigrams: NDArray[np.float32],
        spelling: Spelling,
        hot_bonus: float,
        alpha: float | None,
        unknown: float,
        device: torch.device,
    ) -> None:
        self.codes, self.alpha, self.unknown, self.has_hot = spelling.codes, alpha, unknown, False
        writable = frozenset(spelling.codes)
        listed = [word for word in words if writable.issuperset(word)]
        positions = np.array([words[word] for word in listed], np.int64)
        ends, self.children, lookahead = _insert(listed, unigrams[positions], spelling.codes)  # (N, A) int32
        self.word = np.full(len(self.children), -1, np.int64)  # (N,) position of the known word that ends here, or -1
        self.word[ends] = positions
        self._size = len(self.word) - SPARE_NODES
        self.bonus = hot_bonus
        self.lookahead = lookahead.astype(np.float64)  # (N,) of the most probable word through a node
        nothing = np.zeros(len(self.word))
        unfinished = self.unfinished(nothing, self.lookahead)
        if self.alpha is not None:
            unfinished[OFF] = -math.inf
        follow = np.zeros(len(self.word), np.int32)
        arrays = (self.children, self.word, self.word >= 0, nothing, unfinished, follow)
        # On a CPU they are the trie's own tables, which are large; only spare rows are ever written.
        self.nodes = Nodes(*(torch.from_numpy(a).to(device) for a in arrays))
        self._lock = threading.Lock()
        self.phrases: dict[int, _Phrases] = {}  # by root, which is the first node
        self.roots: dict[frozenset[tuple[tuple[str, ...], float]], int] = {}

    def unfinished(self, share: NDArray[np.float64], lookahead: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return `Nodes.unfinished` of nodes with these shares of bonuses and log-probs of their likeliest words."""
        return share + self.alpha * lookahead if self.alpha else share.copy()

    @torch.inference_mode()  # the tables are inference tensors once they have grown
    def add_phrases(self, phrases: HotWords) -> int:
        """Add hot phrases and return their root; equal phrases share nodes.

        Raises:
            LexiconError: phrases that are empty or hold characters that the network does not write.
        """
        check_characters(phrases, self.codes)
        words = {tuple(p.split()): self.bonus if bonus is None else float(bonus) for p, bonus in phrases.items()}
        key = frozenset(words.items())
        with self._lock:
            if key not in self.roots:
                added = _SessionNodes(self, words)
                first = self._allocate(len(added.nodes))
                added.write(self.nodes, first)
                self.roots[key], self.phrases[first] = first, _Phrases(key, len(added.nodes))
                self.has_hot = True
            self.phrases[self.roots[key]].users += 1
            return self.roots[key]

    def remove_phrases(self, root: int) -> None:
        """Undo one `add_phrases`; the nodes are free again when all users have done so."""
        with self._lock:
            self.phrases[root].users -= 1
            if not self.phrases[root].users:
                del self.roots[self.phrases.pop(root).key]

    def _allocate(self, count: int) -> int:
        """Return the first of `count` free nodes in a row, growing the tables if needed."""
        start = self._size
        for first, phrases in sorted(self.phrases.items()):
            if first - start >= count:
                break
            start = first + phrases.nodes
        missing = start + count - len(self.nodes.word)
        if missing > 0:
            spare = max(missing, len(self.nodes.word) - self._size)
            self.nodes = Nodes(*(torch.cat([t, t.new_zeros(spare, *t.shape[1:])]) for t in vars(self.nodes).values()))
        return start


def _longest_suffix(
    prefix: tuple[str, ...], suffixes: Mapping[tuple[str, ...], tuple[str, ...]], roots: Mapping[tuple[str, ...], int]
) -> tuple[str, ...]:
    """Return the longest proper suffix of a prefix that has a root: the failure links of Aho and Corasick.

    It follows the links of shorter prefixes, so all links together take time linear in the length of the phrases.
    """
    shorter = prefix[:-1]
    while shorter:
        shorter = suffixes[shorter]
        if (suffix := (*shorter, prefix[-1])) in roots:
            return suffix
    return ()


@dataclass
class _Node:
    """A node of a set of phrases; see `Nodes`. Nodes of the same set have negative numbers."""

    children: NDArray[np.int64]  # (A,)
    word: int = -1
    is_word: bool = False
    hot: float = 0.0
    share: float = 0.0  # the largest share of a bonus that is paid up to this node
    lookahead: float = -math.inf
    follow: int = 0


class _SessionNodes:
    """The nodes of one set of phrases, numbered -1, -2, ... until they are written into the tables."""

    def __init__(self, trie: SessionTrie, phrases: Mapping[tuple[str, ...], float]) -> None:
        self.trie = trie
        self.nodes: list[_Node] = []
        totals = {phrase: sum(map(len, phrase)) for phrase in phrases}
        roots: dict[tuple[str, ...], int] = {(): self._copy(ROOT)}
        ends: dict[tuple[str, ...], int] = {}
        suffixes: dict[tuple[str, ...], tuple[str, ...]] = {}  # of the prefixes in `roots`, see `_longest_suffix`
        for length in range(max(map(len, phrases), default=0)):
            with_prefix: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
            for phrase in phrases:
                if len(phrase) > length:
                    with_prefix.setdefault(phrase[:length], []).append(phrase)
            for prefix in sorted(with_prefix) if length else []:
                suffix = suffixes[prefix] = _longest_suffix(prefix, suffixes, roots)
                roots[prefix] = self._copy(roots[suffix])
                self.nodes[~ends[prefix]].follow = roots[prefix]
            for prefix in sorted(with_prefix):
                own: set[int] = set()
                done = sum(map(len, prefix))
                for phrase in with_prefix[prefix]:
                    bonus = phrases[phrase]
                    self._raise_share(roots[prefix], bonus * done / totals[phrase])
                    end = self._insert(roots[prefix], own, phrase[length], done, totals[phrase], bonus)
                    ends[phrase[: length + 1]] = end
                    if len(phrase) == length + 1:
                        node = self.nodes[~end]
                        node.hot = bonus + (node.hot if length else 0.0)

    def _insert(self, root: int, own: set[int], word: str, done: int, total: int, bonus: float) -> int:
        """Copy the nodes of a word from a root on, with their shares of a bonus; return the last node."""
        node, path = root, []
        for position, character in enumerate(word, start=1):
            code = self.trie.codes[character]
            child = int(self.nodes[~node].children[code])
            if child not in own:
                child = self._copy(child)
                own.add(child)
                self.nodes[~node].children[code] = child
            node = child
            path.append(node)
            self._raise_share(node, bonus * (done + position) / total)
        if self.nodes[~node].word < 0:
            for position, number in enumerate(path, start=1):
                passed = self.nodes[~number]
                passed.lookahead = max(passed.lookahead, self.trie.unknown * position / len(word))
        self.nodes[~node].is_word = True
        return node

    def _raise_share(self, node: int, share: float) -> None:
        """Set the share of a node to the largest one of the phrases through it."""
        if abs(share) > abs(self.nodes[~node].share):
            self.nodes[~node].share = share

    def _copy(self, node: int) -> int:
        """Add a copy of a node of this set, of the trie, or of no node yet (OFF); return its number."""
        base = self.trie
        if node < 0:
            copy = replace(self.nodes[~node], children=self.nodes[~node].children.copy())
        elif node == OFF:
            copy = _Node(np.zeros(base.children.shape[1], np.int64))
        else:
            word, lookahead = base.word[node].item(), base.lookahead[node].item()
            copy = _Node(base.children[node].astype(np.int64), word, word >= 0, lookahead=lookahead)
        self.nodes.append(copy)
        return -len(self.nodes)

    def write(self, nodes: Nodes, first: int) -> None:
        """Write the nodes into tables, from row `first` on."""
        columns: dict[str, NDArray[Any]] = {
            f.name: np.array([getattr(node, f.name) for node in self.nodes]) for f in fields(_Node)
        }
        numbered = (columns["children"], columns["follow"])
        children, follow = (np.where(a < 0, first - 1 - a, a).astype(np.int32) for a in numbered)
        unfinished = self.trie.unfinished(columns["share"], columns["lookahead"])
        arrays: Sequence[NDArray[Any]] = (
            children, columns["word"], columns["is_word"], columns["hot"], unfinished, follow
        )  # fmt: skip
        for tensor, array in zip(vars(nodes).values(), arrays, strict=True):
            tensor[first : first + len(array)] = torch.from_numpy(array).to(tensor.device)
