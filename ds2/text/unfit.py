"""Characters that an alphabet cannot write: the table of them, and the settings that would make room."""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping

from ds2.text.alphabet import Alphabet

_ROWS = 40
_DOTTED_I = {"ı", "İ", "\u0307"}
# The first word of a letter's Unicode name, and the language whose number words are proposed where one is found.
_SCRIPTS = {
    "HIRAGANA": "ja",
    "KATAKANA": "ja",
    "HANGUL": "ko",
    "HEBREW": "he",
    "ARABIC": "ar",
    "THAI": "th",
    "CYRILLIC": "ru",
}
_CHINESE = "CJK"  # without kana: num2words knows no Chinese


def count_unfit(texts: Iterable[str], alphabet: Alphabet) -> Counter[str]:
    """Count the characters of transcripts that the alphabet cannot write, after its normaliser."""
    return sum((alphabet.normalise(text)[1] for text in texts), Counter())


def help_text(unfit: Mapping[str, int], alphabet: Alphabet) -> str:
    """Return a table of characters that do not fit, with their counts, and an `alphabet:` block in which they would.

    Letters and marks join the symbols, digits become words, all else is dropped: a proposal, to be read before it is
    taken. An empty mapping gives an empty text.
    """
    if not unfit:
        return ""
    ordered = sorted(unfit.items(), key=lambda item: (-item[1], item[0]))
    lines = [f"{len(ordered)} characters do not fit the alphabet:", "   count  character"]
    for character, count in ordered[:_ROWS]:
        name = unicodedata.name(character, "without a name")
        lines.append(f"{count:8d}  {character if character.isprintable() else ' '}  U+{ord(character):04X} {name}")
    if len(ordered) > _ROWS:
        lines.append(f"     ...  and {len(ordered) - _ROWS} more")
    lines += ["An alphabet in which they fit, for your recipe or as alphabet.KEY=VALUE:", "", block(unfit, alphabet)]
    if alphabet.locale == "" and _DOTTED_I & unfit.keys():
        lines += [
            "",
            "Turkish and Azerbaijani have two letters, dotted i/İ and dotless ı/I: alphabet.locale=tr lowers I to ı "
            "and İ to i. Without it İ becomes i with a combining dot (U+0307), and I the wrong letter.",
        ]
    return "\n".join(lines)


def block(unfit: Mapping[str, int], alphabet: Alphabet) -> str:
    """Return a YAML block of the alphabet's settings, changed so that it can write the characters given."""
    kinds = {character: unicodedata.category(character)[0] for character in unfit}
    letters = {character for character, kind in kinds.items() if kind in "LM"}
    rules = alphabet.rules()
    if alphabet.locale == "" and _DOTTED_I & unfit.keys():
        letters.discard("\u0307")
        rules["locale"] = "tr"
    if any(kind in "PSZC" for kind in kinds.values()):
        rules["punctuation"] = "drop"
    own = set() if alphabet.has_pieces else set(alphabet.symbols[1:])
    numbers = ""
    if "N" in kinds.values() and not alphabet.numbers:
        numbers = rules.get("locale", "") or _language(letters | own)
    if numbers == _CHINESE:
        own |= {unicodedata.normalize("NFKC", character) for character, kind in kinds.items() if kind == "N"}
        rules["unicode"] = "NFKC"  # full-width digits are the others
        numbers = ""
    lines = settings({*own, *letters, " "}, alphabet, rules)
    if alphabet.has_pieces:
        lines.insert(0, "# with other symbols the pieces have to be learnt anew: `ds2 data pieces`")
    if numbers:
        lines.append(f"numbers: {numbers}  # digits to words: your language; needs the package num2words")
    return "\n".join(["alphabet:", *(f"  {line}" for line in lines)])


def _language(letters: Iterable[str]) -> str:
    """The language that the script of letters suggests for the words of numbers, "CJK" for Chinese, else English."""
    scripts = {unicodedata.name(letter, "").split(" ")[0] for letter in letters}
    return next((language for script, language in _SCRIPTS.items() if script in scripts), "") or (
        _CHINESE if _CHINESE in scripts else "en"
    )


def settings(symbols: Iterable[str], alphabet: Alphabet, rules: Mapping[str, str]) -> list[str]:
    """Return YAML lines of an alphabet: these symbols in order, case and replacements of another one, these rules."""
    lines = [f"symbols: {_quoted(''.join(sorted(symbols)))}", f"case: {alphabet.case}"]
    lines += [f"{key}: {value}" for key, value in rules.items()]
    if alphabet.replace:
        lines.append("replace:")
        lines += [f"  {_quoted(key)}: {_quoted(value)}" for key, value in alphabet.replace]
    return lines


def _quoted(text: str) -> str:
    """A YAML string in double quotes, which is what JSON writes."""
    return json.dumps(text, ensure_ascii=False)
