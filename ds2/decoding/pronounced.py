"""Words as sequences of phones, in the form of a search over word-marked labels.

A network of phones does not say where a word begins, nor which of several words of one sound was said. The search
therefore has labels of its own, copies of the network's labels: of each phone one that begins a word and one within a
word, and of the last phone of a word one more for each further word of the same sound. A copy has the log-prob of its
phone, so scores are those of the network; repeats of a sound, whatever the copy, need a blank between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ds2.decoding.hypothesis import Hypothesis
from ds2.decoding.lexicon import LexiconError, Spelling
from ds2.lm.ngram import END, START, UNKNOWN, NGram
from ds2.text.alphabet import WORD_MARK, Alphabet
from ds2.text.pronunciations import Phones

_FIRST_CHARACTER = 0xE000  # Unicode's private use area: a copy of a phone is written as one character
_MOST_CHARACTERS = 6400


class _Copy(NamedTuple):
    """A label of the search."""

    phone: str
    first: bool  # of a word
    rank: int  # among the words of one sound, of its last phone; 0 elsewhere


class PronouncedWords:
    """The labels of a search over the pronunciations of a language model's words.

    Args:
        alphabet: of phones.
        lm: of words.

    Attributes:
        alphabet: of the search: word-marked pieces of one character each.
        spelling: of it.
        sounds: (W,) int64 on the CPU, the network's label that each label of the search copies.
        spelled: of each word of the model that has a pronunciation, all spellings in characters of `alphabet`.
        ids: of each spelling the word's id in the model.

    Raises:
        LexiconError: no word of the model has a pronunciation, or too many have the same one.
    """

    def __init__(self, alphabet: Alphabet, lm: NGram) -> None:
        assert alphabet.pronunciations is not None
        known = alphabet.pronunciations.words
        words = [word for word in lm.vocabulary if word in known]  # words of one sound: the most frequent come first
        words.sort(key=lambda word: -float(lm.log_prob[lm.ids[word]]))
        if not words:
            raise LexiconError(
                "no word of the language model has a pronunciation in the network's lexicon: build the model with the "
                "network's normalisation, `ds2 lm build --model MODEL`, and the lexicon with its words"
            )
        special = {UNKNOWN, START, END}
        self.missing = sum(word not in known and word not in special for word in lm.vocabulary)
        self.spelled: dict[str, tuple[str, ...]] = {}
        self.ids: dict[str, int] = {}
        self._written: dict[str, str] = {}
        self._characters: dict[_Copy, str] = {}
        self._uses: dict[Phones, int] = {}  # words of each sound so far
        for word in words:
            self.spelled[word] = tuple(self._spell(phones) for phones in known[word])
            for spelling in self.spelled[word]:
                self.ids[spelling], self._written[spelling] = lm.ids[word], word
        sounds = {label: number for number, label in enumerate(alphabet.symbols)}
        symbols = [WORD_MARK + text if copy.first else text for copy, text in self._characters.items()]
        self.alphabet = Alphabet(("", *symbols), case="keep")
        self.sounds = torch.tensor([0, *(sounds[copy.phone] for copy in self._characters)])
        self.spelling = replace(Spelling.of(self.alphabet), sounds=self.sounds)

    def _spell(self, phones: Phones) -> str:
        """Spell the next word of these phones."""
        rank = self._uses[phones] = self._uses.get(phones, -1) + 1
        last = len(phones) - 1
        return "".join(
            self._character(_Copy(phone, at == 0, rank if at == last else 0)) for at, phone in enumerate(phones)
        )

    def _character(self, copy: _Copy) -> str:
        if copy not in self._characters:
            if len(self._characters) == _MOST_CHARACTERS:
                raise LexiconError(
                    f"the words need more than {_MOST_CHARACTERS} labels: too many of them sound alike; take some out "
                    "of the lexicon"
                )
            self._characters[copy] = chr(_FIRST_CHARACTER + len(self._characters))
        return self._characters[copy]

    def frames(self, log_probs: Tensor) -> Tensor:
        """Copy the columns of the network's log-probs (T, B, V) to those of the search (T, B, W)."""
        return log_probs.index_select(2, self.sounds.to(log_probs.device))

    def text(self, spelled: Iterable[str]) -> str:
        """The text of spelled words."""
        return " ".join(self._written[word] for word in spelled)

    def in_words(self, hypothesis: Hypothesis) -> Hypothesis:
        """Return a hypothesis of the search with written words, and with the network's labels."""
        words = tuple(replace(word, text=self._written[word.text]) for word in hypothesis.words)
        labels = tuple(self.sounds[list(hypothesis.labels)].tolist())
        return replace(hypothesis, words=words, labels=labels)

    def spell_phrases(self, phrases: Sequence[str]) -> dict[str, list[str]]:
        """All spellings of hot words and phrases.

        Raises:
            LexiconError: words without a pronunciation, or that the language model lacks.
        """
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
                ways = [f"{way} {spelling}".strip() for way in ways for spelling in self.spelled[word]][:_MOST_WAYS]
            spelled[phrase] = ways
        return spelled


_MOST_WAYS = 16  # of saying a phrase
