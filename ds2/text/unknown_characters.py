"""Characters outside an alphabet: a table of them, and a proposal for an alphabet that has them."""

import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping

from ds2.system.plain import counted
from ds2.text.alphabet import Alphabet
from ds2.text.numbers import number_words, numbers_languages

_ROWS = 40
_DOTTED_I = {"ı", "İ", "\u0307"}
# The first word of a letter's Unicode name, and the language whose number words are proposed for it.
_SCRIPTS = {"HIRAGANA": "ja", "KATAKANA": "ja", "HANGUL": "ko", "HEBREW": "he", "ARABIC": "ar", "THAI": "th",
            "CYRILLIC": "ru"}  # fmt: skip
_CHINESE = "CJK"  # letters without kana: Chinese reads 2 in two ways, so digits stay symbols
_SAMPLE = 20_000  # characters of the texts whose language is guessed
_MIN_LETTERS = 40  # below, a guess is worth nothing


def count_unknown(texts: Iterable[str], alphabet: Alphabet) -> Counter[str]:
    """Count the characters of normalised transcripts that are not in the alphabet."""
    counts = Counter[str]()
    for text in texts:
        counts += alphabet.normalise(text)[1]
    return counts


def propose_alphabet(unknown: Mapping[str, int], alphabet: Alphabet, texts: Iterable[str] = ()) -> str:
    """Return a table of the unknown characters and an `alphabet:` block for them, as text; empty if there are none.

    In the proposal letters and marks are symbols, digits become words of the language that `texts`, the transcripts,
    seem to have, and all other characters are dropped. Read it before you use it.
    """
    if not unknown:
        return ""
    ordered = sorted(unknown.items(), key=lambda item: (-item[1], item[0]))
    lines = [f"{counted(len(ordered), 'character')} outside the alphabet:", "   count  character"]
    for character, count in ordered[:_ROWS]:
        name = unicodedata.name(character, "without a name")
        lines.append(f"{count:8d}  {character if character.isprintable() else ' '}  U+{ord(character):04X} {name}")
    if len(ordered) > _ROWS:
        lines.append(f"     ...  and {len(ordered) - _ROWS} more")
    lines += [
        "A proposal for an alphabet with them, for your recipe or as alphabet.KEY=VALUE:",
        "",
        _alphabet_block(unknown, alphabet, texts),
    ]
    if alphabet.locale == "" and _DOTTED_I & unknown.keys():
        lines += [
            "",
            "Turkish and Azerbaijani have two letters, dotted i/İ and dotless ı/I: alphabet.locale=tr lowers I to ı "
            "and İ to i. Without it İ becomes i with a combining dot (U+0307), and I the wrong letter.",
        ]
    return "\n".join(lines)


def _alphabet_block(unknown: Mapping[str, int], alphabet: Alphabet, texts: Iterable[str]) -> str:
    rules = alphabet.rules()
    own = set() if alphabet.has_pieces else set(alphabet.symbols[1:])
    turkish = alphabet.locale == "" and bool(_DOTTED_I & unknown.keys())
    if turkish:
        rules["locale"] = "tr"
    letters = {character for character in unknown if _kind(character) in "LM"}
    digits = {character for character in unknown if _kind(character) == "N"}
    language = ""
    if digits and not alphabet.numbers:
        language = rules.get("locale", "") or _language(letters | own, texts)
    if language == _CHINESE or any(unicodedata.category(digit) != "Nd" for digit in digits):
        rules["unicode"] = "NFKC"  # full-width and superscript digits
    if any(_kind(c) in "PSZC" for text in unknown for c in _composed(text, rules)):
        rules["punctuation"] = "drop"
    form = Alphabet(
        ("",), alphabet.case, locale=rules.get("locale", ""), unicode=rules.get("unicode", "NFC"), punctuation="drop"
    )

    def normalised(characters: Iterable[str]) -> set[str]:
        return {c for text in characters for c in form.normalise(text)[0] or _composed(text, rules)}

    new = normalised(letters | digits)
    symbols = normalised(own) | {c for c in new if _kind(c) in "LM"} | {" "}
    if turkish:
        symbols.discard("\u0307")
    if language == _CHINESE:
        symbols |= new
    elif language:
        symbols |= normalised(number_words(language))
    lines = alphabet_lines(symbols, alphabet, rules)
    if alphabet.has_pieces:
        lines.insert(0, "# new symbols need new pieces: `ds2 data pieces`")
    if language not in ("", _CHINESE):
        lines.append(f"numbers: {language}  # digits to words: write your language; needs the extra text")
    return "\n".join(["alphabet:", *(f"  {line}" for line in lines)])


def _kind(character: str) -> str:
    """Return the first letter of a character's Unicode category: L(etter), M(ark), N(umber), P, S, Z, C."""
    return unicodedata.category(character)[0]


def _composed(text: str, rules: Mapping[str, str]) -> str:
    return unicodedata.normalize("NFKC" if rules.get("unicode") == "NFKC" else "NFC", text)


def _language(letters: Iterable[str], texts: Iterable[str]) -> str:
    """Return the language of number words by the script of letters or by the texts, "CJK" for Chinese."""
    scripts = {unicodedata.name(letter, "").split(" ")[0] for letter in letters}
    if _CHINESE in scripts and not scripts & {"HIRAGANA", "KATAKANA", "HANGUL"}:
        return _CHINESE
    language = text_language(texts)
    return language or next((language for script, language in _SCRIPTS.items() if script in scripts), "en")


def text_language(texts: Iterable[str]) -> str:
    """Return the code of the language that texts seem to have; empty if they are short or the extra `text` is missing.

    Only languages are returned whose numbers have words.
    """
    sample = ""
    for text in texts:
        sample += text + "\n"
        if len(sample) > _SAMPLE:
            break
    if sum(map(str.isalpha, sample)) < _MIN_LETTERS:
        return ""
    try:
        import py3langid
    except ImportError:
        return ""
    language = str(py3langid.classify(sample)[0])
    return language if language in numbers_languages() else ""


def alphabet_lines(symbols: Iterable[str], alphabet: Alphabet, rules: Mapping[str, str]) -> list[str]:
    """Return the YAML lines of an alphabet with these symbols and rules, and with case and replacements of another."""
    lines = [f"symbols: {_quoted(''.join(sorted(symbols)))}", f"case: {alphabet.case}"]
    lines += [f"{key}: {value}" for key, value in rules.items()]
    if alphabet.replace:
        lines.append("replace:")
        lines += [f"  {_quoted(key)}: {_quoted(value)}" for key, value in alphabet.replace]
    return lines


def _quoted(text: str) -> str:
    """Return a YAML string in double quotes, which has the form of JSON."""
    return json.dumps(text, ensure_ascii=False)
