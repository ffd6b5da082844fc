"""Numbers of transcripts as words: years, ordinals, money, percent, times, fractions, signs.

Number words are those of Unicode's CLDR, by unicode-rbnf. Plain numbers become words in all languages; ordinals, money
and the like in those of _LANGUAGES. One that may be read in several ways stays as it is; `unread_numbers` names it.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

from ds2.system import UserError

_Reader = Callable[[re.Match[str]], str]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ALIASES = {"kz": "kk", "nb": "no"}  # codes of other tools
_DECIMAL_POINT = {"en", "he", "hi", "ja", "ko", "my", "ne", "ta", "th", "yue", "zh"}
# Languages that write an ordinal as 3. before a word, which a number at the end of a sentence looks like.
_DOTTED_ORDINALS = _words("bs cs da de et fi fo hr hu is lb lv nn no pl se sk sl sr tr")
_YEARS = {"en", "de", "nl", "sv", "da", "no"}  # languages that read 1995 as nineteen (hundred) ninety-five
_CONTEXT = 50  # characters before a number that may say how it is read
_FIRST_YEAR, _LAST_YEAR = 1100, 2099
_MAX_DIGITS = 12  # longer runs of digits are telephone or card numbers, which are read digit by digit
_LARGEST = {"zu": 10_999}  # CLDR's rules leave words out of larger numbers
_MAX_GROUPED = 15  # digits of a number with thousands marks; CLDR's rules have names up to here in every language
_SYMBOLS = "$€£¥₺₽₹₩¢№′″%‰°§#&+=±×÷*^<>~@_|\\²³¹½¼¾"  # a number beside one of these is more than its digits
_INSIDE = r".,:/\-–−'’⁄"  # between two digits these make one number, date, time or range


@dataclass(frozen=True)
class _Forms:
    """The words that a language adds to a number with a sign, a unit or a currency."""

    percent: str
    to: str  # between the ends of a range
    plus: str
    degree: tuple[str, str]
    fractions: str  # one half, ... one tenth
    plural: str  # of a fraction
    money: dict[str, str]  # by currency sign: the words for one and for several, then those for its hundredths
    amount: str  # {0}: three dollars, {1}: fifty, {2}: cents


_LANGUAGES = {
    "en": _Forms(
        "percent", "to", "plus", ("degree", "degrees"),
        "half third quarter fifth sixth seventh eighth ninth tenth", "s",
        {"$": "dollar dollars cent cents", "€": "euro euros cent cents", "£": "pound pounds penny pence"},
        "{0} and {1} {2}",
    ),
    "de": _Forms(
        "Prozent", "bis", "plus", ("Grad", "Grad"),
        "halb drittel viertel fünftel sechstel siebtel achtel neuntel zehntel", "",
        {"$": "Dollar Dollar Cent Cent", "€": "Euro Euro Cent Cent", "£": "Pfund Pfund Penny Pence"},
        "{0} {1}",
    ),
    "es": _Forms(
        "por ciento", "a", "más", ("grado", "grados"),
        "medio tercio cuarto quinto sexto séptimo octavo noveno décimo", "s",
        {"$": "dólar dólares centavo centavos", "€": "euro euros céntimo céntimos",
         "£": "libra libras penique peniques"},
        "{0} con {1} {2}",
    ),
    "fr": _Forms(
        "pour cent", "à", "plus", ("degré", "degrés"),
        "demi tiers quart cinquième sixième septième huitième neuvième dixième", "s",
        {"$": "dollar dollars cent cents", "€": "euro euros centime centimes", "£": "livre livres penny pence"},
        "{0} {1}",
    ),
}  # fmt: skip
# Letters after digits that make them another word; where no rule reads it, the digits alone are not the number.
_SUFFIXES = {
    "en": "st|nd|rd|th|s",
    "de": "e[rn]?[ns]?|te[rnms]?",
    "es": "º|ª|o|a|er|h",
    "fr": "ers?|res?|ères?|es?|èmes?|emes?|nds?|ndes?|h",
}
_VULGAR = {"½": (1, 2), "¼": (1, 4), "¾": (3, 4)}
_SCALES = {
    "en": "thousand|million|billion|trillion",
    "de": "Tausend|Millionen|Million|Milliarden|Milliarde",
    "es": "mil|millones|millón",
    "fr": "mille|millions|million|milliards|milliard",
}
_MONTHS = {
    "en": "January|February|March|April|May|June|July|August|September|October|November|December",
    "de": "Januar|Jänner|Februar|März|April|Mai|Juni|Juli|August|September|Oktober|November|Dezember",
}
# German ordinals end as the word before asks for.
_GERMAN_N = _words(
    "am vom zum zur im beim dem den des bis ab seit einem einen einer eines diesem diesen jedem jeden meinem meinen "
    "meiner seinem seinen seiner ihrem ihren ihrer unserem unseren unserer"
)
_GERMAN_E = _words("der die das jeder dieser diese jede dieses jedes eine seine ihre meine unsere")
_GERMAN_R = _words("ein mein dein sein ihr unser kein")
_GERMAN_DATIVE = _words("in an auf aus bei mit nach von zu vor unter über hinter neben zwischen seit ab während")


def spell_numbers(text: str, language: str) -> str:
    """Return the text with numbers as words; a number that may be read in several ways stays as it is.

    Numbers that start with 0 or have more than twelve digits are read digit by digit. Hyphens and commas of number
    words become spaces. `language` is a code such as en, de, tr, pt_PT.

    Raises:
        UserError: unicode-rbnf is not installed or does not know the language.
    """
    if any(character.isnumeric() for character in text):
        for pattern, read in _rules(language):
            text = pattern.sub(_padded(read), text)
    return text


def unread_numbers(text: str, language: str) -> list[str]:
    """Return the parts of a text with digits that `spell_numbers`, whose errors it raises, leaves as they are."""
    return re.findall(r"\S*\d\S*", spell_numbers(text, language))


def number_words(language: str) -> list[str]:
    """Return texts with the words of numbers in a language; empty if unicode-rbnf is missing or does not know it."""
    whole = (*range(101), *range(200, 1000, 100), 1000, 2000, 10**6, 2 * 10**6, 10**9, 2 * 10**9, 1995, -5)
    ordinals = {"en": ["3rd"], "es": ["3º"], "fr": ["3e"], "de": ["am 3."]}.get(re.split("[_-]", language)[0], [])
    forms = ("0.1", "1,2", "50%", "$3.50", "3,50 €", "£3.50", "10:30", "1/2", "20 °C", "5–6")
    try:
        spelled = [spell_numbers(str(number), language) for number in (*whole, *ordinals, *forms)]
    except UserError:
        return []
    return [words for words in spelled if not any(map(str.isdigit, words))]


def check_numbers(language: str) -> None:
    """Raise UserError if numbers cannot become words of this language; an empty one is allowed."""
    if language:
        _engine(language)


def numbers_languages() -> list[str]:
    """Return the language codes whose number words are known; empty if unicode-rbnf is not installed."""
    try:
        from unicode_rbnf import RbnfEngine
    except ImportError:
        return []
    return list(RbnfEngine.get_supported_languages())


def _padded(read: _Reader) -> Callable[[re.Match[str]], str]:
    """Return a replacement for `re.sub`: the words, apart from letters beside them; the match where there are none."""

    def replace(match: re.Match[str]) -> str:
        words = read(match)
        if not words:
            return match[0]
        before, after = _before(match, 1), match.string[match.end() : match.end() + 1]
        return " " * before.isalnum() + words + " " * (after.isalnum() and not match[0].endswith("-"))

    return replace


def _before(match: re.Match[str], characters: int) -> str:
    return match.string[max(0, match.start() - characters) : match.start()]


@cache
def _rules(language: str) -> list[tuple[re.Pattern[str], _Reader]]:
    """Return what is searched in a text, in this order, and how it is read; a reader returns "" if it is not sure."""
    check_numbers(language)
    code, base = language.replace("-", "_"), re.split("[-_]", language)[0].lower()
    marks = "[,\u00a0\u202f'’]" if {code, base} & _DECIMAL_POINT else "[. \u00a0\u202f'’]"
    decimal = "." if {code, base} & _DECIMAL_POINT else ","
    whole = rf"(?:\d{{1,3}}(?:{marks}\d{{3}})+|\d+)"
    number = rf"{whole}(?:{re.escape(decimal)}\d+)?"
    sign = r"(?:(?<![\w)\]])[-−–+])?"
    symbols = re.escape(_SYMBOLS)
    left = rf"(?<!\d)(?<!\d[{_INSIDE}])(?<![{symbols}])(?<![{symbols}][-−–\s])(?<!\d\s[-−–/]\s)"
    right = rf"(?!\d)(?![{_INSIDE}]\d)(?!\s?[{symbols}])(?!\s[-−–/]\s?\d)(?!\s\d+[/⁄]\d)"

    def value(written: str) -> str:
        """Return the words of a number without a sign, "" for one that is not sure."""
        digits, _, fraction = written.partition(decimal)
        plain = re.sub(marks, "", digits)
        sure = (plain == "0" or plain[0] != "0") and len(plain) <= _MAX_GROUPED
        sure = sure and int(plain) <= _LARGEST.get(base, int(plain))
        if fraction:
            return _decimal(plain, fraction, language) if sure else ""
        if plain == digits and (len(plain) > _MAX_DIGITS or (len(plain) > 1 and plain[0] == "0")):
            return " ".join(_spell(digit, language) for digit in plain)
        if base in _YEARS and plain == digits and len(plain) == 4 and _FIRST_YEAR <= int(plain) <= _LAST_YEAR:
            return _spell(plain, language, "spellout-numbering-year")
        return _spell(plain, language) if sure else ""

    def signed(written: str) -> str:
        words = value(written.lstrip("-−–+"))
        if not words or written[0].isdigit():
            return words
        if written[0] != "+":
            return f"{_minus(language)} {words}" if _minus(language) else ""
        return f"{_LANGUAGES[base].plus} {words}" if base in _LANGUAGES else ""

    not_plain = re.compile(  # "5 May" is a date; 3. may be an ordinal or the end of a sentence
        rf"\s+(?:{_MONTHS['en']})\b" if base == "en" else r"\.\s+\w" if base in _DOTTED_ORDINALS else "(?!)",
        re.IGNORECASE,
    )

    number_before, number_after = re.compile(r"(\d+)\s$"), re.compile(r"\s(\d+)")

    def plain_number(match: re.Match[str]) -> str:
        unsure = len(match[1]) <= 3 and not_plain.match(match.string, match.end())
        neighbours = [
            number_before.search(_before(match, _CONTEXT)), number_after.match(match.string, match.end())
        ]  # fmt: skip
        grouped = any(len(match[1]) > 1 or len(n[1]) > 1 for n in neighbours if n)  # 10 000, 555 1234; not 1 2 3
        return "" if unsure or grouped else signed(match[1])

    rules: list[tuple[str, _Reader]] = []
    if base in _LANGUAGES:
        forms = _LANGUAGES[base]

        def with_unit(match: re.Match[str], one: str, many: str) -> str:
            words = signed(match[1])
            return words and f"{words} {one if match[1] == '1' else many}"

        rules += [(left + rule, read) for rule, read in _money(forms, base, language, whole, marks, value)]
        rules += [
            (rf"{left}({sign}{number})\s?%(?!\w)", lambda m: with_unit(m, forms.percent, forms.percent)),
            (
                rf"{left}({sign}{number})\s?°(?:\s?(?:(C)|(F)))?(?!\w)",
                lambda m: (
                    (w := with_unit(m, *forms.degree)) and w + (" Celsius" if m[2] else " Fahrenheit" if m[3] else "")
                ),
            ),
            (rf"(?<!\d\s){left}(\d)[/⁄](10|[2-9]){right}", lambda m: _fraction(int(m[1]), int(m[2]), forms, language)),
            (rf"(?<![\w{symbols}])(?<!\d\s)([½¼¾])", lambda m: _fraction(*_VULGAR[m[1]], forms, language)),
        ]
        rules += [(left + rule + right, read) for rule, read in _EXTRA[base](language)]
        rules.append((rf"{left}({number})\s?([-–])\s?({number}){right}", lambda m: _range(m, forms.to, value)))
    suffix = rf"(?!(?:{_SUFFIXES[base]})(?![^\W\d]))" if base in _SUFFIXES else ""
    rules.append((rf"{left}({sign}{number}){right}{suffix}", plain_number))
    return [(re.compile(pattern, re.IGNORECASE), read) for pattern, read in rules]


def _fraction(numerator: int, denominator: int, forms: _Forms, language: str) -> str:
    if not 0 < numerator < denominator:
        return ""
    part = forms.fractions.split()[denominator - 2]
    if numerator > 1:
        return f"{_spell(str(numerator), language)} {part.removesuffix('s')}{forms.plural}"
    return f"{_spell('1', language, '' if language.startswith('en') else 'spellout-cardinal-masculine')} {part}"


def _range(match: re.Match[str], to: str, value: Callable[[str], str]) -> str:
    """Read 5-6, 10–20 and 2010-2015; with a hyphen, numbers of other lengths may be telephone numbers or scores."""
    first, dash, last = match.groups()
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        return ""
    if "0" in (first[0], last[0]) or (dash == "-" and len(last) > max(2, len(first))) or len(first) > len(last):
        return ""
    if dash == "-" and len(first) == 3:
        return ""
    return f"{value(first)} {to} {value(last)}"


def _money(
    forms: _Forms, base: str, language: str, whole: str, marks: str, value: Callable[[str], str]
) -> Iterator[tuple[str, _Reader]]:
    """Return the patterns of amounts of money, with the symbol before or after the number, and their readers."""

    def read(match: re.Match[str]) -> str:
        words = unsigned(match)
        return words and (f"{_minus(language)} {words}" if match["sign"] else words)

    def unsigned(match: re.Match[str]) -> str:
        symbol, scale = match["symbol"], match["scale"] or ""
        if symbol == "$" and base == "es" and language not in ("es", "es_ES", "es_US", "es_PR", "es_EC", "es_SV"):
            return ""  # pesos in most countries
        one, several, hundredth, hundredths = forms.money[symbol].split()
        if scale:
            words = value(match["number"])
            return words and _amount(f"{words} {scale}", several, base)
        number = re.fullmatch(rf"({whole})(?:[.,](\d\d|[-–—]+))?", match["number"])
        if number is None or (number[1][0] == "0" and number[1] != "0") or len(number[1]) > _MAX_GROUPED:
            return ""
        units, parts = re.sub(marks, "", number[1]), (number[2] or "0").lstrip("0-–—") or "0"
        gender = "feminine" if symbol == "£" and base in ("es", "fr") else "masculine"
        unit, part = one if units == "1" else several, hundredth if parts == "1" else hundredths
        units = _spell(units, language, "" if base == "en" else f"spellout-cardinal-{gender}")
        parts = "" if parts == "0" else _spell(parts, language, "" if base == "en" else "spellout-cardinal-masculine")
        if number[1] == "0" and parts:
            return f"{parts} {part}"
        amount = _amount(units, unit, base)
        return forms.amount.format(amount, parts, part) if parts else amount

    symbols = f"(?:US)?(?P<symbol>[{''.join(forms.money)}])"
    sign = r"(?P<sign>(?<![\w)\]])[-−–])?"
    scale = rf"(?:\s(?P<scale>{_SCALES[base]})\b)?"
    amount = r"(?P<number>\d(?:[\d.,'’\u00a0\u202f]*\d)?(?:,[-–—]+)?)"
    end = rf"(?![\d{re.escape(_SYMBOLS)}])(?![{_INSIDE}]\d)"
    yield rf"{sign}{symbols}\s?{amount}{scale}(?!\w){end}", read
    yield rf"{sign}{amount}{scale}\s?{symbols}(?!\w){end}", read


def _amount(number: str, unit: str, base: str) -> str:
    """Return a number of units; millions take a preposition in Spanish and French."""
    if base in ("es", "fr") and re.search(r"(ill[oó]n(es)?|illi(on|ard)s?)$", number):
        unit = f"d'{unit}" if base == "fr" and unit == "euros" else f"de {unit}"
    return f"{number} {unit}"


def _time(match: re.Match[str], language: str, gender: str, hours: tuple[str, str] = ("", ""), joint: str = " ") -> str:
    """Read an hour, what stands behind one and behind several, a joint, and the minutes if there are any."""
    hour, minute = int(match[1]), int(match[2] or 0)
    if hour > 24:
        return ""
    words = _spell(str(hour), language, f"spellout-cardinal-{gender}") + hours[hour > 1]
    return words + (f"{joint}{_spell(str(minute), language)}" if minute else "")


def _english(language: str) -> Iterator[tuple[str, _Reader]]:
    def ordinal(number: str) -> str:
        return _spell(number, language, "spellout-ordinal-verbose")

    def time(match: re.Match[str]) -> str:
        hour, minute, half = int(match[1]), int(match[2]), match[3] and f" {match[3].strip()}"
        if hour > 24 or (not minute and not half and not 0 < hour < 13):
            return ""
        words = _spell(str(hour), language)
        if minute:
            return f"{words} {'oh ' * (minute < 10)}{_spell(str(minute), language)}{half or ''}"
        return f"{words}{half}" if half else f"{words} o'clock"

    def decade(match: re.Match[str]) -> str:
        words = _spell(match[1], language, "spellout-numbering-year")
        return words[:-1] + "ies" if words.endswith("y") else words + "s"

    yield r"(\d{1,4}|\d{1,3}(?:,\d{3})+)(?:st|nd|rd|th)\b", lambda m: ordinal(m[1].replace(",", ""))
    yield r"\b(?<!:)(\d{1,2}):([0-5]\d)(\s?[ap]\.?m\b)?(?!:)", time
    yield r"(?:\b|['’])((?:1[1-9]|20)?\d0)['’]?s\b", decade
    yield rf"\b({_MONTHS['en']})\s+([1-9]|[12]\d|3[01])\b(?!,\d)", lambda m: f"{m[1]} {ordinal(m[2])}"


def _german(language: str) -> Iterator[tuple[str, _Reader]]:
    before_word = re.compile(r"\s+\w")
    before_month = re.compile(rf"\s+(?:{_MONTHS['de']})\b", re.IGNORECASE)

    def ordinal(match: re.Match[str]) -> str:
        before = [word.strip(',;:.(„"').lower() for word in _before(match, _CONTEXT).split()[-2:]]
        two, one = ["", "", *before][-2:]
        month = before_month.match(match.string, match.end())
        if one in _GERMAN_N or (one == "der" and two in _GERMAN_DATIVE):
            ending = "-n"
        elif not before_word.match(match.string, match.end()):
            return ""  # a number at the end of a sentence
        elif one in _GERMAN_E:
            ending = ""
        elif one in _GERMAN_R or month:
            ending = "-r"
        else:
            return ""
        return _spell(match[1], language, f"spellout-ordinal{ending}")

    time = partial(_time, language=language, gender="masculine", hours=(" Uhr", " Uhr"))
    yield r"\b(\d{1,2})[:.]([0-5]\d)\s?Uhr\b", time
    yield r"\b(\d{1,2}):([0-5]\d)(?!:)", time
    yield r"\b(1)\s?Uhr\b", lambda _: "ein Uhr"
    yield (
        r"(?:\b|['’])((?:1[1-9]|20)?\d0)er([ns]?)\b",
        lambda m: f"{_spell(m[1], language, 'spellout-numbering-year')}er{m[2]}",
    )
    yield r"(\d{1,3})\.", ordinal
    yield r"\b(\d{1,4})-(?-i:(?=[a-zäöüß]))", lambda m: _spell(m[1], language)  # 21-jährig


def _spanish(language: str) -> Iterator[tuple[str, _Reader]]:
    endings = {"º": "masculine", "o": "masculine", "ª": "feminine", "a": "feminine", "er": "masculine-adjective"}
    time = partial(_time, language=language, gender="feminine", joint=" y ")
    yield (r"\b(\d{1,3})\.?(º|ª|o|a|er)(?!\w)", lambda m: _spell(m[1], language, f"spellout-ordinal-{endings[m[2]]}"))
    yield r"\b(\d{1,2}):([0-5]\d)(?!:)(?:\s?h\b)?", time


def _french(language: str) -> Iterator[tuple[str, _Reader]]:
    def ordinal(match: re.Match[str]) -> str:
        number, ending = match.groups()
        if ending in ("nd", "nde", "nds", "ndes"):
            return f"seco{ending}" if number == "2" else ""
        if (ending.rstrip("s") in ("er", "re", "ère")) != (number == "1"):
            return ""
        gender = "feminine" if ending.rstrip("s") in ("re", "ère") else "masculine"
        return _spell(number, language, f"spellout-ordinal-{gender}{'-plural' * ending.endswith('s')}")

    time = partial(_time, language=language, gender="feminine", hours=(" heure", " heures"))
    yield r"\b(\d{1,4})(ers?|res?|ères?|es?|èmes?|emes?|nds?|ndes?)\b", ordinal
    yield r"\b(\d{1,2})(?::|\s?h\s?)([0-5]\d)(?!:)", time
    yield r"\b(\d{1,2})\s?h()\b", time


_EXTRA = {"en": _english, "de": _german, "es": _spanish, "fr": _french}  # ordinals, times, decades, dates


@cache
def _engine(language: str) -> Any:
    """Return CLDR's rules of a language; raises UserError if there are none."""
    try:
        from unicode_rbnf import RbnfEngine
    except ImportError as error:
        raise UserError(f"alphabet.numbers={language} needs unicode-rbnf: pip install unicode-rbnf") from error
    known = numbers_languages()
    code = language.replace("-", "_")
    names = [_ALIASES.get(name, name) for name in (code, code.split("_")[0])]
    name = next((name for name in names if name in known), "")
    if not name:
        raise UserError(
            f"alphabet.numbers={language!r}: number words are known for {', '.join(known)}; for another language write "
            "the numbers of transcripts as words, or leave alphabet.numbers empty and add the digits to "
            "alphabet.symbols"
        )
    return RbnfEngine.for_language(name)


@lru_cache(100_000)
def _spell(number: str, language: str, rules: str = "") -> str:
    """Return the words of a whole number by a rule set of CLDR, by default that of counting; "" if it has none."""
    if not rules and language.startswith("en"):
        rules = "spellout-cardinal-verbose"  # one hundred and one
    formatted = _formatted(number, language, [rules] if rules else None)
    words = re.sub("[\u00ad\u200b]", "", formatted.text if formatted else "").replace("ʼ", "'")
    words = " ".join(re.sub("[-,]", " ", words).split())
    return "" if any(map(str.isdigit, words)) else words


def _formatted(number: str, language: str, rules: list[str] | None = None) -> Any:
    """Return the forms of a number by rule sets of CLDR, by default those of counting; None if none has one."""
    from unicode_rbnf.engine import RbnfError

    with suppress(LookupError, ValueError, ArithmeticError, RbnfError):
        return _engine(language).format_number(number if "." in number else int(number), ruleset_names=rules)
    return None


def _minus(language: str) -> str:
    """Return the word before negative numbers."""
    negative, positive = _spell("-2", language), _spell("2", language)
    return negative.removesuffix(positive).strip() if positive and negative.endswith(positive) else ""


def _decimal(whole: str, fraction: str, language: str) -> str:
    """Return the words of a decimal number, its fraction digit by digit; "" in a language that reads it otherwise."""
    point, space = _point(language)
    parts = [_spell(whole, language), point, *(_spell(digit, language) for digit in fraction)]
    return space.join(parts) if all(parts) else ""


@cache
def _point(language: str) -> tuple[str, str]:
    """Return the word for a decimal point and what stands between words; "" if not all rule sets have one word."""
    formatted = _formatted("1.1", language)
    by_rules: dict[str, str] = formatted.text_by_ruleset if formatted else {}
    words = [text.split() for text in by_rules.values()]
    if {len(text) for text in words} == {3} and len({text[1] for text in words}) == 1:
        return words[0][1], " "
    one = _spell("1", language)
    joined = re.fullmatch(rf"{one}(\w){one}", by_rules.get("spellout-numbering", ""))
    return (joined[1], "") if joined else ("", "")
