"""Words by their pronunciations: the search beside all word sequences, counted one by one; streams; the kernel."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from support import kernel_on_cpu
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ds2.config.schema import DecodeConfig
from ds2.decoding.beam.decoder import BatchedBeamSearch, BeamDecoder
from ds2.decoding.beam.fusion import Fusion, PronouncedWords
from ds2.decoding.beam.kernel_search import KernelSearch
from ds2.decoding.hypothesis import DecodeError
from ds2.decoding.methods import make_decoder
from ds2.decoding.phrases import LexiconError
from ds2.lm.kneser_ney import estimate
from ds2.lm.ngram import NGram
from ds2.text.alphabet import Alphabet
from ds2.text.pronunciations import parse_pronunciations

CPU = torch.device("cpu")
WHERE = [pytest.param("cpu", id="host"), pytest.param("cuda", marks=pytest.mark.gpu)]
LEXICON = parse_pronunciations(
    ["to T UW", "two T UW", "too T UW", "a AH", "a(2) EY", "cat K AE T", "tea T IY", "eat IY T", "at AE T",
     "attack AH T AE K", "tack T AE K"], "test"
)  # fmt: skip
ALPHABET = Alphabet(("", *LEXICON.phones), pronunciations=LEXICON)
ALL = DecodeConfig(method="beam", beam=3000, nbest=1, alpha=0.7, beta=0.5, prune=1e9, label_min_log_prob=-1e9)
NARROW = replace(ALL, beam=32, nbest=5, prune=20.0)


def language_model(order: int = 2) -> NGram:
    text = ["two cat eat", "a cat to eat", "eat too", "to eat a cat", "a tack at tea", "attack a cat", "two two a"]
    return estimate([line.split() for line in text * 2], order, [0]).model


def log_probs(seed: int, frames: int, batch: int = 1) -> Tensor:
    noise = torch.randn(frames, batch, len(ALPHABET), generator=torch.Generator().manual_seed(seed))
    return (2 * noise).log_softmax(2)


@functools.cache
def all_sequences() -> tuple[list[float], list[str], Tensor, Tensor]:
    """All of up to three words with each of their pronunciations: priors, texts, labels and their numbers."""
    lm, labels = language_model(), {phone: label for label, phone in enumerate(ALPHABET.symbols)}
    priors, texts, spelled = [], [], []
    for count in range(4):
        for words in itertools.product(LEXICON.words, repeat=count):
            prior = ALL.alpha * sum(lm.sentence(words)) + ALL.beta * count
            for ways in itertools.product(*(LEXICON.words[word] for word in words)):
                priors.append(prior)
                texts.append(" ".join(words))
                spelled.append(torch.tensor([labels[phone] for phones in ways for phone in phones], dtype=torch.int64))
    return priors, texts, pad_sequence(spelled, batch_first=True), torch.tensor([len(one) for one in spelled])


def best_of_all(frames: Tensor) -> tuple[float, str]:
    """The best of all sequences."""
    priors, texts, spelled, sizes = all_sequences()
    copies = frames.double().expand(-1, len(texts), -1)
    lengths = torch.full_like(sizes, len(frames))
    losses = torch.nn.functional.ctc_loss(copies, spelled, lengths, sizes, reduction="none")
    return max(zip((torch.tensor(priors).double() - losses).tolist(), texts, strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_search_is_that_of_all_sequences(seed: int) -> None:
    frames, lm = log_probs(seed, 7), language_model()
    decoder = make_decoder(ALL, ALPHABET, 0.03, CPU, lm)
    hypothesis = decoder.decode(frames, torch.tensor([7]))[0][0]
    score, text = best_of_all(frames)
    assert hypothesis.score == pytest.approx(score, abs=1e-4)
    own = sum(lm.sentence(hypothesis.text.split()))  # words of one sound may tie in the model
    assert own == pytest.approx(sum(lm.sentence(text.split())), abs=1e-5)
    assert [word.text for word in hypothesis.words] == hypothesis.text.split()
    assert set(hypothesis.labels) <= set(range(1, len(ALPHABET)))  # of the network


def test_homophones_are_distinguished_by_the_language_model() -> None:
    said = ["", "AH", "", "K", "AE", "T", "", "T", "UW", "", "IY", "T", ""]
    frames = torch.full((len(said), 1, len(ALPHABET)), -9.0)
    for at, phone in enumerate(said):
        frames[at, 0, ALPHABET.symbols.index(phone)] = 0.0
    decoder = make_decoder(NARROW, ALPHABET, 0.03, CPU, language_model())
    rows = decoder.decode(frames.log_softmax(2), torch.tensor([len(said)]))
    assert rows[0][0].text == "a cat to eat"
    assert {h.text for h in rows[0]} >= {"a cat to eat", "a cat two eat"}


def test_equal_sounds_of_two_words_need_a_blank_between_them() -> None:
    """A run of T is the end of one word or the start of the next, never both: "at" "tea" have two."""
    frames = torch.full((3, 1, len(ALPHABET)), -30.0)
    for at, phone in enumerate(["AE", "T", "IY"]):
        frames[at, 0, ALPHABET.symbols.index(phone)] = 0.0
    words = PronouncedWords(ALPHABET, language_model())
    decoder = BeamDecoder(ALPHABET, ALL, language_model(), 0.03, CPU)
    for hypothesis in decoder.decode(frames.log_softmax(2), torch.tensor([3]))[0]:
        assert hypothesis.acoustic < -25 or hypothesis.text != "at tea"
    assert len(words.ids) == sum(map(len, LEXICON.words.values()))


def test_streams_are_decoded_as_whole_utterances() -> None:
    frames, lengths = log_probs(7, 60, 3), torch.tensor([60, 41, 17])
    decoder = make_decoder(NARROW, ALPHABET, 0.03, CPU, language_model())
    whole = decoder.decode(frames, lengths)
    streams = [decoder.start() for _ in range(3)]
    for start in range(0, 60, 7):
        decoder.step(streams, frames[start : start + 7], (lengths - start).clamp(0, 7))
        assert all(set(h.text.split()) <= set(LEXICON.words) for h in decoder.best(streams))
    for ours, theirs in zip(decoder.finish(streams), whole, strict=True):
        assert [h.text for h in ours] == [h.text for h in theirs]
        assert [[w.text for w in h.words] for h in ours] == [[w.text for w in h.words] for h in theirs]


@pytest.mark.parametrize("alpha", [0.0, 0.7])
@pytest.mark.parametrize("beam", [1, 8])
def test_words_with_times_are_those_of_the_text(beam: int, alpha: float) -> None:
    """Frames of a second: times of words become final while the search goes on, and it ends within words."""
    lengths = torch.arange(20, 120, 10)
    frames = log_probs(6, 120, len(lengths))
    decoder = make_decoder(replace(NARROW, beam=beam, alpha=alpha), ALPHABET, 1.0, CPU, language_model())
    for row in decoder.decode(frames, lengths):
        for hypothesis in row:
            assert [word.text for word in hypothesis.words] == hypothesis.text.split()
            assert set(hypothesis.text.split()) <= set(LEXICON.words)


@pytest.mark.parametrize("where", WHERE)
def test_kernel_and_pytorch_agree(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm, frames, lengths = language_model(1), log_probs(3, 40, 3), torch.tensor([40, 22, 5])  # no two words tie
    found = {}
    for device, by_kernel in ((CPU, False), (torch.device(where), True)):
        if by_kernel and where == "cpu":
            kernel_on_cpu.patch(monkeypatch)
        words = PronouncedWords(ALPHABET, lm)
        options = replace(NARROW, lexicon=True)
        search = BatchedBeamSearch(Fusion(ALPHABET, options, lm, device, words), options)
        search.kernel = KernelSearch(search.fusion, options) if by_kernel else None
        found[by_kernel] = search.search(words.frames(frames).to(device), lengths)
    assert found[True].labels == found[False].labels
    np.testing.assert_allclose(found[True].scores, found[False].scores, rtol=0, atol=1e-5)


def test_hot_words_have_all_their_pronunciations() -> None:
    frames = log_probs(11, 9)
    plain = make_decoder(NARROW, ALPHABET, 0.03, CPU, language_model()).decode(frames, torch.tensor([9]))[0][0]
    hot = make_decoder(replace(NARROW, hot_words=["attack"], hot_word_bonus=40.0), ALPHABET, 0.03, CPU,
                       language_model())  # fmt: skip
    assert "attack" not in plain.text.split()
    assert "attack" in hot.decode(frames, torch.tensor([9]))[0][0].text.split()
    decoder = make_decoder(NARROW, ALPHABET, 0.03, CPU, language_model())
    stream = decoder.start({"a cat": 60.0})
    decoder.step([stream], frames, torch.tensor([9]))
    assert "a cat" in decoder.finish([stream])[0][0].text
    with pytest.raises(LexiconError, match=r"'dog'.*ds2 data lexicon"):
        decoder.start({"dog": None})


@pytest.mark.parametrize("options, message", [
    (NARROW, "writes phones: a search needs decode.lm"),
    (replace(NARROW, method="native"), "searches no pronunciations"),
])  # fmt: skip
def test_methods_that_cannot_find_words_are_refused(options: DecodeConfig, message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        make_decoder(options, ALPHABET, 0.03, CPU, None)


def test_words_without_a_pronunciation_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    lm = estimate([["a", "cat", "dog"]] * 3, 1, [0]).model
    make_decoder(NARROW, ALPHABET, 0.03, CPU, lm)
    assert "1 of the language model's 6 words have no pronunciation" in caplog.text
    with pytest.raises(LexiconError, match="no word of the language model has a pronunciation"):
        make_decoder(NARROW, ALPHABET, 0.03, CPU, estimate([["dog"]] * 3, 1, [0]).model)
