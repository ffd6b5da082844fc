"""Keywords in endless audio: typed phrases among all the words that a beam search recognises.

A keyword competes with every word of the language model, over the same frames and in the same context: the search does
not take `heaven` or `seventeen` for `seven`. A keyword has a bonus, the threshold of a likelihood ratio: the search
writes it where the best path with it is less probable than the best path without it by at most the bonus (natural log).
The bonus follows from the false alarms that the user allows, by measurements on speech (`ds2 lm tune`).
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from ds2.config.allowed import Range
from ds2.decoding.beam.decoder import BeamDecoder
from ds2.decoding.decoder import ChangedDecoder, Decoder, unwrapped
from ds2.decoding.hypothesis import DecodeError, Hypothesis, Word
from ds2.decoding.phrases import (
    END,
    FALSE_ALARMS,
    OTHERS,
    ROOT,
    LexiconError,
    PhraseError,
    PhraseGraph,
    compile_phrases,
)
from ds2.system.plain import short_repr

BONUSES = (-4.0, -2.0, 0.0, 2.0, 4.0)  # those of `decode.keyword_alarms`
_MAX_TEXTS = 200  # that the keywords stand for


def measured_search(decoder: Decoder) -> BeamDecoder | None:
    """The beam search in a decoder, if its false alarms were measured; None: keywords cannot be searched with it."""
    _, search = unwrapped(decoder)
    if not isinstance(search, BeamDecoder) or not (search.options.times and search.options.keyword_alarms):
        return None
    return search


def keyword_bonus(alarms: Sequence[float], wanted: float) -> float:
    """Return the highest bonus at which one keyword has no more than `wanted` false alarms an hour.

    Args:
        alarms: false alarms an hour of one keyword at each of `BONUSES`, above 0. Between these their logarithm is
            linear; beyond the last bonus nothing was measured, so it is the highest.

    Raises:
        DecodeError: the least that was measured is more than `wanted`.
    """
    rising = np.maximum.accumulate(alarms)
    if wanted < rising[0]:
        raise DecodeError(
            f"{wanted:.3g} false alarms an hour of each keyword are fewer than this model was measured at: allow "
            f"{rising[0]:.3g} or more"
        )
    return float(np.interp(np.log(wanted), np.log(rising), BONUSES))


class KeywordDecoder(ChangedDecoder):
    """A decoder that writes keywords, and `[unk]` for the words between them.

    `keywords` are all texts that these stand for.

    Args:
        decoder: a beam search that was measured, with or without calibrated confidences.
        keywords: as `compile_phrases` takes them.
        false_alarms: an hour, of each text that the keywords stand for.

    Raises:
        PhraseError: keywords that cannot be read, that the network cannot write, or that stand for too many texts.
        LexiconError: keywords that the language model lacks.
        DecodeError: another decoder, or `false_alarms` are fewer than were measured.
    """

    def __init__(self, decoder: Decoder, keywords: Iterable[str], false_alarms: float) -> None:
        search = measured_search(decoder)
        if search is None:
            raise DecodeError(
                "keywords for a number of false alarms need decode.method=beam, decode.times=true and "
                "decode.keyword_alarms, which `ds2 lm tune` measures; phrases with an allowance need none of them"
            )
        if false_alarms not in Range(0, math.inf, above=True, below=True):
            shown = short_repr(false_alarms)
            raise DecodeError(f"false_alarms={shown}: give a number an hour above 0, such as {FALSE_ALARMS}")
        listed = keywords if isinstance(keywords, str) else [phrase for phrase in keywords if phrase != OTHERS]
        texts = texts_of(compile_phrases(listed, search.network_alphabet))
        self.keywords = frozenset(texts)
        bonus = keyword_bonus(search.options.keyword_alarms, false_alarms)
        super().__init__(decoder, partial(only_keywords, keywords=self.keywords), dict.fromkeys(texts, bonus))
        try:
            self.start()  # now rather than with the first audio
        except LexiconError as error:
            raise LexiconError(f"{error}; phrases with an allowance need no language model") from error


def texts_of(graph: PhraseGraph) -> list[str]:
    """Return all texts that phrases stand for; raises PhraseError where there are too many."""
    texts: dict[str, None] = {}
    waiting: list[tuple[int, str]] = [(ROOT, "")]
    while waiting:
        point, text = waiting.pop()
        if END in graph.reached[point] and text:
            texts[text] = None
        following = {(word.end, word.text) for word in graph.words if word.start in graph.reached[point]}
        waiting += [(end, f"{text} {word}".strip()) for end, word in sorted(following)]
        if len(texts) + len(waiting) > _MAX_TEXTS:
            raise PhraseError(f"the keywords stand for more than {_MAX_TEXTS} texts: leave some out")
    return list(texts)


def keywords_in(texts: Sequence[str], keywords: Collection[str]) -> list[str]:
    """Return the keywords among words, in order, as `only_keywords` finds them."""
    return [" ".join(texts[first:last]) for first, last, is_keyword in _spans(texts, keywords) if is_keyword]


def only_keywords(hypothesis: Hypothesis, keywords: Collection[str]) -> Hypothesis:
    """Return the hypothesis with `[unk]` for each stretch of words that are no keyword.

    From left to right the longest keyword is taken. It is one word of the hypothesis, as `[unk]` is; the confidence is
    the lowest of what they were. A hypothesis without words, of a stream that goes on, is changed in its text alone.
    """
    texts = hypothesis.text.split()
    spans = list(_spans(texts, keywords))
    timed = hypothesis.words if len(hypothesis.words) == len(texts) else ()
    written = [" ".join(texts[first:last]) if is_keyword else OTHERS for first, last, is_keyword in spans]
    words: list[Word] = []
    for text, (first, last, _) in zip(written, spans, strict=True):
        if own := timed[first:last]:
            words.append(Word(text, own[0].start_s, own[-1].end_s, min(word.confidence for word in own)))
    fixed = sum(
        last - first if is_keyword else 1
        for first, last, is_keyword in spans
        if last < hypothesis.fixed_words  # the next word is fixed too, so it does not extend this one
    )
    return replace(hypothesis, text=" ".join(written), words=tuple(words), fixed_words=fixed)


def _spans(texts: Sequence[str], keywords: Collection[str]) -> Iterable[tuple[int, int, bool]]:
    """Yield first word, word after the last, and whether they are a keyword or a stretch between keywords."""
    lengths = sorted({len(keyword.split()) for keyword in keywords}, reverse=True)
    other = at = 0
    while at < len(texts):
        ends = (at + length for length in lengths if at + length <= len(texts))
        length = next((end - at for end in ends if " ".join(texts[at:end]) in keywords), 0)
        if length:
            if other < at:
                yield other, at, False
            yield at, at + length, True
            other = at + length
        at += max(length, 1)
    if other < len(texts):
        yield other, len(texts), False
