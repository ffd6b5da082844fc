"""Transcripts to labels and back: the symbols a network writes, and what becomes of characters it does not know."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any

from ds2.config.schema import AlphabetConfig
from ds2.system.errors import UserError
from ds2.system.plain import FieldError, from_plain
from ds2.text.normalise import check_locale, check_numbers, drop_punctuation, lower, spell_numbers, upper

BLANK = 0  # the label of CTC's blank
WORD_MARK = "\u2581"  # starts a piece that starts a word, as sentencepiece writes them
_CASE: dict[str, Callable[[str, str], str]] = {"lower": lower, "upper": upper, "keep": lambda text, _: text}
_RULES = {"locale": "", "unicode": "NFC", "numbers": "", "punctuation": "keep"}  # keys of a normaliser, as they begin


class AlphabetError(UserError):
    """A transcript that the alphabet cannot write, or an alphabet that cannot work; the message names characters."""


@dataclass(frozen=True)
class _Stored:
    """An alphabet in a file."""

    case: str
    unknown: str
    replace: dict[str, str]
    symbols: str = ""
    pieces: list[str] = field(default_factory=list)
    locale: str = _RULES["locale"]
    unicode: str = _RULES["unicode"]
    numbers: str = _RULES["numbers"]
    punctuation: str = _RULES["punctuation"]


class _Table(dict[int, str]):
    """What `str.translate` puts for each character; it leaves none as it is."""

    def __missing__(self, key: int) -> str:
        raise ValueError(f"{key} stands for nothing")


@dataclass(frozen=True)
class Alphabet:
    """The labels of a network: label 0 is the CTC blank, label i writes symbols[i]; V = len(alphabet).

    Symbols are characters, or the pieces of a byte-pair encoding in the order in which they were merged (Sennrich et
    al. 2016, "Neural machine translation of rare words with subword units"); words of those start with WORD_MARK.
    """

    symbols: tuple[str, ...]  # symbols[0] is "", the blank
    case: str = "lower"
    replace: tuple[tuple[str, str], ...] = ()
    unknown: str = "stop"
    locale: str = ""
    unicode: str = "NFC"
    numbers: str = ""
    punctuation: str = "keep"
    _labels: dict[str, int] = field(init=False, repr=False, compare=False)
    _characters: frozenset[str] = field(init=False, repr=False, compare=False)
    _spelled: dict[str, list[int]] = field(init=False, repr=False, compare=False)  # words in pieces, once each
    _replacement: re.Pattern[str] | None = field(init=False, repr=False, compare=False)
    _written: _Table = field(init=False, repr=False, compare=False)  # symbols by the character of each label's number
    _read: _Table = field(init=False, repr=False, compare=False)  # the inverse, of single characters

    def __post_init__(self) -> None:
        if self.case not in _CASE or self.unknown not in ("stop", "drop"):
            raise AlphabetError(
                f"alphabet.case={self.case!r} must be lower, upper or keep; "
                f"alphabet.unknown={self.unknown!r} must be stop or drop"
            )
        if self.unicode not in ("NFC", "NFKC") or self.punctuation not in ("keep", "drop"):
            raise AlphabetError(
                f"alphabet.unicode={self.unicode!r} must be NFC or NFKC; "
                f"alphabet.punctuation={self.punctuation!r} must be keep or drop"
            )
        check_numbers(self.numbers)
        check_locale(self.locale)
        labels = {symbol: label for label, symbol in enumerate(self.symbols)}
        if len(labels) < len(self.symbols) or self.symbols[:1] != ("",):
            raise AlphabetError(f"symbols {self.symbols!r} must be the blank '' and then distinct ones")
        unreachable = [s for s in self.symbols if self._composed(self._cased(s)) != s]
        if unreachable:
            raise AlphabetError(
                f"alphabet.symbols holds {unreachable}, which no transcript contains after alphabet.case={self.case} "
                f"and Unicode composition ({self.unicode}): write them in that form"
            )
        if any(not key for key, _ in self.replace):
            raise AlphabetError("alphabet.replace has an empty key")
        keys = sorted((self._composed(key) for key, _ in self.replace), key=len, reverse=True)
        characters = set("".join(self.symbols))
        if self.has_pieces:
            characters = characters - {WORD_MARK} | {" "}
        object.__setattr__(self, "_labels", labels)
        object.__setattr__(self, "_characters", frozenset(characters))
        object.__setattr__(self, "_spelled", {})
        object.__setattr__(self, "_written", _Table(enumerate(self.symbols)))
        object.__setattr__(self, "_read", _Table((ord(s), chr(n)) for s, n in labels.items() if len(s) == 1))
        object.__setattr__(self, "_replacement", re.compile("|".join(map(re.escape, keys))) if keys else None)

    @classmethod
    def from_config(cls, config: AlphabetConfig) -> Alphabet:
        """Build the alphabet that a config describes; raises AlphabetError where it cannot work."""
        missing = sorted({WORD_MARK, *config.symbols} - {" "} - set(config.pieces)) if config.pieces else []
        if missing:
            raise AlphabetError(
                f"alphabet.pieces lacks single characters {missing} of alphabet.symbols and the word mark: every word "
                "must have a spelling. `ds2 data pieces` adds them"
            )
        symbols = ("", *(config.pieces or config.symbols))
        rules = {key: getattr(config, key) for key in _RULES}
        return cls(symbols, config.case, tuple(sorted(config.replace.items())), config.unknown, **rules)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Alphabet:
        """Restore what `to_dict` gave; raises AlphabetError for what it never gives."""
        try:
            given = from_plain(_Stored, stored, "alphabet")
        except FieldError as error:
            raise AlphabetError(str(error)) from error
        symbols = ("", *(given.pieces or given.symbols))
        rules = {key: getattr(given, key) for key in _RULES}
        return cls(symbols, given.case, tuple(sorted(given.replace.items())), given.unknown, **rules)

    def to_dict(self) -> dict[str, Any]:
        """Return the alphabet as plain containers for checkpoints, without the blank.

        Characters are one string, `symbols`; pieces are a list, `pieces`.
        """
        return {
            **({"pieces": list(self.symbols[1:])} if self.has_pieces else {"symbols": "".join(self.symbols)}),
            "case": self.case,
            "replace": dict(self.replace),
            "unknown": self.unknown,
            **self.rules(),
        }

    def rules(self) -> dict[str, str]:
        """Return what else is done to transcripts: the settings of the normaliser that are not as they begin."""
        return {key: getattr(self, key) for key, default in _RULES.items() if getattr(self, key) != default}

    def __len__(self) -> int:
        return len(self.symbols)

    @property
    def has_pieces(self) -> bool:
        """Whether symbols are pieces of words."""
        return any(symbol.startswith(WORD_MARK) for symbol in self.symbols)

    @property
    def as_printed(self) -> bool:
        """Whether the network writes capitals among small letters, or punctuation other than the apostrophe."""
        cased = self.case == "keep" and any(c != c.lower() for c in self._characters)
        marks = self._characters - {"'", " ", WORD_MARK}
        return cased or any(unicodedata.category(c)[0] in "PS" for c in marks)

    def normalise(self, text: str) -> tuple[str, Counter[str]]:
        """Return the transcript as the network should write it, and the count of each character that it cannot write.

        Unicode composition, then the replacements in one pass (longest key first), then as asked for digits to words,
        punctuation to spaces and case, then runs of white space to one space, none at the ends. Unknown characters stay
        in the text: against a hypothesis they count as errors.
        """
        text = self._composed(text)
        if self._replacement is not None:
            table = {self._composed(key): value for key, value in self.replace}
            text = self._replacement.sub(lambda match: table[match.group()], text)
        if self.numbers:
            text = spell_numbers(text, self.numbers)
        if self.punctuation == "drop":
            text = drop_punctuation(text, self._characters)
        text = " ".join(self._composed(self._cased(text)).split())
        return text, Counter(character for character in text if character not in self._characters)

    def _cased(self, text: str) -> str:
        return _CASE[self.case](text, self.locale)

    def _composed(self, text: str) -> str:
        return unicodedata.normalize("NFKC" if self.unicode == "NFKC" else "NFC", text)

    def encode(self, text: str) -> list[int]:
        """Return the labels of a transcript, normalised first; unknown characters are dropped where `unknown` is drop.

        Raises:
            AlphabetError: the text has unknown characters and `unknown` is stop.
        """
        text, unknown = self.normalise(text)
        if unknown:
            if self.unknown == "stop":
                raise AlphabetError(
                    f"characters outside the alphabet: {describe(unknown)}; add them to alphabet.symbols, map them "
                    "with alphabet.replace, or leave them out with alphabet.unknown=drop"
                )
            text = " ".join("".join(c for c in text if c not in unknown).split())
        return self.spell(text)

    def normalises_as(self, other: Alphabet) -> bool:
        """Whether what this alphabet writes is what `normalise` of the other makes of it: all but the labels agree."""
        return self._characters == other._characters and replace(self, symbols=other.symbols) == other

    def spell(self, text: str) -> list[int]:
        """Return the labels of a normalised text without unknown characters."""
        if not self.has_pieces:
            try:
                return list(text.translate(self._read).encode("latin-1"))  # a third of the time of the line below
            except ValueError:  # unknown characters, or labels past 255
                return [self._labels[character] for character in text]
        return [label for word in text.split() for label in self._pieces(word)]

    def _pieces(self, word: str) -> list[int]:
        """Merge the characters of a word as the encoding was learnt: earliest pieces first, from the left."""
        if word not in self._spelled:
            self._spelled[word] = [self._labels[part] for part in self._merged([WORD_MARK, *word])]
        return self._spelled[word]

    def _merged(self, parts: list[str]) -> list[str]:
        """Merge neighbours while some make a piece: a heap of pairs and links past what is merged, so n log n."""
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
            if right < len(parts) and parts[at] and parts[at] + parts[right] == both:  # neither was merged meanwhile
                parts[at], parts[right], after[at] = both, "", after[right]
                if after[at] < len(parts):
                    before[after[at]] = at
                offer(before[at])
                offer(at)
        return [part for part in parts if part]

    def decode(self, labels: Iterable[int]) -> str:
        """Return the symbols of labels joined; blanks write nothing, repeats stay: collapsing is the decoder's."""
        if isinstance(labels, tuple):  # of a search: a fifth of the time of the line below
            with suppress(ValueError):  # labels past 255
                return bytes(labels).decode("latin-1").translate(self._written)
        return "".join(map(self.symbols.__getitem__, labels))


def describe(characters: Mapping[str, int]) -> str:
    """Return counted characters for a message, most frequent first, each with its code point as look-alikes abound."""
    ordered = sorted(characters.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{c!r} U+{ord(c):04X}" + (f" x {count}" if count > 1 else "") for c, count in ordered)


def fewest_frames(labels: Sequence[int]) -> int:
    """The fewest frames that can carry labels: one each, and a blank between equal neighbours (Graves et al. 2006)."""
    return len(labels) + sum(a == b for a, b in pairwise(labels))
