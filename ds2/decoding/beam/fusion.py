"""Shallow fusion: the part of a prefix's score that its words give (language model, word bonus, hot words, lexicon).

Shapes: B utterances, K prefixes per utterance, V labels. A prefix carries five integers (language-model state, trie
node of its unfinished word, number of characters of that word, number of words before it, trie root of its utterance)
and two float64 sums (language-model log-prob, hot-word bonus). Nothing in this module waits for the device or copies
from the host, so a CUDA graph can record it.

A network of phones does not say where a word begins, nor which of several words of one sound was spoken. Its search
therefore has labels of its own, copies of the network's labels: of each phone one that begins a word and one within a
word, and of the last phone of a word one more for each further word of the same sound. A copy has the log-prob of its
phone, so scores are those of the network; repeats of a sound, whatever the copy, need a blank between them.
"""

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat

import numpy as np
import torch
from torch import Tensor

from ds2.config.schema import DecodeConfig
from ds2.decoding.hypothesis import Hypothesis
from ds2.decoding.lexicon import OFF, ROOT, SessionTrie, Spelling, walk
from ds2.decoding.phrases import LexiconError
from ds2.lm.ngram import END, RESERVED, UNKNOWN, NGram
from ds2.text.alphabet import WORD_MARK, Alphabet
from ds2.text.pronunciations import Phones

log = logging.getLogger(__name__)

STATE, NODE, LENGTH, WORDS, SESSION_ROOT = range(5)
LM, HOT = range(2)
_FIRST_CHARACTER = 0xE000  # Unicode's private use area: a copy of a phone is written as one character
_MAX_CHARACTERS = 6400
_MAX_WAYS = 16  # of saying a phrase
_TYPICAL_WORD_CHARACTERS = 6  # a longer unfinished unknown word is charged in proportion to its length


class _Copies(dict[tuple[str, bool, int], str]):
    """The character of each label of the search; a new label gets the next one.

    A label is a phone, whether it is the first one of a word, and of the last phone of a word its rank among the words
    of one sound; elsewhere this is 0.
    """

    def __missing__(self, copy: tuple[str, bool, int]) -> str:
        if len(self) == _MAX_CHARACTERS:
            raise LexiconError(
                f"the words need more than {_MAX_CHARACTERS} labels: too many of them sound alike; take some out "
                "of the lexicon"
            )
        self[copy] = chr(_FIRST_CHARACTER + len(self))
        return self[copy]


class PronouncedWords:
    """The labels of a search over the pronunciations of a language model's words.

    Attributes:
        alphabet: of the search: word-marked pieces of one character each.
        spelling: of it.
        sounds: (W,) int64 on the CPU, the network's label that each label of the search copies.
        spelled: of each word of the model that has a pronunciation, all spellings in characters of `alphabet`.
        ids: of each spelling the word's id in the model.

    Raises:
        LexiconError: no model of words, none of its words has a pronunciation, or too many have the same one.
    """

    def __init__(self, alphabet: Alphabet, lm: NGram | None) -> None:
        if lm is None or lm.unit != "word":
            raise LexiconError(
                "the network writes phones: a search needs decode.lm, a model of words (`ds2 lm build`); decode=greedy "
                "shows the phones"
            )
        assert alphabet.pronunciations is not None
        known = alphabet.pronunciations.words
        words = [word for word in lm.vocabulary if word in known]  # words of one sound: the most frequent come first
        log_probs = lm.log_prob[: len(lm.vocabulary)].tolist()
        words.sort(key=lambda word: -log_probs[lm.ids[word]])
        if not words:
            raise LexiconError(
                "no word of the language model has a pronunciation in the network's lexicon: build the model with the "
                "network's normalisation, `ds2 lm build --model MODEL`, and the lexicon with its words"
            )
        if missing := sum(word not in known for word in lm.tokens):
            log.warning(
                "%d of the language model's %d words have no pronunciation and are never recognised; `ds2 data "
                "lexicon` adds them", missing, len(lm.vocabulary),
            )  # fmt: skip
        self.spelled: dict[str, tuple[str, ...]] = {}
        self.ids: dict[str, int] = {}
        self._vocabulary = lm.vocabulary
        self._characters = _Copies()
        self._uses: dict[Phones, int] = {}  # words of each sound so far
        for word in words:
            self.spelled[word] = tuple([self._spell(phones) for phones in known[word]])
            self.ids.update(dict.fromkeys(self.spelled[word], lm.ids[word]))
        sounds = {label: number for number, label in enumerate(alphabet.symbols)}
        symbols = [WORD_MARK + text if first else text for (_, first, _), text in self._characters.items()]
        self.alphabet = Alphabet(("", *symbols), case="keep")
        self._sounds = [0, *(sounds[phone] for phone, _, _ in self._characters)]
        self.sounds = torch.tensor(self._sounds)
        self.spelling = replace(Spelling.of(self.alphabet), sounds=self.sounds)

    def _spell(self, phones: Phones) -> str:
        rank = self._uses[phones] = self._uses.get(phones, -1) + 1
        first, ranks = chain((True,), repeat(False)), chain(repeat(0, len(phones) - 1), (rank,))
        copies = list(zip(phones, first, ranks, strict=False))  # `first` has no end
        return "".join(map(self._characters.__getitem__, copies))

    def frames(self, log_probs: Tensor) -> Tensor:
        """Copy the columns of the network's log-probs (T, B, V) to those of the search (T, B, W)."""
        return log_probs.index_select(2, self.sounds.to(log_probs.device, non_blocking=True))

    def text(self, spelled: Iterable[str]) -> str:
        return " ".join(self._vocabulary[self.ids[word]] for word in spelled)

    def in_words(self, hypothesis: Hypothesis) -> Hypothesis:
        """Return a hypothesis of the search with written words, and with the network's labels."""
        words = tuple(replace(word, text=self.text([word.text])) for word in hypothesis.words)
        labels = tuple(map(self._sounds.__getitem__, hypothesis.labels))
        return replace(hypothesis, words=words, labels=labels)

    def spell_phrases(self, phrases: Sequence[str]) -> dict[str, list[str]]:
        """All spellings of hot words; raises LexiconError for words without a pronunciation, or that the LM lacks."""
        missing = sorted({word for phrase in phrases for word in phrase.split() if word not in self.spelled})
        if missing:
            raise LexiconError(
                f"hot words {missing}: the network's lexicon or the language model lacks them; add them to both "
                "(`ds2 data lexicon`, `ds2 lm build`)"
            )
        spelled: dict[str, list[str]] = {}
        for phrase in phrases:
            ways = [""]
            for word in phrase.split():
                ways = [f"{way} {spelling}".strip() for way in ways for spelling in self.spelled[word]][:_MAX_WAYS]
            spelled[phrase] = ways
        return spelled


@dataclass(frozen=True)
class WordScores:
    """Scores of every prefix and of its extension by every label, and the values that `select` needs."""

    stay: Tensor  # (B, K) float64
    extended: Tensor  # (B, K, V) float64
    word: tuple[Tensor, Tensor] | None  # of the unfinished word: log-prob (B, K) float64, state after it (B, K) int64
    label: tuple[Tensor, Tensor] | None  # of each label: log-prob (B, K, V) float64, state after it (B, K, V) int64


class Fusion:
    """Scores prefixes with alpha x log p_lm + beta x words + hot words; the model reads words or labels.

    A model of words reads a word when the next one starts or the utterance ends. Until then the score of the unfinished
    word only ranks prefixes; no hypothesis contains it. A prefix of a hot word gets the spelled share of its bonus.
    With an open vocabulary, a prefix of no known word is charged `unknown_score` / ln 10, more if it is long: these are
    pyctcdecode's rules, so that both searches prune alike. With a lexicon it is charged alpha x the unigram log-prob of
    the most probable word that it may become (Ortmanns, Ney and Eiden 1996, "Language-model look-ahead for large
    vocabulary speech recognition"); the charge of an unknown hot word grows with its bonus. A model of characters reads
    a space together with the character after it, so a space at the end costs nothing.

    With `pronounced` words are spelled by their phones, and its labels take the place of the alphabet's.
    """

    def __init__(
        self,
        alphabet: Alphabet,
        options: DecodeConfig,
        lm: NGram | None,
        device: torch.device,
        pronounced: PronouncedWords | None = None,
    ) -> None:
        if lm is not None and pronounced is None:
            lm.check_alphabet(alphabet)
        self.by_word = lm is not None and lm.unit == "word"
        self.by_label = lm is not None and not self.by_word
        if options.lexicon and not self.by_word:
            raise LexiconError("decode.lexicon=true needs a language model of words: its vocabulary is the lexicon")
        self.alpha, self.beta = (options.alpha, options.beta) if lm is not None else (0.0, 0.0)
        self.lexicon, self.unknown_score = options.lexicon, options.unknown_score
        self.lm = None if lm is None else lm.to(device)
        self.spelling = (Spelling.of(alphabet) if pronounced is None else pronounced.spelling).to(device)
        self.device, self.labels = device, self.spelling.counts.numel()
        self._unknown_id, self._end_id, self._start = (
            (lm.ids[UNKNOWN], lm.ids[END], lm.start()) if lm is not None else (0, 0, 0)
        )
        unknown, words, unigrams = 0.0, dict[str, int](), np.zeros(0, np.float32)
        if lm is not None and self.by_word:
            unigrams = lm.log_prob[: len(lm.vocabulary)].cpu().numpy()
            unknown = float(unigrams[self._unknown_id]) + self.unknown_score
            ids = lm.ids if pronounced is None else pronounced.ids
            words = {word: number for word, number in ids.items() if word not in RESERVED}
        lookahead = self.alpha if self.lexicon else None
        self.trie = SessionTrie(words, unigrams, self.spelling, options.hot_word_bonus, lookahead, unknown, device)
        if lm is not None and self.by_label:
            self.label_ids = torch.tensor(lm.token_ids(alphabet.symbols), device=device)

    def start(self, batch: int, beam: int, root: int = ROOT) -> tuple[Tensor, Tensor]:
        """Return (B, K, 5) int64 and (B, K, 2) float64 of empty prefixes; `root` is of `SessionTrie.add_phrases`."""
        integers = torch.zeros(batch, beam, 5, dtype=torch.int64, device=self.device)
        integers[..., STATE], integers[..., NODE], integers[..., SESSION_ROOT] = self._start, root, root
        return integers, torch.zeros(batch, beam, 2, dtype=torch.float64, device=self.device)

    def score(self, integers: Tensor, floats: Tensor) -> WordScores:
        """Score prefixes, and their extensions by every label; the caller ignores the blank.

        Args:
            integers, floats: (B, K, 5) and (B, K, 2) of the prefixes, as `start` returns them.
        """
        state, node, length, words, root = integers.unbind(-1)
        base = self.alpha * floats[..., LM] + self.beta * words + floats[..., HOT]
        complete, word = self._complete(state, node)
        starts = self.spelling.starts_word
        next_node = torch.where(length > 0, self._next_root(node, root), node)
        inside = torch.where(starts, next_node[..., None], node[..., None])
        nodes = walk(self.trie.nodes.children, inside, self.spelling.characters.expand(*inside.shape, -1))
        lengths = length[..., None].masked_fill(starts, 0) + self.spelling.counts
        extended = base[..., None] + self._unfinished(nodes, lengths)
        extended += complete[..., None].masked_fill(~(starts & (length > 0)[..., None]), 0.0)
        by_label = self._by_label(state, (length == 0) & (words > 0)) if self.by_label else None
        if by_label is not None:
            extended += self.alpha * by_label[0]
        return WordScores(base + self._unfinished(node, length), extended, word, by_label)

    def select(
        self, integers: Tensor, floats: Tensor, word_scores: WordScores, source: Tensor, label: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the integers and floats of K selected prefixes.

        Args:
            integers, floats: of the prefixes that were extended.
            word_scores: of these prefixes.
            source: (B, K) int64, the prefix that each selected one extends.
            label: (B, K) int64, the label that extends it, 0 for none.
        """
        integers = integers.gather(1, source[..., None].expand(-1, -1, 5))
        floats = floats.gather(1, source[..., None].expand(-1, -1, 2))
        state, node, length, words, root = integers.unbind(-1)
        log_prob, hot = floats.unbind(-1)
        starts = self.spelling.starts_word[label]
        done = starts & (length > 0)  # the unfinished word is complete
        if word_scores.word is not None:
            scores, following = word_scores.word
            log_prob = log_prob + scores.gather(1, source).masked_fill(~done, 0.0)
            state = torch.where(done, following.gather(1, source), state)
        if word_scores.label is not None:
            scores, following = word_scores.label
            at = source * self.labels + label
            longer = label > 0
            log_prob = log_prob + scores.flatten(1).gather(1, at).masked_fill(~longer, 0.0)
            state = torch.where(longer, following.flatten(1).gather(1, at), state)
        hot = hot + self.trie.nodes.hot[node] * done
        node = torch.where(done, self._next_root(node, root), node)
        node = walk(self.trie.nodes.children, node, self.spelling.characters[label])
        length = length.masked_fill(starts, 0) + self.spelling.counts[label]
        return torch.stack([state, node, length, words + done, root], -1), torch.stack([log_prob, hot], -1)

    def finish(self, integers: Tensor, floats: Tensor, alive: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """End every prefix; return (B, K) language-model log-prob, bonus of words and hot words, and weighted sum.

        With a lexicon the sum is -inf for prefixes that end inside a word, unless all `alive` (B, K) ones do.
        """
        state, node, length, words = integers[..., :SESSION_ROOT].unbind(-1)
        log_prob, hot = floats.unbind(-1)
        open_word = length > 0
        _, word = self._complete(state, node)
        if word is not None:
            log_prob = log_prob + torch.where(open_word, word[0], 0.0)
            state = torch.where(open_word, word[1], state)
        if self.lm is not None:
            ends = torch.full_like(state, self._end_id)
            log_prob = log_prob + self.lm.score_batch(state.flatten(), ends.flatten())[0].view_as(state)
        hot = hot + torch.where(open_word, self.trie.nodes.hot[node], 0.0)
        bonus = self.beta * (words + open_word) + hot
        total = self.alpha * log_prob + bonus
        if self.lexicon:
            inside = open_word & ~self.trie.nodes.is_word[node]
            total = total.masked_fill(inside & ~(inside | ~alive).all(1, keepdim=True), -math.inf)
        return log_prob, bonus, total

    def _complete(self, state: Tensor, node: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Return what the unfinished word adds when it is complete, and `WordScores.word`."""
        gain = self.beta + self.trie.nodes.hot[node]
        if not self.by_word or self.lm is None:
            return gain, None
        word = self.trie.nodes.word[node]
        known = word >= 0
        tokens = word.masked_fill(~known, self._unknown_id)
        scores, following = self.lm.score_batch(state.flatten(), tokens.flatten())
        word_score = scores.view_as(state).double() + self.unknown_score * (~known).double()
        gain = gain + self.alpha * word_score
        if self.lexicon:
            gain = gain.masked_fill(~self.trie.nodes.is_word[node], -math.inf)
        return gain, (word_score, following.view_as(state))

    def _next_root(self, node: Tensor, root: Tensor) -> Tensor:
        """Return the root of the word after one that ends at a node."""
        follow = self.trie.nodes.follow[node]
        return torch.where(follow > 0, follow, root)

    def _unfinished(self, node: Tensor, length: Tensor) -> Tensor:
        score = self.trie.nodes.unfinished[node]
        if self.by_word and not self.lexicon:
            charge = self.unknown_score / math.log(10) * (length / _TYPICAL_WORD_CHARACTERS).clamp(min=1.0)
            score = torch.where(node == OFF, charge.double(), score)
        return score

    def _by_label(self, state: Tensor, after_space: Tensor) -> tuple[Tensor, Tensor]:
        assert self.lm is not None
        batch, beam = state.shape
        flat, space = state.flatten(), self.spelling.space
        of_space = torch.zeros_like(flat, dtype=torch.float64)
        if space >= 0:
            ids = self.label_ids[space].expand_as(flat)
            space_score, space_state = self.lm.score_batch(flat, ids)
            of_space = space_score.double().masked_fill(~after_space.flatten(), 0.0)
            flat = torch.where(after_space.flatten(), space_state, flat)
        scores, following = self.lm.score_all(flat)
        scores = scores.index_select(1, self.label_ids).double() + of_space[:, None]
        following = following.index_select(1, self.label_ids)
        if space >= 0:
            scores[:, space] = 0.0
            following[:, space] = state.flatten()
        return scores.view(batch, beam, -1), following.view(batch, beam, -1)
