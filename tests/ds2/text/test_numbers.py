"""Numbers as people write them become the words that people say, and what has no sure reading is named."""

from __future__ import annotations

import builtins
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds2.config.schema import AlphabetConfig
from ds2.system import UserError
from ds2.text.alphabet import Alphabet, AlphabetError
from ds2.text.numbers import numbers_languages, spell_numbers, unread_numbers

# Words checked by hand.
ENGLISH = {
    "$3.50": "three dollars and fifty cents",
    "-$1": "minus one dollar",
    "£0.01": "one penny",
    "US$5 million": "five million dollars",
    "1,000,000": "one million",
    "1,234.5": "one thousand two hundred and thirty four point five",
    "in 1995.": "in nineteen ninety five.",
    "in 1905": "in nineteen oh five",
    "1900": "nineteen hundred",
    "2010-2015": "twenty ten to twenty fifteen",
    "the 1990s": "the nineteen nineties",
    "the '80s": "the eighties",
    "50%": "fifty percent",
    "-5": "minus five",
    "+5 °C": "plus five degrees Celsius",
    "1°": "one degree",
    "10:30": "ten thirty",
    "9:05 pm": "nine oh five pm",
    "10:00": "ten o'clock",
    "10:00 p.m.": "ten p.m.",
    "10:30AM": "ten thirty AM",
    "1 2 3": "one two three",
    "mid-1990s, the 20th-century": "mid-nineteen nineties, the twentieth-century",
    "2nd and 21st": "second and twenty first",
    "101ST": "one hundred and first",
    "May 5, 2001": "May fifth, two thousand one",
    "1/2": "one half",
    "¾ of it": "three quarters of it",
    "5–6 days": "five to six days",
    "3.05": "three point zero five",
    "3.0": "three point zero",
    "-3.5": "minus three point five",
    "room 007": "room zero zero seven",
    "1234567890123": "one two three four five six seven eight nine zero one two three",
    "Covid-19": "Covid-nineteen",
    "5km": "five km",
    "(1995), 2": "(nineteen ninety five), two",
}
GERMAN = {
    "3. Oktober": "dritter Oktober",
    "am 3. Oktober 1990": "am dritten Oktober neunzehnhundertneunzig",
    "der 2. Mann": "der zweite Mann",
    "in der 2. Klasse": "in der zweiten Klasse",
    "ein 3. Mann": "ein dritter Mann",
    "am 3.": "am dritten",
    "Er ist 20.": "Er ist zwanzig.",
    "3,50 €": "drei Euro fünfzig",
    "1 €": "ein Euro",
    "5,- €": "fünf Euro",
    "$3.50": "drei Dollar fünfzig",
    "50 %": "fünfzig Prozent",
    "um 10:30 Uhr": "um zehn Uhr dreißig",
    "13.05 Uhr": "dreizehn Uhr fünf",
    "1 Uhr": "ein Uhr",
    "die 1990er": "die neunzehnhundertneunziger",
    "1.234,5": "eintausendzweihundertvierunddreißig Komma fünf",
    "20 000 Leute": "zwanzigtausend Leute",
    "-3,5 °C": "minus drei Komma fünf Grad Celsius",
    "21-jährig": "einundzwanzigjährig",
    "3/4": "drei viertel",
    "5-6": "fünf bis sechs",
}
SPANISH = {
    "3,50 €": "tres euros con cincuenta céntimos",
    "21 €": "veintiún euros",
    "£1": "una libra",
    "1.000.000 $": "un millón de dólares",
    "en 1995": "en mil novecientos noventa y cinco",
    "50 %": "cincuenta por ciento",
    "-5": "menos cinco",
    "3º y 1.ª": "tercero y primera",
    "1er": "primer",
    "10:30": "diez y treinta",
    "1,5": "uno coma cinco",
    "1/3": "un tercio",
    "5–6": "cinco a seis",
}
FRENCH = {
    "3,50 €": "trois euros cinquante",
    "2 millions €": "deux millions d'euros",
    "en 1995": "en mille neuf cent quatre vingt quinze",
    "50 %": "cinquante pour cent",
    "-5": "moins cinq",
    "1er": "premier",
    "1re": "première",
    "2e et 3ème": "deuxième et troisième",
    "2nde": "seconde",
    "10h30": "dix heures trente",
    "1:05": "une heure cinq",
    "1 000 000": "un million",
    "3,14": "trois virgule un quatre",
    "1/2": "un demi",
    "5–6": "cinq à six",
}
OTHERS = {
    ("tr", "5 gün, 3,05"): "beş gün, üç virgül sıfır beş",
    ("it", "123"): "centoventitré",
    ("sv", "1995"): "nittonhundranittiofem",
    ("pt_PT", "16"): "dezasseis",
    ("pl", "-5"): "minus pięć",
    ("uk", "5"): "п'ять",
    ("xx", "no digits"): "no digits",
}
CASES = [
    *((language, text, words) for (language, text), words in OTHERS.items()),
    *(("en", text, words) for text, words in ENGLISH.items()),
    *(("de", text, words) for text, words in GERMAN.items()),
    *(("es", text, words) for text, words in SPANISH.items()),
    *(("fr", text, words) for text, words in FRENCH.items()),
]
UNSURE = {
    "en": ["3/4/5", "24/7", "555-1234", "10:30:15", "#5", "5 + 3", "±5", "12.05.2003", "1,2", "5'10", "$-5", "15:00",
           "2 1/2", "5 May", "1.2.3", "3-2", "x=5",
           "10 000", "5 1234", "555 123 4567", "5¢", "№ 5", "$5M", "a5@b.c"],
    "de": ["Er ist 20. Dann", "03.10.1990", "1994/95", "§ 5", "1. und 2. Klasse"],
    "es": ["3/4/5", "10:30:15"],
    "es_MX": ["$5"],  # pesos
    "fr": ["1e", "2er", "25h10"],
    "tr": ["%5", "10:30", "5. sınıf"],
    "it": ["50%"],
    "ru": ["3,05"],
    "zu": ["11000", "20000", "71.027.781"],
}  # fmt: skip


@pytest.mark.parametrize(("language", "text", "words"), CASES)
def test_numbers_become_the_words_that_people_say(language: str, text: str, words: str) -> None:
    assert spell_numbers(text, language) == words


@pytest.mark.parametrize(
    ("language", "text"), [(language, text) for language, texts in UNSURE.items() for text in texts]
)
def test_what_has_no_sure_reading_stays_and_is_named(language: str, text: str) -> None:
    assert unread_numbers(text, language)
    assert spell_numbers(text, language) in (text, "25h dix")
    digits = "".join(c for c in text if c.isdigit())
    assert set(c for part in unread_numbers(text, language) for c in part if c.isdigit()) <= set(digits)


def test_training_refuses_numbers_without_a_sure_reading_by_name() -> None:
    german = Alphabet.from_config(
        AlphabetConfig(symbols=" abcdefghijklmnopqrstuvwxyzßäöü", punctuation="drop", numbers="de")
    )
    assert german.decode(german.encode("Am 3. Oktober, 50 %")) == "am dritten oktober fünfzig prozent"
    with pytest.raises(AlphabetError, match=r"numbers=de has no sure reading of '03\.10\.1990': write it .* spoken"):
        german.encode("am 03.10.1990")
    replaced = Alphabet.from_config(AlphabetConfig(punctuation="drop", numbers="it", replace={"%": " per cento"}))
    assert replaced.decode(replaced.encode("50%")) == "cinquanta per cento"


def test_digits_of_the_alphabet_are_written_and_not_named() -> None:
    with_digits = Alphabet.from_config(AlphabetConfig(symbols=" 0123456789/", numbers="en"))
    assert with_digits.unread_numbers("3/4/5") == [] and with_digits.decode(with_digits.encode("3/4/5")) == "3/4/5"


@given(
    st.text("0123456789.,:/-–% €$°½²'’\u00a0stndh٣三eraº+=A", max_size=20),
    st.sampled_from(["en", "de", "es", "fr", "tr"]),
)
def test_no_digit_is_lost(text: str, language: str) -> None:
    """Each run of digits becomes words or stays; no text raises an error."""
    spelled = spell_numbers(text, language)
    for part in unread_numbers(text, language):
        assert part in spelled
    if any(c.isdecimal() for c in text):
        assert any(c.isalpha() or c.isdecimal() for c in spelled.replace("A", ""))


@pytest.mark.parametrize("language", numbers_languages())
def test_every_language_reads_whole_numbers(language: str) -> None:
    for number in ("0", "7", "21", "105", "1100", "1995", "1000000", "999999999999"):
        beyond = language == "zu" and int(number) > 10_999  # CLDR's rules give 1000000 and 999000 the same words
        assert unread_numbers(number, language) == [number] * beyond
    assert len(spell_numbers("9" * 400, language)) >= 400  # digit by digit
    assert unread_numbers(",".join(["999"] * 40), language) or language not in ("en", "de")


def test_an_unknown_language_and_a_missing_package_give_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"numbers='klingon'.*known for af.*de.*write the numbers"):
        Alphabet.from_config(AlphabetConfig(numbers="klingon"))

    plain = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == "unicode_rbnf":
            raise ImportError(name)
        return plain(name, *rest, **more)

    monkeypatch.delitem(sys.modules, "unicode_rbnf", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match="pip install unicode-rbnf"):
        Alphabet.from_config(AlphabetConfig(numbers="en-ZA"))
