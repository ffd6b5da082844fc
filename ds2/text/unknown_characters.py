"""Characters that an alphabet cannot write: the table of them, and the settings that would make room."""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping

from ds2.text.alphabet import Alphabet
from ds2.text.normalise import number_words

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


def count_unknown(texts: Iterable[str], alphabet: Alphabet) -> Counter[str]:
    """Count the characters of transcripts that the alphabet cannot write, after its normaliser."""
    return sum((alphabet.normalise(text)[1] for text in texts), Counter())


def propose_alphabet(unfit: Mapping[str, int], alphabet: Alphabet) -> str:
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
    rules = alphabet.rules()
    own = set() if alphabet.has_pieces else set(alphabet.symbols[1:])
    turkish = alphabet.locale == "" and bool(_DOTTED_I & unfit.keys())
    if turkish:
        rules["locale"] = "tr"
    letters = {character for character in unfit if _kind(character) in "LM"}
    digits = {character for character in unfit if _kind(character) == "N"}
    language = ""
    if digits and not alphabet.numbers:
        language = rules.get("locale", "") or _language(letters | own)
    if language == _CHINESE or any(unicodedata.category(digit) != "Nd" for digit in digits):
        rules["unicode"] = "NFKC"  # full-width and raised digits are the others
    if any(_kind(c) in "PSZC" for text in unfit for c in _composed(text, rules)):
        rules["punctuation"] = "drop"
    form = Alphabet(
        ("",), alphabet.case, locale=rules.get("locale", ""), unicode=rules.get("unicode", "NFC"), punctuation="drop"
    )

    def written(characters: Iterable[str]) -> set[str]:
        return {c for text in characters for c in form.normalise(text)[0] or _composed(text, rules)}

    found = written(letters | digits)
    symbols = written(own) | {c for c in found if _kind(c) in "LM"} | {" "}
    if turkish:
        symbols.discard("\u0307")
    if language == _CHINESE:
        symbols |= found
    elif language:
        symbols |= written(number_words(language))
    lines = settings(symbols, alphabet, rules)
    if alphabet.has_pieces:
        lines.insert(0, "# with other symbols the pieces have to be learnt anew: `ds2 data pieces`")
    if language not in ("", _CHINESE):
        lines.append(f"numbers: {language}  # digits to words: your language; needs the package num2words")
    return "\n".join(["alphabet:", *(f"  {line}" for line in lines)])


def _kind(character: str) -> str:
    """The first letter of a character's Unicode category: L(etter), M(ark), N(umber), P, S, Z, C."""
    return unicodedata.category(character)[0]


def _composed(text: str, rules: Mapping[str, str]) -> str:
    return unicodedata.normalize("NFKC" if rules.get("unicode") == "NFKC" else "NFC", text)


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
