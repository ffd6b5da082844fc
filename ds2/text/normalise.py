"""Normalisation of transcripts: digits to words, punctuation, upper and lower case."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import cache
from typing import Any

from ds2.system.errors import UserError

_DOTTED = ("tr", "az")  # languages with a dotted and a dotless i
_APOSTROPHES = "'’‘ʼ＇`´"
_DECIMAL_POINT = ("en", "he", "ja", "ko", "th", "zh")  # 1,234.5; the others write 1.234,5
_DIGITS = re.compile(r"\d+(?:[.,\u00a0\u202f]\d+)*")
_ENDLESS = ("am",)  # languages in which num2words 0.5 does not return for numbers above a thousand
_CODE = re.compile(r"[a-z]{2,3}([-_][A-Za-z0-9]+)*")
_MOST_DIGITS = 12  # longer runs of digits are telephone or card numbers
_ENGLISH_ORDINAL = re.compile(r"\b(\d{1,4})(?:st|nd|rd|th)\b", re.IGNORECASE)


class NormaliseError(UserError):
    """An invalid setting of the normaliser; the message names the setting and what to do."""


def lower(text: str, locale: str = "") -> str:
    """Return a text in lower case; in Turkish and Azerbaijani I gives ı and İ gives i.

    Without the locale, Unicode turns İ into i with a combining dot, and I into i, which is another letter in Turkish.
    """
    if _language(locale) in _DOTTED:
        text = text.replace("İ", "i").replace("I\u0307", "i").replace("I", "ı")
    return text.lower()


def upper(text: str, locale: str = "") -> str:
    """Return a text in upper case; in Turkish and Azerbaijani i gives İ."""
    if _language(locale) in _DOTTED:
        text = text.replace("i", "İ")
    return text.upper()


def drop_punctuation(text: str, keep: Collection[str] = "") -> str:
    """Replace all characters but letters, marks and digits by spaces; delete apostrophes inside words.

    Args:
        text: any text.
        keep: characters to keep. If it has the plain apostrophe, typographic ones inside words become plain.
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
    """Return a text in lower case without punctuation but apostrophes in words, for a WER of words only."""
    return " ".join(drop_punctuation(lower(unicodedata.normalize("NFC", text), locale), keep="'").split())


def spell_numbers(text: str, language: str) -> str:
    """Replace numbers by words: 1,234.5 and 21st in English, 1.234,5 in most other languages.

    Numbers that start with 0 or have more than twelve digits are read digit by digit. Hyphens and commas of the words
    become spaces.

    Args:
        text: any text.
        language: a language code of num2words: en, de, tr, pt_BR.

    Raises:
        NormaliseError: num2words is not installed, does not know the language, or cannot convert a number.
    """
    if not any(character.isdigit() for character in text):
        return text
    spelled = _speller(language)
    if _language(language) == "en":
        text = _ENGLISH_ORDINAL.sub(lambda match: f" {spelled(int(match[1]), to='ordinal')} ", text)
    return _DIGITS.sub(lambda match: f" {_number(match[0], language, spelled)} ", text)


def number_words(language: str) -> list[str]:
    """Return the words of numbers in a language; empty if num2words is missing or does not know the language."""
    words = []
    whole = (*range(101), *range(200, 1000, 100), 1000, 2000, 10**6, 2 * 10**6, 10**9, 2 * 10**9)
    for number in (*whole, 0.1, 1.2, 2.25, 3.001):
        with suppress(NormaliseError):
            words.append(_speller(language)(number))
    return words


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
        raise NormaliseError(f"alphabet.numbers={language} needs num2words: pip install num2words") from error
    known = sorted(set(num2words.CONVERTER_CLASSES) - set(_ENDLESS))
    if language not in known and _language(language) not in known:
        raise NormaliseError(
            f"alphabet.numbers={language!r}: num2words knows {', '.join(known)}; for another language write the "
            "numbers of transcripts as words, or leave alphabet.numbers empty and add the digits to alphabet.symbols"
        )

    def spelled(number: int | float, **how: Any) -> str:
        try:
            words = num2words.num2words(number, lang=language, **how)
        except Exception as error:  # each language raises its own errors
            raise NormaliseError(
                f"alphabet.numbers={language}: num2words cannot convert {number} ({error or type(error).__name__}): "
                "write it as words in the transcript"
            ) from error
        return " ".join(re.sub(r"[-,]", " ", words).split())

    return spelled


def check_locale(locale: str) -> None:
    """Raise NormaliseError if a locale is not a language code; an empty one is allowed."""
    if locale and not _CODE.fullmatch(locale):
        raise NormaliseError(f"alphabet.locale={locale!r}: use a language code such as tr, az, de or pt_BR")


def check_numbers(language: str) -> None:
    """Raise NormaliseError if numbers cannot become words of this language; an empty one is allowed."""
    if language:
        _speller(language)


def _language(locale: str) -> str:
    return re.split(r"[-_]", locale.lower())[0]
