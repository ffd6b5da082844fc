"""What an alphabet cannot write comes back as a table and as an alphabet in which it fits."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from ds2.config.schema import AlphabetConfig
from ds2.text.alphabet import Alphabet
from ds2.text.unknown_characters import count_unknown, propose_alphabet


def proposal(text: str) -> Alphabet:
    _, _, rest = text.partition("\nalphabet:\n")
    settings = yaml.safe_load(rest.split("\n\n", maxsplit=1)[0])
    return Alphabet.from_config(AlphabetConfig(**settings))


def test_the_table_has_counts_and_the_block_has_the_characters() -> None:
    texts = ["Grüße, Ärger!", "schöne Grüße"]
    plain = Alphabet.from_config(AlphabetConfig())
    unfit = count_unknown(texts, plain)
    shown = propose_alphabet(unfit, plain)
    assert "       2  ü  U+00FC LATIN SMALL LETTER U WITH DIAERESIS" in shown
    assert shown.index("U+00DF") < shown.index("U+00E4")  # by count
    better = proposal(shown)
    assert not count_unknown(texts, better) and better.punctuation == "drop" and better.numbers == ""


def test_digits_propose_a_language_and_turkish_letters_a_locale() -> None:
    plain = Alphabet.from_config(AlphabetConfig())
    shown = propose_alphabet(count_unknown(["3 İnek, ılık"], plain), plain)
    assert "numbers: tr  # digits to words: write your language" in shown and "alphabet.locale=tr" in shown
    assert proposal(shown).normalise("İNEK ILIK")[0] == "inek ılık"


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("3 inek, ılık", "tr"),
        ("три кота, 3", "ru"),
        ("3ひき", "ja"),
        ("3마리", "ko"),
        ("3 חתולים", "he"),
        ("3 fünf", "en"),
    ],
)
def test_the_proposed_number_words_are_of_the_script(text: str, language: str) -> None:
    plain = Alphabet.from_config(AlphabetConfig())
    shown = propose_alphabet(count_unknown([text], plain), plain)
    assert f"numbers: {language}  # digits to words: write your language" in shown
    proposal(shown).normalise(text)


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("de", "Er kam am 3. Oktober nach Berlin und blieb dort bis zum Ende des Jahres."),
        ("es", "Llegó a Madrid el 3 de octubre y se quedó con su familia hasta el final del año."),
        ("fr", "Il est venu avec sa femme le 3 octobre et il est resté jusqu'à la fin de l'année."),
        ("en", "He came to London with his wife on the 3 and stayed there until the end of the year."),
        ("uk", "Він приїхав до Києва 3 жовтня і залишився там до кінця року зі своєю родиною."),
    ],
)
def test_the_proposed_number_words_are_of_the_language_of_the_texts(language: str, text: str) -> None:
    plain = Alphabet.from_config(AlphabetConfig())
    shown = propose_alphabet(count_unknown([text], plain), plain, [text])
    assert f"numbers: {language}  # digits to words" in shown
    assert not count_unknown([text], proposal(shown))


@pytest.mark.parametrize(("text", "letters"), [("on the 3", "abcdefghijklmnopqrstuvwxyz"), ("три кота, 3", "")])
def test_number_words_bring_no_letters_of_other_languages(text: str, letters: str) -> None:
    bare = Alphabet.from_config(AlphabetConfig(symbols=f" {letters}" if letters else " тр"))
    symbols = proposal(propose_alphabet(count_unknown([text], bare), bare, [text])).symbols
    assert {s for s in symbols if s.strip() and not "а" <= s <= "я"} == set(letters)


def test_digits_in_chinese_texts_stay_digits() -> None:
    plain = Alphabet.from_config(AlphabetConfig())
    shown = propose_alphabet(count_unknown(["我有３只猫。", "2只"], plain), plain)
    assert "numbers:" not in shown
    assert not count_unknown(["我有３只猫。", "2只"], proposal(shown))
    assert proposal(shown).normalise("我有３只猫。")[0].strip() == "我有3只猫"


@example(["ё 2,2"])
@example(["カ 2.5"])
@given(st.lists(st.text("aZéßıİ72٣２²½Ⅳ㈠한カ我ёאａＢﬁſ…«»,'’- ", max_size=12), min_size=1, max_size=3))
def test_the_proposed_alphabet_has_all_characters(texts: list[str]) -> None:
    plain = Alphabet.from_config(AlphabetConfig())
    if unfit := count_unknown(texts, plain):
        better = proposal(propose_alphabet(unfit, plain))
        unread = {character for text in texts for part in better.unread_numbers(text) for character in part}
        assert count_unknown(texts, better).keys() <= unread


def test_no_unknown_characters_give_an_empty_text() -> None:
    assert propose_alphabet({}, Alphabet.from_config(AlphabetConfig())) == ""
