"""Pronunciations of words that no dictionary has, by a joint n-gram model of letters and phones.

Bisani and Ney 2008, "Joint-sequence models for grapheme-to-phoneme conversion": a word and its phones are one sequence
of units, here of a letter with the 0 to 2 phones that it stands for. The units of a dictionary come from its most
probable alignment (hard EM); a Kneser-Ney model of the units then ranks all pronunciations of a word.
"""

import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise

import numpy as np
import torch

from ds2.lm.kneser_ney import estimate
from ds2.lm.ngram import END, NGram
from ds2.system import UserError
from ds2.system.plain import grouped
from ds2.text.pronunciations import Phones, Pronunciations

Unit = tuple[str, Phones]  # a letter and its phones
_MAX_PHONES = 2  # of a letter
MAX_LETTERS = 200  # of a word: the time grows with their square. No language has longer words; lines without spaces do
_ROUNDS = 5  # of hard EM
_FIRST_WORDS = 20_000  # that all rounds but the last align: the counts of units need no more
_ORDER = 7
_BEAM = 16
_WORDS_AT_ONCE = 256
_STOP = "\n"  # behind a word
_SEPARATOR = "\u2063"  # between a letter and its phones in the name of a unit
_UNSEEN = -20.0  # natural log of a unit that the counts lack


class LettersToPhones:
    """A joint model, estimated from a dictionary.

    Args:
        dictionary: at least some thousand words; those of more than MAX_LETTERS letters or phones are not learnt from.
        order: of the n-gram model, in units; of a dictionary of short words less.

    Raises:
        UserError: no word of the dictionary can be divided into letters of at most two phones each.
    """

    def __init__(self, dictionary: Pronunciations, order: int = _ORDER) -> None:
        every = ((word, phones) for word, variants in dictionary.words.items() for phones in variants)
        pairs = [(word, phones) for word, phones in every if max(len(word), len(phones)) <= MAX_LETTERS]
        sample = pairs if len(pairs) <= _FIRST_WORDS else random.Random(0).sample(pairs, _FIRST_WORDS)
        scores = _first_scores(sample)
        for _ in range(_ROUNDS - 1):
            scores = _logarithms(Counter(chain.from_iterable(_align(sample, scores))))
        aligned = [units for units in _align(pairs, scores) if units]
        if not aligned:
            raise UserError(
                f"pronunciations cannot be guessed: of {len(dictionary.words)} words in the dictionary none has letters"
                f" of at most {_MAX_PHONES} phones each; give a larger one, such as CMUdict, or --no-guess"
            )
        names: dict[str, dict[Unit, str]] = {}
        for unit in dict.fromkeys(chain.from_iterable(aligned)):
            names.setdefault(unit[0], {})[unit] = _SEPARATOR.join((unit[0], *unit[1]))
        self._units = {letter: list(own) for letter, own in names.items()}
        longest = max(map(len, aligned)) + 1
        self.model: NGram = estimate(
            ([names[unit[0]][unit] for unit in units] for units in aligned), min(order, longest), [0], unit="piece"
        ).model
        ids = self.model.ids
        self._ids = {letter: torch.tensor([ids[name] for name in own.values()]) for letter, own in names.items()}

    def pronounce(self, words: Iterable[str]) -> dict[str, Phones]:
        """The most probable pronunciation of each word.

        Words of unknown letters, of more than MAX_LETTERS, or without a phone are left out.
        """
        words = {word for word in words if 0 < len(word) <= MAX_LETTERS}
        known = sorted(word for word in words if self._units.keys() >= set(word))  # neighbours begin alike
        result: dict[str, Phones] = {}
        for start in range(0, len(known), _WORDS_AT_ONCE):
            part = known[start : start + _WORDS_AT_ONCE]
            result.update({word: phones for word, phones in zip(part, self._search(part), strict=True) if phones})
        return result

    def _search(self, words: Sequence[str]) -> Iterator[Phones]:
        """Beam search over the units of all words side by side. A beginning that words share is searched once."""
        units_of = self._units | {_STOP: [("", ())]}
        ids_of = self._ids | {_STOP: torch.tensor([self.model.ids[END]])}
        ended = [word + _STOP for word in words]
        # Of each beginning the best pronunciations: log-prob, state of the language model, units.
        beams: dict[str, list[tuple[float, int, tuple[Unit, ...]]]] = {"": [(0.0, self.model.start(), ())]}
        for length in range(1, max(map(len, ended)) + 1):
            starts = list(dict.fromkeys(word[:length] for word in ended if len(word) >= length))
            asked = [(beam, ids_of[start[-1]]) for start in starts for beam in beams[start[:-1]]]
            counts = torch.tensor([len(ids) for _, ids in asked])
            states = torch.tensor([beam[1] for beam, _ in asked]).repeat_interleave(counts)
            before = torch.tensor([beam[0] for beam, _ in asked], dtype=torch.float64).repeat_interleave(counts)
            scores, following = self.model.score_batch(states, torch.cat([ids for _, ids in asked]))
            totals, place = (before + scores).numpy(), 0
            for start in starts:
                parents, units = beams[start[:-1]], units_of[start[-1]]
                own = totals[place : place + len(parents) * len(units)]
                beams[start] = [
                    (
                        own[at].item(),
                        int(following[place + at]),
                        (*parents[at // len(units)][2], units[at % len(units)]),
                    )
                    for at in np.argsort(-own, kind="stable")[:_BEAM].tolist()
                ]
                place += len(own)
        for word in ended:
            outputs = (tuple(phone for _, phones in units for phone in phones) for _, _, units in beams[word])
            yield next((phones for phones in outputs if phones), ())


def _align(pairs: Sequence[tuple[str, Phones]], scores: Mapping[Unit, float]) -> list[list[Unit]]:
    """The most probable units of each word; none of a word that has too few letters for its phones.

    Words of equal numbers of letters and of phones are aligned side by side.
    """
    numbers = {phone: n for n, phone in enumerate({phone for _, phones in pairs for phone in phones}, start=1)}
    base = len(numbers) + 1  # the number of a unit is its letter, then a digit for each phone, 0 for none
    places = (base, 1)
    units = [ord(c) * base**2 + sum(numbers[p] * n for p, n in zip(own, places, strict=False)) for c, own in scores]
    keys, logs = np.array([-1, *units]), np.array([_UNSEEN, *scores.values()])
    order = np.argsort(keys)
    keys, logs = keys[order], logs[order]
    groups = grouped(range(len(pairs)), lambda index: (len(pairs[index][0]), len(pairs[index][1])))
    aligned: list[list[Unit]] = [[] for _ in pairs]
    shared: dict[Unit, Unit] = {}  # one object for each unit: a million would keep the garbage collector busy
    for (_, columns), group in groups.items():
        letters = np.array([[ord(letter) * base**2 for letter in pairs[index][0]] for index in group])
        digits = np.array([[numbers[phone] for phone in pairs[index][1]] for index in group])
        spans = (np.zeros((len(group), columns + 1), int), digits * base, digits[:, :-1] * base + digits[:, 1:])
        best = np.full((len(group), columns + 1), -math.inf)  # log-prob of the letters so far and as many phones
        best[:, 0] = 0.0
        taken = []
        for letter in letters.T:
            after, took = np.full_like(best, -math.inf), np.zeros(best.shape, int)
            for count in range(_MAX_PHONES, -1, -1):
                unit = letter[:, None] + spans[count]
                at = np.searchsorted(keys, unit, side="right") - 1
                score = best[:, : columns + 1 - count] + np.where(keys[at] == unit, logs[at], _UNSEEN)
                better = score > after[:, count:]
                after[:, count:][better], took[:, count:][better] = score[better], count
            best = after
            taken.append(took)
        edges = [np.full(len(group), columns)]
        for took in reversed(taken):
            edges.append(edges[-1] - took[range(len(group)), edges[-1]])
        for index, total, ends in zip(group, best[:, -1], np.stack(edges[::-1], axis=1).tolist(), strict=True):
            if total > -math.inf:
                word, phones = pairs[index]
                cut = ((c, phones[start:end]) for c, (start, end) in zip(word, pairwise(ends), strict=True))
                aligned[index] = [shared.setdefault(unit, unit) for unit in cut]
    return aligned


def _first_scores(pairs: Sequence[tuple[str, Phones]]) -> dict[Unit, float]:
    """Scores from how often a letter and one phone stand at about the same place of a word."""
    counts: Counter[Unit] = Counter()
    for word, phones in pairs:
        for at, letter in enumerate(word):
            middle = (at + 0.5) * len(phones) / len(word)
            for place in range(max(0, int(middle) - 1), min(len(phones), int(middle) + 2)):
                counts[letter, phones[place : place + 1]] += 1
            counts[letter, ()] += 1
    return _logarithms(counts)


def _logarithms(counts: Counter[Unit]) -> dict[Unit, float]:
    """Natural log of the share of each unit among those of its letter."""
    totals: Counter[str] = Counter()
    for (letter, _), count in counts.items():
        totals[letter] += count
    return {unit: math.log(count / totals[unit[0]]) for unit, count in counts.items()}
