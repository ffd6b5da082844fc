"""Normalisation of transcripts: punctuation, upper and lower case."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection

from ds2.system.errors import UserError

_DOTTED = ("tr", "az")  # languages with a dotted and a dotless i
_APOSTROPHES = "'’‘ʼ＇`´"
_CODE = re.compile(r"[a-z]{2,3}([-_][A-Za-z0-9]+)*")


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


def check_locale(locale: str) -> None:
    """Raise NormaliseError if a locale is not a language code; an empty one is allowed."""
    if locale and not _CODE.fullmatch(locale):
        raise NormaliseError(f"alphabet.locale={locale!r}: use a language code such as tr, az, de or pt_BR")


def _language(locale: str) -> str:
    return re.split(r"[-_]", locale.lower())[0]
