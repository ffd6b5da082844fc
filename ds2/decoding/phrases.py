"""Phrases that people type, compiled to the labels that a search may write: `turn [the] (light|lamp) (on|off)`.

`[...]` may be left out, `(a|b)` is one of several, `<0-100>` is a whole number in words, everything else is words; the
three may hold each other. Words are normalised like transcripts. The phrase `[unk]` alone stands for all other speech.

A phrase becomes a graph: points between words, and words that lead from one point to another.

Hot words and hot phrases are plain texts that a search prefers to others.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from numbers import Real

from ds2.config.allowed import Range
from ds2.decoding.hypothesis import DecodeError
from ds2.system.plain import short_repr, shortened
from ds2.text.alphabet import Alphabet
from ds2.text.numbers import spell_numbers

HotWords = Mapping[str, float | None]  # phrase to bonus, natural log; None: decode.hot_word_bonus
MAX_PHRASES = 1000  # of one session
MAX_PHRASE_CHARACTERS = 200
BONUS = Range(-1e6, 1e6)  # of a hot phrase, as decode.hot_word_bonus may be
OTHERS = "[unk]"  # the word for speech that is none of the phrases, as in Vosk
ALLOWANCE = Range(0, 100)
DEFAULT_ALLOWANCE = 0.7  # how much less probable than other speech a phrase may be, natural log a label
FALSE_ALARMS = 0.5  # an hour, of each keyword
MAX_LABELS = 20_000  # of all words of a session's phrases
MAX_CHARACTERS = 20_000  # of all phrases as they are typed
_LARGEST_NUMBER = 10**9
_MAX_NUMBERS = 1001  # of one range
_MAX_NESTED = 20
_MAX_ALTERNATIVES = 10_000  # ways around optional parts, in all
_TOKEN = re.compile(r"[()\[\]|]|<[^<>]*>?|[^()\[\]|<>\s]+|>")  # all but white space is in some token
_RANGE = re.compile(r"<\s*(\d{1,10})\s*-\s*(\d{1,10})\s*>")


class PhraseError(DecodeError):
    """A phrase that cannot be read or spelled; the message shows it and what is allowed."""


class LexiconError(DecodeError):
    """Words that a decoder cannot search for; the message names them and the way out."""


def as_written(hot_words: HotWords, alphabet: Alphabet) -> dict[str, float | None]:
    """Return hot words as the network writes them: normalised like transcripts. Of equal ones the last is used."""
    return {alphabet.normalise(phrase)[0]: bonus for phrase, bonus in hot_words.items()}


def check_hot_words(hot_words: HotWords) -> None:
    """Raise LexiconError if hot words of a session are no texts, too many or too long, or a bonus is not allowed."""
    if len(hot_words) > MAX_PHRASES:
        raise LexiconError(f"{len(hot_words)} hot phrases: {MAX_PHRASES} at most")
    if other := [phrase for phrase in hot_words if not isinstance(phrase, str)]:
        raise LexiconError(f"hot phrases {other[:5]}: phrases are texts")
    for phrase, bonus in hot_words.items():
        real = isinstance(bonus, Real) and not isinstance(bonus, bool)  # numbers of NumPy too
        if bonus is not None and not (real and BONUS.low <= bonus <= BONUS.high):
            which = f"the bonus {short_repr(bonus)} of the hot phrase {phrase[:20]!r}"
            raise LexiconError(f"{which}: give {BONUS} (natural log)")
    if long := [phrase[:20] for phrase in hot_words if len(phrase) > MAX_PHRASE_CHARACTERS]:
        raise LexiconError(f"hot phrases {long[:5]}...: {MAX_PHRASE_CHARACTERS} characters at most")


def check_characters(phrases: Iterable[str], characters: Collection[str]) -> None:
    """Raise LexiconError if a phrase is empty or has other characters than these and spaces."""
    known = {" ", *characters}
    if bad := [phrase for phrase in phrases if not phrase.strip() or not known.issuperset(phrase)]:
        allowed = shortened(" ".join(sorted(characters)))
        raise LexiconError(f"hot phrases {bad[:5]}: give words in the characters that the network writes: {allowed}")


def refuse_hot_words(hot_words: HotWords | None) -> None:
    """Raise LexiconError if there are hot words, for decoders that take none."""
    if hot_words:
        raise LexiconError(
            f"hot words of a session {sorted(hot_words)[:3]}: this decoder takes none, use decode.method=beam"
        )


@dataclass(frozen=True)
class PhraseWord:
    """A word of a phrase, between two points of the graph."""

    start: int
    end: int
    text: str
    labels: tuple[int, ...]


@dataclass(frozen=True)
class PhraseGraph:
    """The words of all phrases; each phrase leads from point 0 to point 1, and then to point 0 again."""

    words: tuple[PhraseWord, ...]
    reached: tuple[frozenset[int], ...]  # by point: it and the points that it leads to when optional parts are left out
    others: bool  # whether speech that is none of the phrases has a path


ROOT, END = 0, 1  # points


def compile_phrases(phrases: Iterable[str], alphabet: Alphabet) -> PhraseGraph:
    """Compile phrases.

    Args:
        phrases: as the head of this module describes them; `[unk]` among them lets the search answer "none of these".

    Raises:
        PhraseError: no phrases, too many or too long ones, other syntax, or words that the network cannot write.
    """
    if isinstance(phrases, str):
        raise PhraseError(f"phrases={phrases!r} is one text: give a list of phrases")
    listed = list(phrases)
    if not all(isinstance(phrase, str) for phrase in listed):
        raise PhraseError("phrases holds something else than texts: phrases are texts")
    if (size := sum(map(len, listed))) > MAX_CHARACTERS:
        raise PhraseError(f"the phrases have {size} characters: {MAX_CHARACTERS} at most")
    compiler = _Compiler(alphabet)
    others = False
    for phrase in listed:
        if phrase.strip() == OTHERS:
            others = True
        else:
            compiler.add(phrase)
    if not compiler.words:
        raise PhraseError(f"no phrases but {OTHERS}: give at least one, such as 'turn [the] (light|lamp) (on|off)'")
    return PhraseGraph(tuple(compiler.words), compiler.closures(), others)


class _Compiler:
    """Reads phrases and adds their words to one graph."""

    def __init__(self, alphabet: Alphabet) -> None:
        self.alphabet = alphabet
        self.words: list[PhraseWord] = []
        self._phrase, self._tokens, self._at = "", list[str](), 0  # the phrase that is read, and the next token
        self._skips: list[set[int]] = [set(), set()]  # by point: the points that follow without a word
        self._labels = 0

    def add(self, phrase: str) -> None:
        self._phrase, self._tokens, self._at = phrase, _TOKEN.findall(phrase), 0
        if not self._tokens:
            raise PhraseError(f"the phrase {phrase!r} is empty: leave it out")
        self._choice(ROOT, END, 0)
        if self._at < len(self._tokens):
            self._refuse(f"{self._tokens[self._at]!r} closes nothing")
        if END in self._reached_from(ROOT):
            self._refuse("all of it may be left out: at least one word must stay")

    def _refuse(self, problem: str) -> None:
        raise PhraseError(
            f"phrase {self._phrase[:200]!r}: {problem}; allowed are words, [optional parts], (one|of|these) and "
            "numbers such as <0-100>"
        )

    def _point(self) -> int:
        self._skips.append(set())
        return len(self._skips) - 1

    def _choice(self, start: int, end: int, depth: int) -> None:
        """Read alternatives up to what closes them, each from `start` to `end`."""
        if depth > _MAX_NESTED:
            self._refuse(f"brackets in brackets, more than {_MAX_NESTED} deep")
        self._sequence(start, end, depth)
        while self._at < len(self._tokens) and self._tokens[self._at] == "|":
            self._at += 1
            self._sequence(start, end, depth)

    def _sequence(self, start: int, end: int, depth: int) -> None:
        """Read parts that follow each other, up to | or what closes them; the last one leads to `end`."""
        point, parts = start, 0
        while self._at < len(self._tokens) and self._tokens[self._at] not in ("|", ")", "]"):
            following = self._point()
            self._part(point, following, depth)
            point, parts = following, parts + 1
        if not parts:
            self._refuse("a part has no words")
        self._skips[point].add(end)

    def _part(self, start: int, end: int, depth: int) -> None:
        token = self._tokens[self._at]
        self._at += 1
        if token in ("(", "["):
            self._choice(start, end, depth + 1)
            closing = {"(": ")", "[": "]"}[token]
            if self._at == len(self._tokens) or self._tokens[self._at] != closing:
                self._refuse(f"{token!r} is not closed by {closing!r}")
            self._at += 1
            if token == "[":
                self._skips[start].add(end)
        elif token.startswith("<"):
            self._numbers(token, start, end)
        elif token == ">":
            self._refuse("'>' closes nothing")
        else:
            self._text(token, start, end)

    def _numbers(self, token: str, start: int, end: int) -> None:
        match = _RANGE.fullmatch(token)
        first, last = (int(match[1]), int(match[2])) if match else (1, 0)
        if not first <= last <= _LARGEST_NUMBER or last - first >= _MAX_NUMBERS:
            self._refuse(f"{token!r} is no range: the smaller number first, {_MAX_NUMBERS} numbers at most")
        if self.alphabet.normalise("0")[1]:  # numbers that begin alike share their first words
            language = self.alphabet.numbers or self.alphabet.locale or "en"
            texts = [spell_numbers(str(number), language) for number in range(first, last + 1)]
        else:
            texts = [str(number) for number in range(first, last + 1)]
        points: dict[tuple[str, ...], int] = {(): start}
        for text in texts:
            words = tuple(self._spelled(text))
            for count in range(1, len(words) + 1):
                if words[:count] not in points:
                    points[words[:count]] = self._point()
                    self._word(words[count - 1], points[words[: count - 1]], points[words[:count]])
            self._skips[points[words]].add(end)

    def _text(self, token: str, start: int, end: int) -> None:
        words = self._spelled(token)
        for word in words[:-1]:
            following = self._point()
            self._word(word, start, following)
            start = following
        self._word(words[-1], start, end)

    def _spelled(self, text: str) -> list[str]:
        """Return the words that the network writes for a text."""
        written, unknown = self.alphabet.normalise(text)
        if unknown or not written:
            pronunciations = self.alphabet.pronunciations  # a network of phones takes the letters of its words
            allowed = "".join(sorted(set("".join(pronunciations.words if pronunciations else self.alphabet.symbols))))
            self._refuse(f"{text!r} holds characters that the network does not write; it writes {allowed!r}")
        return written.split()

    def _word(self, text: str, start: int, end: int) -> None:
        for labels in self._spellings(text):
            self._labels += len(labels)
            if self._labels > MAX_LABELS:
                raise PhraseError(f"the phrases have more than {MAX_LABELS} letters in all: leave some out")
            self.words.append(PhraseWord(start, end, text, labels))

    def _spellings(self, word: str) -> list[tuple[int, ...]]:
        """Return the labels of a word, of a network of phones those of each pronunciation."""
        pronunciations = self.alphabet.pronunciations
        if pronunciations is None:
            return [tuple(self.alphabet.spell(word))]
        if word not in pronunciations.words:
            self._refuse(f"{word!r} has no pronunciation in the model's lexicon")
        symbols = self.alphabet.symbols
        return [tuple(symbols.index(phone) for phone in phones) for phones in pronunciations.words[word]]

    def _reached_from(self, point: int) -> frozenset[int]:
        reached, waiting = {point}, [point]
        while waiting:
            for following in self._skips[waiting.pop()] - reached:
                reached.add(following)
                waiting.append(following)
        return frozenset(reached)

    def closures(self) -> tuple[frozenset[int], ...]:
        """Return `PhraseGraph.reached`."""
        closures: list[frozenset[int]] = []
        ways = 0
        for point in range(len(self._skips)):
            closures.append(self._reached_from(point))
            ways += len(closures[-1]) - 1
            if ways > len(self._skips) * 3 + _MAX_ALTERNATIVES:
                raise PhraseError("the phrases have too many optional parts in a row: split them into several phrases")
        return tuple(closures)
