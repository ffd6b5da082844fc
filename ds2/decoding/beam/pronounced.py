"""Words of a network of phones, by the labels of a search of its own.

A network of phones does not say where a word begins, nor which of several words of one sound was spoken. Its search
therefore has labels of its own, copies of the network's labels: of each phone one that begins a word and one within a
word, and of the last phone of a word one more for each further word of the same sound. A copy has the log-prob of its
phone, so scores are those of the network; repeats of a sound, whatever the copy, need a blank between them.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, repeat

import torch
from torch import Tensor

from ds2.decoding.hypothesis import Hypothesis
from ds2.decoding.lexicon import LexiconError, Spelling
from ds2.lm.ngram import NGram
from ds2.text.alphabet import WORD_MARK, Alphabet
from ds2.text.pronunciations import Phones

log = logging.getLogger(__name__)
_FIRST_CHARACTER = 0xE000  # Unicode's private use area: a copy of a phone is written as one character
_MAX_CHARACTERS = 6400
_MAX_WAYS = 16  # of saying a phrase


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
        LexiconError: no word of the model has a pronunciation, or too many have the same one.
    """

    def __init__(self, alphabet: Alphabet, lm: NGram) -> None:
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
        self.missing = sum(word not in known for word in lm.tokens)
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


def pronounced_words(alphabet: Alphabet, lm: NGram | None) -> PronouncedWords | None:
    """Return the words of a search whose network writes phones; None if it writes characters or pieces."""
    if alphabet.pronunciations is None:
        return None
    if lm is None or lm.unit != "word":
        raise LexiconError(
            "the network writes phones: a search needs decode.lm, a model of words (`ds2 lm build`); decode=greedy "
            "shows the phones"
        )
    words = PronouncedWords(alphabet, lm)
    if words.missing:
        log.warning(
            "%d of the language model's %d words have no pronunciation and are never recognised; `ds2 data lexicon` "
            "adds them", words.missing, len(lm.vocabulary),
        )  # fmt: skip
    return words
