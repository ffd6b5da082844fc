"""Typed phrases: their syntax against a list of all texts, and the search against sums over all paths by hand."""

from __future__ import annotations

import itertools
import math
import random
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from ds2.decoding.alignment import force_align
from ds2.decoding.phrase_search import PhraseDecoder
from ds2.decoding.phrases import END, OTHERS, ROOT, LexiconError, PhraseError, PhraseGraph, compile_phrases
from ds2.text.alphabet import Alphabet
from ds2.text.pronunciations import Pronunciations

LETTERS = Alphabet(("", *" abcdefghijklmnopqrstuvwxyz"))
SMALL = Alphabet(("", " ", "a", "b"))
PIECES = Alphabet(("", "\u2581", "\u2581a", "a", "b", "\u2581b"))
SOUNDS = Pronunciations.of({"ab": [("A", "B")], "b": [("B",)], "ba": [("B", "A")], "a": [("A",)]})
PHONES = Alphabet(("", *SOUNDS.phones), pronunciations=SOUNDS)
READ = Pronunciations.of({"the": [("DH", "AH")], "read": [("R", "IY", "D"), ("R", "EH", "D")]})
TWO_WAYS = Alphabet(("", *READ.phones), pronunciations=READ)
SPELLED = Pronunciations.of({word: [tuple(word)] for word in ("turn", "the", "light", "lamp", "on", "off")})
COMMAND_PHONES = Alphabet(("", *SPELLED.phones), pronunciations=SPELLED)  # a phone is a letter
FRAME_S = 0.04


def texts(graph: PhraseGraph) -> list[str]:
    """All texts from the root to the end."""
    found, waiting = [], [(ROOT, "")]
    while waiting:
        point, text = waiting.pop()
        found += [text.strip()] * (END in graph.reached[point])
        waiting += [(w.end, f"{text} {w.text}") for w in graph.words if w.start in graph.reached[point]]
    return sorted(found)


@pytest.mark.parametrize(
    ("phrase", "wanted"),
    [
        ("Stop", ["stop"]),
        ("turn [the] (light|lamp) (on|off)", [
            f"turn {the}{what} {how}" for the in ("", "the ") for what in ("light", "lamp") for how in ("on", "off")
        ]),
        ("a [b [c]] [d]", ["a", "a b", "a b c", "a b c d", "a b d", "a d"]),
        ("[a|b c] d", ["a d", "b c d", "d"]),
        ("go | come [back]", ["come", "come back", "go"]),
        ("<9-11> left", ["eleven left", "nine left", "ten left"]),
        ("<99-101>", ["ninety nine", "one hundred", "one hundred and one"]),
    ],
)  # fmt: skip
def test_a_phrase_stands_for_texts(phrase: str, wanted: list[str]) -> None:
    assert texts(compile_phrases([phrase], LETTERS)) == sorted(wanted)


def test_digits_stay_digits_where_the_network_writes_them() -> None:
    assert texts(compile_phrases(["<8-10>"], Alphabet(("", *" 0123456789")))) == ["10", "8", "9"]


def test_digits_are_read_in_the_language_of_the_alphabets_numbers() -> None:
    assert texts(compile_phrases(["<1-2>"], Alphabet(LETTERS.symbols, numbers="de"))) == ["eins", "zwei"]


@pytest.mark.parametrize(
    ("phrases", "named"),
    [
        (["turn (on|off"], "is not closed by ')'"),
        (["turn on)"], "closes nothing"),
        (["turn [on)"], "is not closed by ']'"),
        (["(on||off)"], "a part has no words"),
        (["()"], "a part has no words"),
        (["[on] [off]"], "may be left out"),
        (["<9-3>"], "is no range"),
        (["<0-1000000>"], "is no range"),
        (["<a-b>"], "is no range"),
        (["<3"], "is no range"),
        (["three > two"], "closes nothing"),
        (["naïve"], "does not write"),
        ([" "], "is empty"),
        ([OTHERS], "no phrases but"),
        ([], "no phrases but"),
        ("stop", "is one text"),
        ([3], "phrases are texts"),
        (["(" * 30 + "a" + ")" * 30], "deep"),
        (["stop " * 5000], "20000 at most"),
        (["<1-1000> " * 30], "letters in all"),
        (["x " + "[a] " * 400], "optional parts in a row"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_way_out(phrases: list[str], named: str) -> None:
    with pytest.raises(PhraseError, match=named.replace("[", r"\[").replace("(", r"\(").replace(")", r"\)")):
        compile_phrases(phrases, LETTERS)


def drawn(frames: int, labels: int, seed: int, sharpness: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(frames, 1, labels, generator=generator, dtype=torch.float64)
    return logits.log_softmax(2)


def best_by_hand(log_probs: Tensor, alphabet: Alphabet, texts: list[str]) -> tuple[str, float]:
    """The most probable row of phrases and the log-prob of its best path, over all rows and numbers of spaces."""
    rows = [" ".join(row) for n in range(5) for row in itertools.product(texts, repeat=n)]
    targets = {tuple(alphabet.spell(row)): row for row in rows}
    if alphabet is SMALL:
        for row in rows:
            words = row.split()
            gaps = itertools.product(range(3), *([(1, 2)] * max(0, len(words) - 1)), range(3))
            for before, *between, after in gaps:
                text = "".join(w + " " * n for w, n in zip(words, [*between, after], strict=False))
                targets[tuple(alphabet.spell(" " * before + text))] = row
    fitting = [target for target in targets if len(target) <= len(log_probs)]
    many = log_probs.float().expand(-1, len(fitting), -1)
    aligned = force_align(many, torch.full((len(fitting),), len(log_probs)), fitting)
    scores = [(a.log_prob, targets[t]) for a, t in zip(aligned, fitting, strict=True) if a is not None]
    return max(scores)[::-1]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("alphabet", [SMALL, PIECES, PHONES], ids=["characters", "pieces", "phones"])
def test_without_other_speech_the_best_path_of_all_phrases_is_found(alphabet: Alphabet, seed: int) -> None:
    texts = ["ab", "b", "ba a"]
    log_probs = drawn(7, len(alphabet), seed)
    hypothesis = PhraseDecoder(texts, alphabet, FRAME_S).decode(log_probs, torch.tensor([7]))[0][0]
    text, score = best_by_hand(log_probs, alphabet, texts)
    assert hypothesis.score == pytest.approx(score, abs=1e-4)
    assert hypothesis.text == text


def test_a_network_of_phones_takes_every_pronunciation() -> None:
    graph = compile_phrases(["[the] read"], TWO_WAYS)
    spelled = [" ".join(TWO_WAYS.symbols[label] for label in word.labels) for word in graph.words]
    assert sorted(spelled) == ["DH AH", "R EH D", "R IY D"]
    with pytest.raises(PhraseError, match="no pronunciation"):
        compile_phrases(["red"], TWO_WAYS)
    with pytest.raises(PhraseError, match=r"does not write; it writes 'adehrt';"):
        compile_phrases(["read 2"], TWO_WAYS)


def spoken(text: str, certainty: float, alphabet: Alphabet = LETTERS) -> Tensor:
    """Log-probs (T, 1, V) of letters that each last two frames and are followed by a blank; `_` is silence."""
    symbols = alphabet.symbols
    written = [c for c in text if c == "_" or c in symbols]
    labels = [label for c in written for label in ([0] * 3 if c == "_" else [symbols.index(c), symbols.index(c), 0])]
    probs = torch.full((len(labels), 1, len(symbols)), (1 - certainty) / (len(symbols) - 1), dtype=torch.float64)
    probs[torch.arange(len(labels)), 0, torch.tensor(labels)] = certainty
    return probs.log()


COMMANDS = ["turn [the] (light|lamp) (on|off)", "set volume to <0-100>"]


@pytest.mark.parametrize(
    ("said", "heard", "certainty"),
    [
        ("turn the lamp on", "turn the lamp on", 0.999),
        ("_turn light off_", "turn light off", 0.999),
        ("set volume to forty two", "set volume to forty two", 0.999),
        ("turn lamp on set volume to six", "turn lamp on set volume to six", 0.999),
        ("hello there", OTHERS, 0.999),
        ("please turn lamp on now", f"{OTHERS} turn lamp on {OTHERS}", 0.999),
        ("turn the lamp", OTHERS, 0.999),
        ("return lamp on", OTHERS, 0.999),  # no word begins inside another one
        ("turn lamp once", OTHERS, 0.999),  # nor ends there
        ("turn the lanp on", "turn the lamp on", 0.7),  # one letter of thirteen is wrong
        ("____", "", 0.999),
    ],
)
def test_phrases_are_distinguished_from_other_speech(said: str, heard: str, certainty: float) -> None:
    log_probs = spoken(said, certainty)
    lengths = torch.tensor([len(log_probs)])
    hypothesis = PhraseDecoder([*COMMANDS, OTHERS], LETTERS, FRAME_S).decode(log_probs, lengths)[0][0]
    assert hypothesis.text == " ".join(word.text for word in hypothesis.words) == heard
    starts = [word.start_s for word in hypothesis.words]
    assert starts == sorted(starts)
    assert all(word.confidence <= 1.0 for word in hypothesis.words)
    if said == heard:
        aligned = force_align(log_probs.float(), lengths, [LETTERS.spell(said)])[0]
        assert aligned is not None
        assert hypothesis.score == pytest.approx(aligned.log_prob, rel=1e-5)
        assert all(word.confidence == 1.0 for word in hypothesis.words)
    without = PhraseDecoder(COMMANDS, LETTERS, FRAME_S).decode(log_probs, lengths)[0][0]
    assert OTHERS not in without.text


@pytest.mark.parametrize("alphabet", [LETTERS, COMMAND_PHONES], ids=["characters", "phones"])
@pytest.mark.parametrize(
    ("said", "heard"),
    [
        ("on turn l", "on"),
        ("turn lamp on turn the li", "turn lamp on"),
        ("turn the", ""),
        ("on" + 120 * "_" + "tu", "on"),
    ],
)
def test_a_source_that_stops_within_a_phrase_has_the_phrases_before(alphabet: Alphabet, said: str, heard: str) -> None:
    log_probs = spoken(said, 1 - 1e-9, alphabet)
    lengths = torch.tensor([len(log_probs)])
    decoder = PhraseDecoder(["on", "turn [the] (light|lamp) (on|off)"], alphabet, FRAME_S)
    hypothesis = decoder.decode(log_probs, lengths)[0][0]
    assert hypothesis.text == " ".join(word.text for word in hypothesis.words)
    assert hypothesis.text.startswith(heard)
    assert re.fullmatch("(on ?|turn (the )?(light|lamp) (on|off) ?)*", hypothesis.text)
    assert math.isfinite(hypothesis.score)


@pytest.mark.parametrize("seed", range(3))
def test_a_stream_in_any_pieces_is_the_whole(seed: int) -> None:
    draw = random.Random(seed)
    said = " ".join(draw.choice(["turn lamp on", "hello", "set volume to ten", "_____", "no lamp"]) for _ in range(40))
    noise = drawn(len(spoken(said, 0.7)), len(LETTERS), seed, 1.0)
    log_probs = (spoken(said, 0.7) + 0.5 * noise).log_softmax(2)
    decoder = PhraseDecoder([*COMMANDS, OTHERS], LETTERS, FRAME_S)
    whole = decoder.decode(log_probs, torch.tensor([len(log_probs)]))[0][0]
    assert {OTHERS, "turn", "ten"} <= set(whole.text.split())
    decoding, at = decoder.start(), 0
    fixed: list[str] = []
    while at < len(log_probs):
        size = draw.randrange(0, 70)
        decoder.step([decoding], log_probs[at : at + size], torch.tensor([len(log_probs[at : at + size])]))
        at += size
        now = decoder.best([decoding])[0]
        words = [word.text for word in now.words]
        assert words[: len(fixed)] == fixed  # what is fixed stays
        fixed = words[: now.fixed_words]
        assert len(decoding.moves) <= 12 / FRAME_S
    assert fixed == whole.text.split()[: len(fixed)]
    assert len(fixed) > len(whole.text.split()) - 12
    assert decoder.finish([decoding])[0][0] == whole


@pytest.mark.parametrize(("pieces", "text"), [([2], "a"), ([2, 4], OTHERS), ([2, 5], f"a {OTHERS}")])
def test_other_speech_begins_with_a_word_of_pieces(pieces: list[int], text: str) -> None:
    labels = torch.tensor([[0], *([piece] for piece in pieces), [0]])
    log_probs = (8.0 * torch.nn.functional.one_hot(labels, len(PIECES))).log_softmax(2)
    decoder = PhraseDecoder(["a", OTHERS], PIECES, FRAME_S)
    assert decoder.decode(log_probs, torch.tensor([len(log_probs)]))[0][0].text == text


def test_paths_that_disagree_for_long_are_cut_to_the_best_one() -> None:
    decoder = PhraseDecoder([*COMMANDS, OTHERS], LETTERS, FRAME_S)
    decoding, silence = decoder.start(), torch.zeros(round(1 / FRAME_S), 1, len(LETTERS))
    silence[..., 0] = 5.0
    for _ in range(30):  # seconds, in which other speech may be silent too
        decoder.step([decoding], silence.log_softmax(2), torch.tensor([len(silence)]))
        assert len(decoding.moves) <= 12 / FRAME_S


@pytest.mark.parametrize("allowance", [math.nan, -1, 101, "0.7"])
def test_an_allowance_that_would_make_nonsense_is_refused(allowance: Any) -> None:
    with pytest.raises(PhraseError, match=r"allowance=.*: give numbers from 0 to 100"):
        PhraseDecoder([*COMMANDS, OTHERS], LETTERS, FRAME_S, allowance)


def test_hot_words_are_refused() -> None:
    with pytest.raises(LexiconError):
        PhraseDecoder(["stop"], LETTERS, FRAME_S).start({"stop": 3.0})


@pytest.mark.parametrize("alphabet", [LETTERS, COMMAND_PHONES], ids=["characters", "phones"])
def test_no_other_speech_follows_a_phrase_in_silence(alphabet: Alphabet) -> None:
    log_probs = spoken("_turn lamp on__", 1 - 1e-9, alphabet)
    decoder = PhraseDecoder(["turn lamp (on|off)", OTHERS], alphabet, FRAME_S)
    assert decoder.decode(log_probs, torch.tensor([len(log_probs)]))[0][0].text == "turn lamp on"
