"""Transcripts as people write them to transcripts as a network shall: Unicode form, digits, punctuation, case."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import cache
from typing import Any

from ds2.system.errors import UserError

_DOTTED = ("tr", "az")  # languages whose I without dot and i with one are two letters
_APOSTROPHES = "'’‘ʼ＇`´"
_DECIMAL_POINT = ("en", "he", "ja", "ko", "th", "zh")  # 1,234.5; the others write 1.234,5
_DIGITS = re.compile(r"\d+(?:[.,\u00a0\u202f]\d+)*")
_ENDLESS = ("am",)  # languages in which num2words 0.5 never returns for numbers above a thousand
_CODE = re.compile(r"[a-z]{2,3}([-_][A-Za-z0-9]+)*")
_MOST_DIGITS = 12  # longer runs of digits are telephone or card numbers
_ENGLISH_ORDINAL = re.compile(r"\b(\d{1,4})(?:st|nd|rd|th)\b", re.IGNORECASE)


class NormaliseError(UserError):
    """A normaliser that cannot work; the message names the setting and the way out."""


def lower(text: str, locale: str = "") -> str:
    """Return a text in lower case; in Turkish and Azerbaijani I gives ı and İ gives i.

    Without the locale, Unicode makes İ an i with a combining dot, and I an i, which is another letter there.
    """
    if _language(locale) in _DOTTED:
        text = text.replace("İ", "i").replace("I\u0307", "i").replace("I", "ı")
    return text.lower()


def upper(text: str, locale: str = "") -> str:
    """Return a text in upper case; in Turkish and Azerbaijani i gives İ (and ı gives I, as everywhere)."""
    if _language(locale) in _DOTTED:
        text = text.replace("i", "İ")
    return text.upper()


def drop_punctuation(text: str, keep: Collection[str] = "") -> str:
    """Return a text with a space in place of what is no letter, mark or digit, and nothing for an apostrophe in a word.

    Args:
        text: any.
        keep: characters that stay. Where the plain apostrophe is one, typographic ones in words become it.
    """
    parts = []
    for index, character in enumerate(text):
        if character in keep or unicodedata.category(character)[0] in "LMN":
            parts.append(character)
        elif character in _APOSTROPHES and text[index - 1 : index].isalpha() and text[index + 1 : index + 2].isalpha():
            parts.append("'" if "'" in keep else "")
        else:
            parts.append(" ")
    return "".join(parts)


def fold(text: str, locale: str = "") -> str:
    """Return a text without case and punctuation but for apostrophes in words: for a WER that asks about words only."""
    return " ".join(drop_punctuation(lower(unicodedata.normalize("NFC", text), locale), keep="'").split())


def spell_numbers(text: str, language: str) -> str:
    """Return a text whose digits are words: 1,234.5 in English, 1.234,5 in most other languages, and 21st in English.

    Numbers that start with 0, and those of more than twelve digits, are read digit by digit. Hyphens and commas of the
    words become spaces.

    Args:
        text: any.
        language: as num2words calls it: en, de, tr, pt_BR.

    Raises:
        NormaliseError: num2words is not installed, does not know the language, or cannot read a number in it.
    """
    if not any(character.isdigit() for character in text):
        return text
    spelled = _speller(language)
    if _language(language) == "en":
        text = _ENGLISH_ORDINAL.sub(lambda match: f" {spelled(int(match[1]), to='ordinal')} ", text)
    return _DIGITS.sub(lambda match: f" {_number(match[0], language, spelled)} ", text)


def number_words(language: str) -> list[str]:
    """Return the words that numbers of a language are made of, as far as num2words is installed and has them."""
    found = []
    whole = (*range(101), *range(200, 1000, 100), 1000, 2000, 10**6, 2 * 10**6, 10**9, 2 * 10**9)
    for number in (*whole, 0.1, 1.2, 2.25, 3.001):
        with suppress(NormaliseError):
            found.append(_speller(language)(number))
    return found


def _number(written: str, language: str, spelled: Callable[..., str]) -> str:
    thousands, decimal = (",", ".") if _language(language) in _DECIMAL_POINT else (".", ",")
    plain = re.sub(r"[\u00a0\u202f]", "", written)
    whole, mark, fraction = plain.partition(decimal)
    groups = whole.split(thousands)
    if len(groups[0]) <= 3 and all(len(group) == 3 for group in groups[1:]):
        whole = "".join(groups)
    if whole.isdecimal() and (not mark or fraction.isdecimal()):
        if not mark and (len(whole) > _MOST_DIGITS or (len(whole) > 1 and whole.startswith("0"))):
            return " ".join(spelled(int(digit)) for digit in whole)
        return spelled(float(f"{int(whole)}.{fraction}") if mark else int(whole))
    return " ".join(_number(part, language, spelled) for part in re.findall(r"\d+", plain))


@cache
def _speller(language: str) -> Callable[..., str]:
    try:
        import num2words
    except ImportError as error:
        raise NormaliseError(
            f"alphabet.numbers={language} needs num2words: pip install num2words, or the extra `text` of ds2"
        ) from error
    known = sorted(set(num2words.CONVERTER_CLASSES) - set(_ENDLESS))
    if language not in known and _language(language) not in known:
        raise NormaliseError(
            f"alphabet.numbers={language!r}: num2words knows {', '.join(known)}; for another language write the digits "
            "of transcripts out as words, or leave alphabet.numbers empty and add the digits to alphabet.symbols"
        )

    def spelled(number: int | float, **how: Any) -> str:
        try:
            words = num2words.num2words(number, lang=language, **how)
        except Exception as error:  # as each language's own code has it
            raise NormaliseError(
                f"alphabet.numbers={language}: num2words cannot read {number} ({error or type(error).__name__}): write "
                "it out as words in the transcript"
            ) from error
        return " ".join(re.sub(r"[-,]", " ", words).split())

    return spelled


def check_locale(locale: str) -> None:
    """Raise NormaliseError where a locale is no code of a language, such as a name; an empty one asks for nothing."""
    if locale and not _CODE.fullmatch(locale):
        raise NormaliseError(f"alphabet.locale={locale!r}: give a language by its code, such as tr, az, de or pt_BR")


def check_numbers(language: str) -> None:
    """Raise NormaliseError where digits cannot become words of this language; an empty one asks for nothing."""
    if language:
        _speller(language)


def _language(locale: str) -> str:
    return re.split(r"[-_]", locale.lower())[0]
