"""Keywords among all words: the search beside all word sequences, counted one by one; streams; what cannot be had."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ds2.config.schema import DecodeConfig
from ds2.decoding.decoder import Decoder, unwrapped
from ds2.decoding.hypothesis import DecodeError, Hypothesis, Word
from ds2.decoding.keywords import BONUSES, KeywordDecoder, keyword_bonus, measured_search, only_keywords
from ds2.decoding.methods import make_decoder
from ds2.decoding.phrases import OTHERS, LexiconError, PhraseError
from ds2.lm.kneser_ney import estimate
from ds2.lm.ngram import NGram
from ds2.text.alphabet import Alphabet
from ds2.text.pronunciations import parse_pronunciations

CPU = torch.device("cpu")
SOUNDS = parse_pronunciations(
    ["eat IY T", "eat(2) EY T", "cat K AE T", "tea T IY", "at AE T", "tack T AE K", "dog D AO G"], "x"
)
PHONES = Alphabet(("", *SOUNDS.phones), pronunciations=SOUNDS)
LETTERS = Alphabet(("", *" acdegkot"))
TEXTS = ["eat cat at tea", "tea at eat cat", "eat tack", "cat tack eat tea", "at tea eat cat"]
WORDS = ["eat", "cat", "tea", "at", "tack"]  # two sounds or more: six frames have three words at most
ALARMS = [math.exp(bonus) for bonus in BONUSES]  # so that N false alarms of one keyword are a bonus of log N
ALL = DecodeConfig(
    method="beam", beam=1500, alpha=0.7, beta=0.5, prune=1e9, label_min_log_prob=-1e9, keyword_alarms=ALARMS
)
NARROW = replace(ALL, beam=48, prune=20.0)


def language_model() -> NGram:
    return estimate([line.split() for line in TEXTS * 2], 2, [0]).model


def search(options: DecodeConfig, alphabet: Alphabet = PHONES) -> Decoder:
    return make_decoder(options, alphabet, 0.03, CPU, language_model())


def drawn(seed: int, frames: int, alphabet: Alphabet = PHONES) -> Tensor:
    noise = torch.randn(frames, 1, len(alphabet), generator=torch.Generator().manual_seed(seed))
    return (2.5 * noise).log_softmax(2)


def all_rows(frames: Tensor) -> dict[tuple[str, ...], float]:
    """The score of every row of words: of the likeliest of its pronunciations, the sum over all paths."""
    lm, scores = language_model(), {}
    length = torch.tensor([len(frames)])
    for row in itertools.chain.from_iterable(itertools.product(WORDS, repeat=n) for n in range(4)):
        ways = [sum(way, ()) for way in itertools.product(*(SOUNDS.words[word] for word in row))]
        losses = [
            torch.nn.functional.ctc_loss(
                frames.double(),
                torch.tensor([[PHONES.symbols.index(phone) for phone in way]], dtype=torch.int64),
                length,
                torch.tensor([len(way)]),
                reduction="none",
            )
            for way in ways
            if len(way) <= len(frames)
        ]
        if losses:
            scores[row] = ALL.alpha * sum(lm.sentence(row)) + ALL.beta * len(row) - min(map(float, losses))
    return scores


def test_a_keyword_is_written_where_its_likelihood_ratio_exceeds_the_threshold() -> None:
    decided = []
    for seed, keyword in itertools.product(range(4), WORDS[:3]):
        frames = drawn(seed, 6)
        scores = all_rows(frames)
        ratio = max(s for row, s in scores.items() if keyword in row) - max(
            s for row, s in scores.items() if keyword not in row
        )
        for bonus in (-ratio - 0.2, -ratio + 0.2, 3.5):
            if not BONUSES[0] <= bonus <= BONUSES[-1]:
                continue
            total = {row: score + bonus * row.count(keyword) for row, score in scores.items()}
            best = max(total, key=total.__getitem__)
            decoder = KeywordDecoder(search(ALL), [keyword], math.exp(bonus))
            texts = decoder.decode(frames, torch.tensor([6]))[0][0].text.split()
            assert texts.count(keyword) == best.count(keyword)
            assert set(texts) <= {keyword, OTHERS}
            decided.append(keyword in best)
    assert decided.count(True) > 3 and decided.count(False) > 3


@pytest.mark.parametrize("alphabet", [PHONES, LETTERS], ids=["phones", "letters"])
@pytest.mark.parametrize("seed", range(3))
def test_a_stream_in_any_pieces_is_the_whole(alphabet: Alphabet, seed: int) -> None:
    frames, draw = drawn(seed, 120, alphabet), random.Random(seed)
    decoder = KeywordDecoder(search(replace(NARROW, lexicon=True), alphabet), ["cat", "(tea|eat) at"], 8.0)
    whole = decoder.decode(frames, torch.tensor([120]))
    assert len({*whole[0][0].text.split(), OTHERS}) > 1
    decoding, at = decoder.start(), 0
    while at < 120:
        size = draw.randrange(0, 30)
        decoder.step([decoding], frames[at : at + size], torch.tensor([len(frames[at : at + size])]))
        at += size
        assert set(decoder.best([decoding])[0].text.split()) <= {OTHERS, "cat", "tea", "eat", "at"}
    assert decoder.finish([decoding]) == whole


def test_searches_for_other_keywords_share_a_batch() -> None:
    inner, frames = search(NARROW), drawn(1, 120).repeat(1, 2, 1)
    decoders = [KeywordDecoder(inner, keywords, 8.0) for keywords in (["cat"], ["tea", "at"])]
    assert unwrapped(decoders[0]) == unwrapped(decoders[1]) == (1, unwrapped(inner)[1])
    decodings, lengths = [decoder.start() for decoder in decoders], torch.tensor([120, 120])
    decoders[0].step(decodings, frames, lengths)
    apart = [decoder.decode(frames[:, :1], lengths[:1]) for decoder in decoders]
    assert [best.text for best in decoders[0].best(decodings)] == [rows[0][0].text for rows in apart]
    assert [[row] for row in decoders[1].finish(decodings)] == apart and apart[0] != apart[1]


def hypothesis(text: str, *, words: bool = True, fixed: int = 0) -> Hypothesis:
    timed = tuple(Word(word, n + 0.25, n + 0.75, 1 / (n + 1)) for n, word in enumerate(text.split()))
    return Hypothesis(text, -1.0, (), timed if words else (), fixed_words=fixed)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", ""),
        ("dog", OTHERS),
        ("dog dog cat", f"{OTHERS} cat"),
        ("cat cat", "cat cat"),
        ("eat cat at tea", f"{OTHERS} cat at tea"),  # the longest
        ("cat at dog", f"cat {OTHERS}"),
        ("at tea", OTHERS),
        ("tack eat tack tack", f"tack eat tack {OTHERS}"),
    ],
)
def test_words_that_are_no_keywords_become_one(text: str, wanted: str) -> None:
    keywords = {"cat", "cat at tea", "tack eat tack"}
    changed = only_keywords(hypothesis(text), keywords)
    assert changed.text == " ".join(word.text for word in changed.words) == wanted
    assert only_keywords(hypothesis(text, words=False), keywords).text == wanted
    if text:
        assert {word.text for word in changed.words} <= {*keywords, OTHERS}  # each is one word
        assert changed.words[0].start_s == 0.25
        assert changed.words[-1].end_s == len(text.split()) - 0.25
        assert min(word.confidence for word in changed.words) == 1 / len(text.split())


def test_what_may_still_become_longer_is_not_fixed() -> None:
    keywords = {"cat", "cat at tea"}
    assert only_keywords(hypothesis("dog cat", fixed=2), keywords).fixed_words == 1
    assert only_keywords(hypothesis("dog cat dog", fixed=3), keywords).fixed_words == 2
    assert only_keywords(hypothesis("dog", fixed=1), keywords).fixed_words == 0


def test_more_false_alarms_are_a_higher_bonus() -> None:
    for number, bonus in enumerate(BONUSES):
        assert keyword_bonus(ALARMS, ALARMS[number] * 1.0001) == pytest.approx(bonus, abs=1e-3)
    assert keyword_bonus(ALARMS, math.exp(1.3)) == pytest.approx(1.3)
    assert keyword_bonus(ALARMS, 1e9) == BONUSES[-1]
    flat = [0.1, 0.1, 0.2, 0.15, 0.4]  # as few alarms were measured
    bonuses = [keyword_bonus(flat, wanted) for wanted in (0.1, 0.2, 0.3, 0.4, 0.5)]
    assert bonuses == sorted(bonuses) and bonuses[:2] == [-2.0, 2.0] and bonuses[3:] == [4.0, 4.0]
    with pytest.raises(DecodeError, match=r"0\.05 false alarms an hour .*: allow 0\.1 or more"):
        keyword_bonus(flat, 0.05)


def test_each_text_of_the_keywords_has_the_bonus() -> None:
    decoder = KeywordDecoder(search(NARROW), ["(cat|at) [tea]", OTHERS], 6.0)
    texts = ["cat", "at", "cat tea", "at tea"]
    assert decoder.hot_words == dict.fromkeys(texts, pytest.approx(math.log(6.0)))


@pytest.mark.parametrize(
    ("changes", "keywords", "alarms", "error", "message"),
    [
        ({"keyword_alarms": []}, ["cat"], 1.0, DecodeError, "`ds2 lm tune` measures"),
        ({"times": False}, ["cat"], 1.0, DecodeError, "decode.times=true"),
        ({}, ["cat"], 0.0, DecodeError, "above 0"),
        ({}, ["cat"], math.nan, DecodeError, "above 0"),
        ({}, ["cat"], "some", DecodeError, "false_alarms='some': give a number an hour above 0"),
        ({}, ["cat"], 1e-4, DecodeError, "or more"),
        ({}, ["goat"], 1.0, PhraseError, "no pronunciation"),
        ({}, ["dog"], 1.0, LexiconError, "language model lacks .* with an allowance need no"),
        ({}, ["(eat|cat) " * 12], 1e9, PhraseError, "more than 200 texts"),
        ({}, [OTHERS], 1.0, PhraseError, "no phrases"),
        ({}, "cat", 1.0, PhraseError, "is one text"),
    ],
)
def test_what_cannot_be_had_is_named(
    changes: dict[str, Any], keywords: Any, alarms: float, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        KeywordDecoder(search(replace(NARROW, **changes)), keywords, alarms)


def test_streams_have_no_hot_words_of_their_own() -> None:
    decoder = KeywordDecoder(search(replace(NARROW, confidence=[0.5, 0.0])), ["cat"], 1.0)
    assert not decoder.hot_characters and measured_search(decoder) is not None
    with pytest.raises(LexiconError, match="takes none"):
        decoder.start({"tea": 1.0})
