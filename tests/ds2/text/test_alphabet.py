"""Alphabets: transcripts to labels and back, with unknown characters stopped or counted, never lost."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds2.config.schema import AlphabetConfig
from ds2.text.alphabet import Alphabet, AlphabetError


def make(**keys: object) -> Alphabet:
    return Alphabet.from_config(AlphabetConfig(**keys))  # type: ignore[arg-type]


def test_labels_count_from_one_after_the_blank() -> None:
    alphabet = make(symbols="abc ")
    assert len(alphabet) == 5
    assert alphabet.encode("a cab") == [1, 4, 3, 1, 2]
    assert alphabet.decode([1, 1, 0, 3]) == "aac"


@given(st.text(" 'abcdefghijklmnopqrstuvwxyz", max_size=40))
def test_decode_of_encode_is_the_normalised_text(text: str) -> None:
    alphabet = make()
    assert alphabet.decode(alphabet.encode(text)) == alphabet.normalise(text)[0] == " ".join(text.split())


@given(st.text(max_size=40))
def test_every_unknown_character_is_counted_and_only_those_are_dropped(text: str) -> None:
    alphabet = make(unknown="drop")
    normalised, unknown = alphabet.normalise(text)
    assert unknown == Counter(c for c in normalised if c not in set(alphabet.symbols))
    kept = "".join(c for c in normalised if c not in unknown)
    assert alphabet.decode(alphabet.encode(text)) == " ".join(kept.split())


def test_normalisation_composes_replaces_longest_first_then_folds_case_and_space() -> None:
    alphabet = make(symbols=" abcdeé&", replace={"a": "b", "ab": "c", "\u2019": "'"})
    assert alphabet.normalise(" AB\tab  a\n") == ("ab c b", Counter())
    assert alphabet.normalise("e\u0301") == ("é", Counter())
    assert alphabet.normalise("\u2019")[0] == "'"


def test_replacements_are_not_replaced_again() -> None:
    assert make(symbols="ab", replace={"a": "b", "b": "a"}).normalise("ab")[0] == "ba"


def test_unknown_characters_are_named_with_code_point_and_count() -> None:
    with pytest.raises(AlphabetError, match=r"'é' U\+00E9 x 2, '3' U\+0033; add them to alphabet.symbols"):
        make().encode("é3é")


def test_dropped_characters_leave_no_double_space() -> None:
    alphabet = make(unknown="drop")
    assert alphabet.decode(alphabet.encode("a - b")) == "a b"


@pytest.mark.parametrize("case, text, written", [("lower", "aB", "ab"), ("upper", "aB", "AB"), ("keep", "aB", "aB")])
def test_case(case: str, text: str, written: str) -> None:
    assert make(symbols="abAB" if case == "keep" else written, case=case).normalise(text) == (written, Counter())


def test_an_alphabet_is_restored_from_plain_containers() -> None:
    alphabet = make(symbols="ABÉ ", case="upper", replace={"&": "AND"}, unknown="drop")
    assert Alphabet.from_dict(alphabet.to_dict()) == alphabet
    assert alphabet != make()


@pytest.mark.parametrize(
    "keys, reason",
    [
        ({"symbols": "aab"}, "distinct"),
        ({"symbols": "a" * 1_000_000}, r"^symbols .{,100} distinct symbols$"),
        ({"symbols": "ab\ud800"}, "surrogate"),
        ({"symbols": "abC"}, r"\['C'\].*alphabet.case=lower"),
        ({"case": "title"}, "lower or upper or keep"),
        ({"replace": {"": "x"}}, "empty key"),
    ],
)
def test_invalid_alphabets_are_refused(keys: dict[str, object], reason: str) -> None:
    with pytest.raises(AlphabetError, match=reason):
        make(**keys)


@pytest.mark.parametrize("symbols", ["abc ", "äß漢 ", "".join(map(chr, range(0x4E00, 0x4E00 + 400)))])
def test_translation_tables_equal_the_symbols(symbols: str) -> None:
    alphabet = make(symbols=symbols, case="keep")
    labels = [*range(1, len(alphabet)), 0, 2, 2]
    text = "".join(alphabet.symbols[label] for label in labels)
    assert alphabet.decode(tuple(labels)) == alphabet.decode(labels) == text
    assert alphabet.spell(text) == [label for label in labels if label]
    with pytest.raises(KeyError):
        alphabet.spell("a" if "a" not in symbols else "z")
    with pytest.raises(IndexError):
        alphabet.decode((len(alphabet),))
