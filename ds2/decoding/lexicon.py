"""How labels spell words: where a label starts a new word, and a trie of known and hot words over characters.

Shapes: V labels (0 is the CTC blank), L most characters of a label, A characters with the empty one, N trie nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds2.decoding.hypothesis import DecodeError
from ds2.text.alphabet import WORD_MARK, Alphabet

HotWords = Mapping[str, float | None]  # phrases, and what each is worth, natural log; None: decode.hot_word_bonus
OFF, ROOT = 0, 1  # trie nodes: left the trie for good, the empty prefix
_NONE_KNOWN: NDArray[np.float32] = np.zeros(0, np.float32)


class LexiconError(DecodeError):
    """Words that a decoder cannot look for; the message names them and the way out."""


@dataclass(frozen=True)
class Spelling:
    """What each label writes."""

    starts_word: Tensor  # (V,) bool: a space, or a piece with the word mark: the word before it is complete
    characters: Tensor  # (V, L) int64 character codes after the mark, 0 pads
    counts: Tensor  # (V,) int64 characters
    space: int  # the label that only separates words; -1 where there is none
    codes: Mapping[str, int]  # character to code, from 1

    @classmethod
    def of(cls, alphabet: Alphabet) -> Spelling:
        """Return what the labels of an alphabet of characters or of word-marked pieces write."""
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
        starts = [label in spaces or symbol.startswith(WORD_MARK) for label, symbol in enumerate(alphabet.symbols)]
        return cls(torch.tensor(starts), characters, (characters > 0).sum(1), spaces[0] if spaces else -1, codes)

    def to(self, device: torch.device) -> Spelling:
        """Return the spelling with its tensors on `device`."""
        return replace(
            self,
            starts_word=self.starts_word.to(device),
            characters=self.characters.to(device),
            counts=self.counts.to(device),
        )


@dataclass(frozen=True)
class Trie:
    """Prefixes of known and hot words; node 0 stands for everything else, node 1 for the empty prefix."""

    children: Tensor  # (N, A) int32
    word: Tensor  # (N,) int64: position of the known word that ends here, -1 where none does
    is_word: Tensor  # (N,) bool: a known or hot word ends here
    hot: Tensor  # (N,) float64: 1 where a hot word ends
    hot_part: Tensor  # (N,) float64: share of the shortest hot word that goes on from here which is written already
    ahead: Tensor  # (N,) float32: log-prob of the likeliest word that goes on from here or ends here; 0 at OFF and ROOT

    def to(self, device: torch.device) -> Trie:
        """Return the trie with its tensors on `device`."""
        return Trie(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    def walk(self, nodes: Tensor, characters: Tensor) -> Tensor:
        """As :func:`walk` among `children`."""
        return walk(self.children, nodes, characters)


def walk(children: Tensor, nodes: Tensor, characters: Tensor) -> Tensor:
    """Return the nodes after writing `characters` (..., L), zero-padded codes, from `nodes` (...)."""
    width = children.shape[1]
    for position in range(characters.shape[-1]):
        codes = characters[..., position]
        nodes = torch.where(codes == 0, nodes, children.view(-1).take(nodes * width + codes).long())
    return nodes


def build_trie(
    words: Mapping[str, int],
    hot_words: Sequence[str],
    spelling: Spelling,
    unigrams: NDArray[np.float32] = _NONE_KNOWN,
    unknown: float = 0.0,
) -> Trie:
    """Build the trie of known words and of hot words.

    Known words that the labels cannot spell are left out: the network never writes them.

    Args:
        words: known words, with the positions to report.
        hot_words: more words; some may be known too.
        spelling: of the labels.
        unigrams: (W,) natural log-probs of words by position.
        unknown: log-prob of a hot word that is not known, charged in the share of it that is written, as its bonus is
            paid: charged at once it would prune the word before the bonus outweighs it.

    Raises:
        LexiconError: a hot word is empty, holds white space, or cannot be spelled.
    """
    codes = spelling.codes
    bad = [word for word in hot_words if not word or not codes.keys() >= set(word)]
    if bad:
        raise LexiconError(f"hot words {bad}: give single words in characters that the network writes")
    listed = [word for word in words if codes.keys() >= set(word)]
    known = len(listed)
    everything = [*listed, *hot_words]
    positions = np.array([words[w] for w in listed], np.int64)
    values = np.full(len(everything), -np.inf, np.float32)
    values[:known] = unigrams[positions]
    ends, children, ahead = _insert([[codes[c] for c in word] for word in everything], values, len(codes) + 1)
    word = np.full(len(children), -1, np.int64)
    word[ends[:known]] = positions
    is_word = np.zeros(len(children), bool)
    is_word[ends] = True
    hot, hot_part = np.zeros((2, len(children)))
    hot[ends[known:]] = 1.0
    for text in sorted(hot_words, key=len, reverse=True):  # the shortest last: it has the say
        node = ROOT
        for position, character in enumerate(text, start=1):
            node = int(children[node, codes[character]])
            hot_part[node] = position / len(text)
            if text not in words:
                ahead[node] = max(ahead[node], unknown * position / len(text))
    return Trie(*(torch.from_numpy(a) for a in (children, word, is_word, hot, hot_part, ahead)))


def _insert(
    words: Iterable[Sequence[int]], values: NDArray[np.float32], width: int
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
    """Return the end node of each word, the child table (N, width) and each node's largest value (N,) of its words.

    Goes level by level over all words at once.
    """
    spelled = list(words)
    lengths = np.array([len(word) for word in spelled], dtype=np.int64)
    nodes = np.full(len(spelled), ROOT, np.int64)
    matrix = np.zeros((len(spelled), int(lengths.max(initial=0))), np.int64)
    matrix[np.arange(matrix.shape[1]) < lengths[:, None]] = np.fromiter(
        (code for word in spelled for code in word), np.int64, int(lengths.sum())
    )
    total, keys, largest = ROOT + 1, [np.empty(0, np.int64)], [np.zeros(ROOT + 1, np.float32)]
    for position in range(matrix.shape[1]):
        live = np.flatnonzero(lengths > position)
        unique, inverse = np.unique(nodes[live] * width + matrix[live, position], return_inverse=True)
        nodes[live] = total + inverse
        keys.append(unique)
        largest.append(np.full(len(unique), -np.inf, np.float32))
        np.maximum.at(largest[-1], inverse, values[live])
        total += len(unique)
    children = np.zeros((total, width), np.int32)
    children.reshape(-1)[np.concatenate(keys)] = np.arange(ROOT + 1, total, dtype=np.int32)
    return nodes, children, np.concatenate(largest)
