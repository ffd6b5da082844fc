"""Letters to phones: a made-up language whose rules are known, and the search beside all units of a word."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from ds2.lm.letters_to_phones import LettersToPhones, _align
from ds2.system import UserError
from ds2.text.pronunciations import Phones, Pronunciations, parse_pronunciations

_OF_LETTER = {"a": ("AA",), "k": ("K",), "c": ("K",), "i": ("IY",), "t": ("T",), "x": ("K", "S"), "h": ("HH",)}


def said(word: str) -> Phones:
    """The rules: "ch" is one sound, the last "e" of a word is silent, "x" has two phones."""
    phones: list[str] = []
    for at, letter in enumerate(word):
        if letter == "c" and word[at + 1 : at + 2] == "h":
            phones.append("CH")
        elif letter == "h" and word[at - 1 : at] == "c":
            continue
        elif letter == "e":
            phones += [] if at == len(word) - 1 else ["EH"]
        else:
            phones += _OF_LETTER[letter]
    return tuple(phones)


def words(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices("akcitxhe", k=rng.randint(2, 7))) for _ in range(count)]


@pytest.fixture(scope="module")
def model() -> LettersToPhones:
    own = [word for word in words(1, 3000) if said(word)]
    return LettersToPhones(Pronunciations.of({word: [said(word)] for word in own}), order=3)


def test_rules_are_learnt_from_examples(model: LettersToPhones) -> None:
    others = sorted({word for word in words(2, 400) if said(word)} - set(words(1, 3000)))
    found = model.pronounce(others)
    right = sum(found[word] == said(word) for word in others)
    assert len(others) > 100 and right >= 0.97 * len(others)


def test_search_finds_the_most_probable_of_all_units(model: LettersToPhones) -> None:
    lm = model.model
    for word in ["xe", "che", "hac", "eit"]:
        best: tuple[float, Phones] = (-float("inf"), ())
        for units in itertools.product(
            *(list(zip(model._units[c], model._ids[c].tolist(), strict=True)) for c in word)
        ):
            score = sum(lm.sentence([lm.vocabulary[number] for _, number in units]))
            best = max(best, (score, tuple(phone for (_, phones), _ in units for phone in phones)))
        assert model.pronounce([word])[word] == best[1]


def test_words_with_unknown_letters_are_left_out(model: LettersToPhones) -> None:
    assert set(model.pronounce(["cat", "dog", "", "cat"])) == {"cat"}
    assert model.pronounce([]) == {}


def test_words_of_more_phones_than_letters_can_have_are_left_out() -> None:
    lexicon = parse_pronunciations(["cat K AE T", "at AE T", "w D AH B AH L Y UW", "tact T AE K T"], "test")
    assert set(LettersToPhones(lexicon).pronounce(["cat", "w"])) == {"cat"}
    with pytest.raises(UserError, match=r"none has letters of at most 2 phones each; give a larger"):
        LettersToPhones(parse_pronunciations(["w D AH B AH L Y UW"], "test"))


def test_words_aligned_side_by_side_have_the_most_probable_units_of_each() -> None:
    rng = random.Random(3)
    pairs = [
        ("".join(rng.choices("abc", k=rng.randint(1, 5))), tuple(rng.choices("XYZ", k=rng.randint(1, 6))))
        for _ in range(99)
    ]
    units = [
        (letter, phones) for letter in "abc" for count in range(3) for phones in itertools.product("XYZ", repeat=count)
    ]
    scores = {unit: math.log(rng.random()) for unit in units[::2]}
    for (word, phones), aligned in zip(pairs, _align(pairs, scores), strict=True):
        totals = {}
        for counts in itertools.product(range(3), repeat=len(word)):
            if sum(counts) == len(phones):
                ends = list(itertools.accumulate(counts))
                cut = [(letter, phones[end - n : end]) for letter, end, n in zip(word, ends, counts, strict=True)]
                totals[tuple(cut)] = sum(scores.get(unit, -20.0) for unit in cut)
        assert tuple(aligned) == max(totals, key=totals.__getitem__, default=())
