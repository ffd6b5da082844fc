"""Hot words as clients give them: a table of phrases and weights, a list, or a prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ds2.decoding.decoder import Decoder
from ds2.decoding.lexicon import LexiconError
from ds2.serve.limits import LimitError
from ds2.system.plain import parse_json
from ds2.text.alphabet import Alphabet

_BAD_DATA = 1007  # close code
_MOST = 1e6  # as decode.hot_word_bonus may be
_PROMPT_WORDS = 5  # of a phrase in a prompt; what is longer is a sentence, which is no phrase to look for
_PARTS = re.compile(r"[,;.:!?\n]+")


def given(value: Any, field: str, alphabet: Alphabet) -> dict[str, float | None]:
    """Phrases as the network writes them, and their weights.

    Args:
        value: {phrase: weight}, or [phrase, ...], of which each is worth decode.hot_word_bonus; or JSON of these.
        field: as the client calls it.
        alphabet: of the network, whose rules for transcripts (case, digits) are those for phrases.

    Raises:
        LimitError: anything else.
    """
    try:
        value = parse_json(value) if isinstance(value, str) else value
    except ValueError:
        value = None
    if isinstance(value, list):
        return {_written(phrase, alphabet): None for phrase in value}
    numbers = isinstance(value, Mapping) and all(
        isinstance(weight, int | float) and not isinstance(weight, bool) and abs(weight) <= _MOST
        for weight in value.values()
    )
    if not isinstance(value, Mapping) or not numbers:
        raise LimitError(
            f"{field} is a list of phrases, or an object of phrases and weights up to {_MOST:g}", 400, _BAD_DATA
        )
    return {_written(phrase, alphabet): float(weight) for phrase, weight in value.items()}


def prompt(text: Any, keywords: Any) -> str:
    """A prompt and a list of keywords as one prompt."""
    return ", ".join(map(str, [text or "", *(keywords if isinstance(keywords, list) else [])]))


def of_prompt(text: Any, alphabet: Alphabet, decoder: Decoder) -> dict[str, float | None]:
    """The phrases of a prompt, parted by commas and the like: what the network can write of them, if it looks for any.

    A prompt is a hint, so what cannot be followed is let go. Each is worth decode.hot_word_bonus.
    """
    found: dict[str, float | None] = {}
    for part in _PARTS.split(str(text)):
        phrase = _written(part, alphabet)
        if not phrase or len(phrase.split()) > _PROMPT_WORDS:
            continue
        try:
            decoder.start(1, {phrase: None})
        except LexiconError:
            continue
        found[phrase] = None
    return found


def _written(phrase: Any, alphabet: Alphabet) -> str:
    return " ".join(alphabet.normalise(str(phrase))[0].split())
