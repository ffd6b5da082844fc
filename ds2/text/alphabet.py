"""Alphabets: the symbols that a network writes, normalisation of transcripts, transcripts to labels and back."""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from ds2.config.schema import AlphabetConfig
from ds2.system import UserError
from ds2.system.plain import FieldError, first_of, from_plain, short_repr
from ds2.text.numbers import check_numbers, spell_numbers, unread_numbers
from ds2.text.pronunciations import Pronunciations, read_pronunciations

_DOTTED = ("tr", "az")  # languages with a dotted and a dotless i
_APOSTROPHES = "'’‘ʼ＇`´"
_CODE = re.compile(r"[a-z]{2,3}([-_][A-Za-z0-9]+)*")
BLANK = 0  # the label of CTC's blank
WORD_MARK = "\u2581"  # the first character of a piece that starts a word, as in sentencepiece
_RULES = {"locale": "", "unicode": "NFC", "numbers": "", "punctuation": "keep"}  # of the normaliser, with defaults


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


_SOFT_HYPHEN = "\u00ad"  # where a line may break, within a word


def drop_punctuation(text: str, keep: Collection[str] = "") -> str:
    """Replace all characters but letters, marks and digits by spaces; delete soft hyphens, and apostrophes in words.

    Characters of `keep` stay. If it has the plain apostrophe, typographic ones inside words become plain.
    """
    others = {c for c in set(text) if c != " " and c not in keep and unicodedata.category(c)[0] not in "LMN"}
    if not others:
        return text
    parts = []
    for index, character in enumerate(text):
        if character not in others:
            parts.append(character)
        elif character in _APOSTROPHES and text[index - 1 : index].isalpha() and text[index + 1 : index + 2].isalpha():
            parts.append("'" if "'" in keep else "")
        elif character != _SOFT_HYPHEN:
            parts.append(" ")
    return "".join(parts)


def fold(text: str, locale: str = "") -> str:
    """Return a text in lower case without punctuation but apostrophes in words, for a WER of words only."""
    return " ".join(drop_punctuation(lower(unicodedata.normalize("NFC", text), locale), keep="'").split())


def _language(locale: str) -> str:
    return re.split(r"[-_]", locale.lower())[0]


_CASE: dict[str, Callable[[str, str], str]] = {"lower": lower, "upper": upper, "keep": lambda text, _: text}
_ALLOWED = {"case": _CASE, "unknown": ("stop", "drop"), "unicode": ("NFC", "NFKC"), "punctuation": ("keep", "drop")}


class AlphabetError(UserError):
    """An invalid alphabet, or a transcript with characters outside it; the message names the characters."""


@dataclass(kw_only=True)
class _StoredAlphabet(AlphabetConfig):
    """An alphabet in a file of a model: its settings, of which three are always there, and the pronunciations."""

    case: str = field()
    unknown: str = field()
    replace: dict[str, str] = field()
    symbols: str = ""
    pronunciations: str = ""  # packed


class _Table(dict[int, str]):
    """A table for `str.translate` that raises an error for missing characters."""

    def __missing__(self, key: int) -> str:
        raise ValueError(f"{key} is not in the table")


@dataclass(frozen=True)
class Alphabet:
    """The labels of a network: label 0 is the CTC blank, label i writes symbols[i]; V = len(alphabet).

    Symbols are characters, or the pieces of a byte-pair encoding in merge order (Sennrich et al. 2016, "Neural machine
    translation of rare words with subword units"), in which words start with WORD_MARK. With `pronunciations` they are
    phones: a word becomes the labels of its first pronunciation, and nothing stands between words.
    """

    symbols: tuple[str, ...]  # symbols[0] is "", the blank
    case: str = "lower"
    replace: tuple[tuple[str, str], ...] = ()
    unknown: str = "stop"
    locale: str = ""
    unicode: str = "NFC"
    numbers: str = ""
    punctuation: str = "keep"
    pronunciations: Pronunciations | None = field(default=None, repr=False)
    _labels: dict[str, int] = field(init=False, repr=False, compare=False)
    _characters: frozenset[str] = field(init=False, repr=False, compare=False)
    _spelled: dict[str, list[int]] = field(init=False, repr=False, compare=False)  # cache: the pieces of each word
    _replacement: re.Pattern[str] | None = field(init=False, repr=False, compare=False)
    _written: _Table = field(init=False, repr=False, compare=False)  # label as a character -> symbol
    # Of each label, whether it begins a word or separates two: white space, a piece with the word mark, or any phone.
    starts_word: list[bool] = field(init=False, repr=False, compare=False)
    # Whether it is a part of a word: neither the blank nor white space nor a word mark alone.
    writes: list[bool] = field(init=False, repr=False, compare=False)
    _read: _Table = field(init=False, repr=False, compare=False)  # symbol of one character -> label as a character

    def __post_init__(self) -> None:
        for name, allowed in _ALLOWED.items():
            if getattr(self, name) not in allowed:
                raise AlphabetError(f"alphabet.{name}={getattr(self, name)!r} must be {' or '.join(allowed)}")
        check_numbers(self.numbers)
        if self.locale and not _CODE.fullmatch(self.locale):
            raise AlphabetError(f"alphabet.locale={self.locale!r}: use a language code such as tr, az, de or pt_BR")
        if any("\ud800" <= character <= "\udfff" for character in "".join(self.symbols)):
            raise AlphabetError("symbols hold half of a surrogate pair, which is not a character")
        labels = {symbol: label for label, symbol in enumerate(self.symbols)}
        if len(labels) < len(self.symbols) or self.symbols[:1] != ("",):
            raise AlphabetError(f"symbols {short_repr(self.symbols)} must be the blank '' and then distinct symbols")
        written = self.pronunciations.words if self.pronunciations is not None else self.symbols
        joined = "\n".join(written)  # one check of all words: a line break changes neither case nor composition
        unreachable = []
        if self._composed(self._cased(joined)) != joined:
            unreachable = [text for text in written if self._composed(self._cased(text)) != text]
        if unreachable:
            name, hint = ("symbols", "") if self.pronunciations is None else ("lexicon", ", as `ds2 data lexicon` does")
            raise AlphabetError(
                f"alphabet.{name} has {unreachable[:5]}, which no transcript has after alphabet.case={self.case} and "
                f"Unicode composition ({self.unicode}): write them in that form{hint}"
            )
        if any(not key for key, _ in self.replace):
            raise AlphabetError("alphabet.replace has an empty key")
        keys = sorted((self._composed(key) for key, _ in self.replace), key=len, reverse=True)
        characters = set("".join(written))
        if self.pronunciations is not None:
            characters.add(" ")
        if self.has_pieces:
            characters = characters - {WORD_MARK} | {" "}
        phones = self.pronunciations is not None
        vars(self).update(  # as fields are frozen
            _labels=labels,
            _characters=frozenset(characters),
            _spelled={},
            _replacement=re.compile("|".join(map(re.escape, keys))) if keys else None,
            _written=_Table(enumerate(self.symbols)),
            starts_word=[symbol.isspace() or symbol.startswith(WORD_MARK) or phones for symbol in self.symbols],
            writes=[bool(symbol.strip().removeprefix(WORD_MARK)) for symbol in self.symbols],
            _read=_Table((ord(s), chr(n)) for s, n in labels.items() if len(s) == 1),
        )

    @classmethod
    def from_config(cls, config: AlphabetConfig) -> Self:
        """Build the alphabet of a config; raises AlphabetError if it is invalid."""
        missing = sorted({WORD_MARK, *config.symbols} - {" "} - set(config.pieces)) if config.pieces else []
        if missing:
            raise AlphabetError(
                f"alphabet.pieces lacks {missing}: it needs the word mark and each character of alphabet.symbols to "
                "spell every word. `ds2 data pieces` adds them"
            )
        return cls._of(config, read_pronunciations(Path(config.lexicon)) if config.lexicon else None)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """Build the alphabet that `to_dict` returned; raises AlphabetError for invalid values."""
        try:
            fields = from_plain(_StoredAlphabet, stored, "alphabet")
        except FieldError as error:
            raise AlphabetError(str(error)) from error
        return cls._of(fields, Pronunciations.unpacked(fields.pronunciations) if fields.pronunciations else None)

    @classmethod
    def _of(cls, config: AlphabetConfig, pronunciations: Pronunciations | None) -> Self:
        phones = () if pronunciations is None else pronunciations.phones
        symbols = ("", *(phones or config.pieces or config.symbols))
        rules: dict[str, Any] = {key: getattr(config, key) for key in _RULES} | {"pronunciations": pronunciations}
        return cls(symbols, config.case, tuple(sorted(config.replace.items())), config.unknown, **rules)

    def to_dict(self) -> dict[str, Any]:
        """Return the alphabet as plain containers for checkpoints, without the blank.

        Characters are a string, `symbols`; pieces are a list, `pieces`; phones follow from `pronunciations`.
        """
        symbols: dict[str, Any] = {"symbols": "".join(self.symbols)}
        if self.pronunciations is not None:
            symbols = {"pronunciations": self.pronunciations.packed()}
        elif self.has_pieces:
            symbols = {"pieces": list(self.symbols[1:])}
        return {**symbols, "case": self.case, "replace": dict(self.replace), "unknown": self.unknown, **self.rules()}

    def rules(self) -> dict[str, str]:
        """Return the settings of the normaliser that differ from their defaults."""
        return {key: getattr(self, key) for key, default in _RULES.items() if getattr(self, key) != default}

    def __len__(self) -> int:
        return len(self.symbols)

    @property
    def has_pieces(self) -> bool:
        """Whether the symbols are pieces of words."""
        return any(symbol.startswith(WORD_MARK) for symbol in self.symbols)

    @property
    def unit(self) -> str:
        """What a label writes, by the names of `ds2.lm.ngram.UNITS`: a piece or a character."""
        return "piece" if self.has_pieces else "character"

    @property
    def as_printed(self) -> bool:
        """Whether the network writes upper and lower case, or punctuation other than the apostrophe."""
        if self.pronunciations is not None:
            return False
        cased = self.case == "keep" and any(c != c.lower() for c in self._characters)
        marks = self._characters - {"'", " ", WORD_MARK}
        return cased or any(unicodedata.category(c)[0] in "PS" for c in marks)

    def normalise(self, text: str) -> tuple[str, Counter[str]]:
        """Return the normalised transcript and the count of each character outside the alphabet.

        The steps are Unicode composition, replacements in one pass (longest key first), numbers to words, punctuation
        to spaces, case, and white space to single spaces, without any at the ends. Unknown characters and digits
        without a sure reading stay in the text, so that they count as errors of a hypothesis.
        """
        text = self._replaced(text)
        if self.numbers:
            text = spell_numbers(text, self.numbers)
        if self.punctuation == "drop":
            text = drop_punctuation(text, self._characters)
        text = " ".join(self._composed(self._cased(text)).split())
        unknown = set(text) - self._characters
        return text, Counter(character for character in text if character in unknown) if unknown else Counter()

    def unpronounced(self, texts: Iterable[str]) -> str:
        """Return the words of transcripts that lack a pronunciation, for a message; '' if none do or none needs one."""
        if self.pronunciations is None:
            return ""
        words = (word for text in texts for word in self.normalise(text)[0].split())
        missing = Counter(word for word in words if word not in self.pronunciations.words)
        return ", ".join(first_of([f"{word} x {n}" if n > 1 else word for word, n in missing.most_common()], 20))

    def unread_numbers(self, text: str) -> list[str]:
        """Return the parts of a transcript whose digits `numbers` has no words for and the alphabet does not write."""
        if not self.numbers:
            return []
        parts = unread_numbers(self._replaced(text), self.numbers)
        return [part for part in parts if any(c.isdigit() and c not in self._characters for c in part)]

    def _replaced(self, text: str) -> str:
        text = self._composed(text)
        if self._replacement is None:
            return text
        table = {self._composed(key): value for key, value in self.replace}
        return self._replacement.sub(lambda match: table[match.group()], text)

    def _cased(self, text: str) -> str:
        return _CASE[self.case](text, self.locale)

    def _composed(self, text: str) -> str:
        return unicodedata.normalize("NFKC" if self.unicode == "NFKC" else "NFC", text)

    def encode(self, text: str) -> list[int]:
        """Return the labels of a transcript, which is normalised first; unknown characters are dropped or refused.

        Raises:
            AlphabetError: the text has unknown characters and `unknown` is "stop".
        """
        return self.spell(self.written(text))

    def written(self, text: str) -> str:
        """Return a transcript as the network can write it, without what it has no labels for; raises as `encode`."""
        transcript = text
        text, unknown = self.normalise(text)
        if unknown:
            if self.unknown == "stop":
                if unread := self.unread_numbers(transcript):
                    raise AlphabetError(unread_message(unread, self.numbers))
                raise AlphabetError(
                    f"characters outside the alphabet: {describe(unknown)}; add them to alphabet.symbols, replace "
                    "them with alphabet.replace, or drop them with alphabet.unknown=drop"
                )
            text = " ".join("".join(c for c in text if c not in unknown).split())
        if self.pronunciations is not None:
            words = self.pronunciations.words
            missing = Counter(word for word in text.split() if word not in words)
            if missing and self.unknown == "stop":
                raise AlphabetError(
                    f"words without a pronunciation: {', '.join(list(missing)[:20])}; add them with "
                    "`ds2 data lexicon`, or leave them out with alphabet.unknown=drop"
                )
            text = " ".join(word for word in text.split() if word not in missing)
        return text

    def normalises_as(self, other: "Alphabet") -> bool:
        """Whether texts of this alphabet are normalised for the other one: everything but the labels is equal."""
        return self._characters == other._characters and replace(self, symbols=other.symbols) == other

    def spell(self, text: str) -> list[int]:
        """Return the labels of a normalised text without unknown characters or words."""
        if self.pronunciations is not None:
            variants = (self.pronunciations.words[word] for word in text.split())
            return [self._labels[phone] for usual, *_ in variants for phone in usual]
        if not self.has_pieces:
            try:
                return list(text.translate(self._read).encode("latin-1"))  # three times as fast as the line below
            except ValueError:  # unknown characters, or labels past 255
                return [self._labels[character] for character in text]
        return [label for word in text.split() for label in self._pieces(word)]

    def _pieces(self, word: str) -> list[int]:
        """Return the labels of a word: neighbours are merged in merge order, from the left."""
        if word not in self._spelled:
            self._spelled[word] = [self._labels[part] for part in self._merged([WORD_MARK, *word])]
        return self._spelled[word]

    def _merged(self, parts: list[str]) -> list[str]:
        """Merge neighbours that form a piece, by a heap of pairs and a linked list: O(n log n)."""
        before, after = list(range(-1, len(parts) - 1)), list(range(1, len(parts) + 1))
        pairs: list[tuple[int, int, str]] = []

        def offer(at: int) -> None:
            if at >= 0 and after[at] < len(parts):
                both = parts[at] + parts[after[at]]
                if both in self._labels:
                    heappush(pairs, (self._labels[both], at, both))

        for at in range(len(parts)):
            offer(at)
        while pairs:
            _, at, both = heappop(pairs)
            right = after[at]
            if right < len(parts) and parts[at] and parts[at] + parts[right] == both:  # neither was merged since
                parts[at], parts[right], after[at] = both, "", after[right]
                if after[at] < len(parts):
                    before[after[at]] = at
                offer(before[at])
                offer(at)
        return [part for part in parts if part]

    def decode(self, labels: Iterable[int]) -> str:
        """Return the text of labels; blanks write nothing, repeated labels are kept (the decoder collapses them).

        Phones are separated by spaces.
        """
        if self.pronunciations is not None:
            return " ".join(symbol for symbol in map(self.symbols.__getitem__, labels) if symbol)
        if isinstance(labels, tuple):  # five times as fast as the line below
            with suppress(ValueError):  # labels past 255
                return bytes(labels).decode("latin-1").translate(self._written)
        return "".join(map(self.symbols.__getitem__, labels))


def unread_message(parts: Sequence[str], language: str) -> str:
    """Return what to do about numbers that have no sure reading."""
    shown = ", ".join(first_of([*map(repr, parts)], 10))
    return (
        f"alphabet.numbers={language} has no sure reading of {shown}: write it in the transcript as it is spoken, or "
        "give words for a sign with alphabet.replace"
    )


def describe(characters: Mapping[str, int]) -> str:
    """Return counted characters for a message, most frequent first, with code points to tell similar ones apart."""
    ordered = sorted(characters.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{c!r} U+{ord(c):04X}" + (f" x {count}" if count > 1 else "") for c, count in ordered)


def fewest_frames(labels: Sequence[int]) -> int:
    """Return the least frames for these labels: one each and a blank between equal neighbours (Graves et al. 2006)."""
    return len(labels) + sum(a == b for a, b in pairwise(labels))
