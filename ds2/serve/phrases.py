"""Hot words, phrases and keywords as clients send them: a table, a list, or a prompt; read in bounded time."""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from ds2.config.allowed import Range
from ds2.decoding.phrases import (
    BONUS,
    FALSE_ALARMS,
    MAX_CHARACTERS,
    MAX_PHRASES,
    LexiconError,
    check_characters,
    check_hot_words,
    compile_phrases,
    refuse_hot_words,
)
from ds2.serve.limits import BadRequestError, FullError, check_number
from ds2.system.plain import parse_json, short_repr
from ds2.text.alphabet import Alphabet

MAX_WAITING = 256  # requests whose phrases wait to be read
_JSON_CHARACTERS = 8 * MAX_CHARACTERS  # a character may take six as an escape
KEYWORDS = ("only_keywords", "false_alarms")  # fields, the same in all protocols
_FALSE_ALARMS = Range(0, 1e6, above=True)  # as of --false-alarms
_PROMPT_WORDS = 5  # of a phrase in a prompt; more words are a sentence, not a hot phrase
_SEPARATORS = re.compile(r"[,;.:!?\n]+")
_T = TypeVar("_T")


class PhraseReader:
    """Normalises phrases as the network writes them, in a thread, so that the event loop goes on.

    Args:
        alphabet: of the network; its rules for transcripts (case, digits) hold for phrases.
        characters: that phrases may have; none: the decoder takes no hot words.
    """

    def __init__(self, alphabet: Alphabet, characters: frozenset[str]) -> None:
        self.alphabet, self.characters = alphabet, characters
        self._waiting = 0
        self._thread = ThreadPoolExecutor(1, "phrases")

    async def run(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """Run `work`, whose time depends on what a client sent, in the thread; raises FullError if too many wait."""
        if self._waiting >= MAX_WAITING:
            raise FullError("too many sessions with hot words begin at once: try again later")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)
        finally:
            self._waiting -= 1

    async def table(self, value: Any, field: str) -> dict[str, float | None]:
        """Return phrases and weights.

        Args:
            value: {phrase: weight}, or [phrase, ...] with the weight decode.hot_word_bonus each; or JSON of these.
            field: as the client calls it.

        Raises:
            BadRequestError: anything else, too many phrases, or too long ones.
            LexiconError: phrases that the network cannot write, or a decoder that takes none.
        """
        return await self.run(self._table, value, field) if value else {}

    async def prompt(self, text: Any, keywords: Any) -> dict[str, float | None]:
        """Return the phrases of a prompt, which punctuation separates, and of a list of keywords.

        They are hints: phrases that the network cannot write are left out. Each has the weight decode.hot_word_bonus.

        Raises:
            BadRequestError: a prompt that is too long, or of too many phrases; keywords that are no list.
        """
        if not isinstance(keywords, list | None):
            raise BadRequestError("keywords is a list of texts")
        parts = [text or "", *(keywords or [])]
        if not any(parts):
            return {}
        _check_size(parts, "prompt")
        return await self.run(self._prompt, parts)

    async def grammar(self, value: Any, field: str) -> tuple[str, ...]:
        """Return the only phrases that a session recognises, from a list of texts or JSON of one; none of an empty one.

        Raises:
            BadRequestError: anything else, or too many phrases.
            PhraseError: phrases that cannot be read, or that the network cannot write.
        """
        return await self.run(self._grammar, value, field) if value else ()

    async def only(
        self, settings: Mapping[str, Any], field: str, place: str = ""
    ) -> tuple[tuple[str, ...], float | None]:
        """Return all that a session recognises, and None for phrases; for keywords the false alarms an hour of each.

        Args:
            settings: of a client: phrases, or the fields `KEYWORDS`; any of them JSON or what JSON gives.
            field: of the phrases.
            place: of the settings, before their names in errors.

        Raises:
            BadRequestError: as `grammar`; phrases and keywords; false alarms that are no number, or without keywords.
            PhraseError: as `grammar`.
            LexiconError: keywords for a decoder that finds none.
        """
        phrases = await self.grammar(settings.get(field), place + field)
        (named, rate), alarms = (place + name for name in KEYWORDS), settings.get(KEYWORDS[1])
        keywords = await self.grammar(settings.get(KEYWORDS[0]), named)
        if phrases and keywords:
            raise BadRequestError(f"{place}{field} and {named}: give one of the two")
        if not keywords:
            if alarms is not None:
                raise BadRequestError(f"{rate} is of keywords: give {named} with it")
            return phrases, None
        if not self.characters:
            raise LexiconError(
                f"{named}: decode.method=beam alone finds keywords among all words; {place}{field} needs none"
            )
        if isinstance(alarms, str):
            with suppress(ValueError):
                alarms = parse_json(alarms)
        return keywords, check_number(FALSE_ALARMS if alarms is None else alarms, rate, _FALSE_ALARMS)

    def _grammar(self, value: Any, field: str) -> tuple[str, ...]:
        value = _parsed(value, field, "a list of phrases")
        if not isinstance(value, list):
            raise BadRequestError(f"{field} is {short_repr(value)}: give a list of phrases")
        if value:
            compile_phrases(value, self.alphabet)
        return tuple(value)

    def _table(self, value: Any, field: str) -> dict[str, float | None]:
        value = _parsed(value, field, f"a list of phrases, or an object of phrases and weights ({BONUS})")
        weights: Mapping[str, Any] = value if isinstance(value, Mapping) else dict.fromkeys(value)
        hot_words: dict[str, float | None] = {}
        for phrase, weight in weights.items():
            shown = f"{field}: the weight of {phrase[:20]!r}"
            number = None if isinstance(value, list) else check_number(weight, shown, BONUS)
            hot_words[self._written(phrase)] = number
        _check_size(hot_words, "what the network writes of the phrases")
        if not self.characters:
            refuse_hot_words(hot_words)
        check_characters(hot_words, self.characters)
        check_hot_words(hot_words)
        return hot_words

    def _prompt(self, parts: Sequence[str]) -> dict[str, float | None]:
        phrases = _SEPARATORS.split(", ".join(parts))
        if len(phrases) > MAX_PHRASES:
            raise BadRequestError(f"prompt has {len(phrases)} phrases: {MAX_PHRASES} at most")
        hot_words: dict[str, float | None] = {}
        for phrase in map(self._written, phrases):
            words = phrase.split()
            if 1 <= len(words) <= _PROMPT_WORDS and self.characters >= set("".join(words)):
                hot_words[phrase] = None
        _check_size(hot_words, "prompt, as the network writes it,")
        return hot_words

    def _written(self, phrase: str) -> str:
        return self.alphabet.normalise(phrase)[0]


def _parsed(value: Any, field: str, wanted: str) -> Any:
    """Return a list or object of phrases, or what JSON of one holds, if it is not too large."""
    if isinstance(value, str):
        if len(value) > _JSON_CHARACTERS:
            raise BadRequestError(f"{field} has {len(value)} characters: {_JSON_CHARACTERS} at most")
        with suppress(ValueError):
            value = parse_json(value)
    if not isinstance(value, list | Mapping):
        raise BadRequestError(f"{field} is {short_repr(value)}: give {wanted}")
    _check_size(value, field)
    return value


def _check_size(phrases: Sequence[Any] | Mapping[Any, Any], field: str) -> None:
    if len(phrases) > MAX_PHRASES:
        raise BadRequestError(f"{field} has {len(phrases)} phrases: {MAX_PHRASES} at most")
    if not all(isinstance(phrase, str) for phrase in phrases):
        raise BadRequestError(f"{field} holds something else than texts: phrases are texts")
    characters = sum(map(len, phrases))
    if characters > MAX_CHARACTERS:
        raise BadRequestError(f"{field} has {characters} characters: {MAX_CHARACTERS} at most")
