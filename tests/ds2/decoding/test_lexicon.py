"""Hot words and phrases of single sessions: brute force agrees, batches mix them, and what is gone leaves no trace."""

from __future__ import annotations

import gc
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from support.decoding_cases import CHARACTERS, CPU, language_model, random_log_probs, speechlike

from ds2.config.schema import DecodeConfig
from ds2.decoding.beam.decoder import BeamDecoder
from ds2.decoding.beam.fusion import NODE
from ds2.decoding.frames import NONE
from ds2.decoding.greedy import GreedyDecoder
from ds2.decoding.lexicon import OFF
from ds2.decoding.methods import make_decoder
from ds2.decoding.phrases import HotWords, LexiconError

OPEN = DecodeConfig(method="beam", beam=16, nbest=4, alpha=0.7, beta=0.4, unknown_score=-3.0)
# Six frames of three labels and blank align to 358 texts of labels: this beam loses none.
WIDE = replace(OPEN, beam=400, prune=1e9, label_min_log_prob=-1e9, nbest=50)


def occurrences(words: list[str], phrase: str) -> int:
    wanted = phrase.split()
    return sum(words[at : at + len(wanted)] == wanted for at in range(len(words) - len(wanted) + 1))


@pytest.mark.parametrize(
    ("hot", "unit"),
    [
        ({"a": 1.5}, ""),
        ({"a b": 2.0}, "word"),
        ({"a b": 2.0, "a": 0.5, "b a b": 1.0, "b b": -1.0}, ""),
        ({"a b": 2.0, "a": 0.5, "b a b": 1.0, "b b": -1.0}, "word"),
        ({"ab": 1.0, "ab a": 3.0}, ""),
    ],
)
def test_each_occurrence_of_a_phrase_gets_its_bonus(hot: dict[str, float], unit: str, tmp_path: Path) -> None:
    lm = language_model(tmp_path, unit) if unit else None
    log_probs = random_log_probs(6, 1, 4)
    scores = {}
    for words in (None, hot):
        decoder = BeamDecoder(CHARACTERS, WIDE, lm, 0.02, CPU)
        decoding = decoder.start(words)
        decoder.step([decoding], log_probs, torch.tensor([6]))
        scores[words is None] = {h.text: h.score for h in decoder.finish([decoding])[0]}
    both = scores[True].keys() & scores[False].keys()
    assert len(both) > 10 and any(occurrences(text.split(), phrase) for text in both for phrase in hot)
    for text in both:
        bonus = sum(worth * occurrences(text.split(), phrase) for phrase, worth in hot.items())
        assert scores[False][text] - scores[True][text] == pytest.approx(bonus, abs=1e-9)


def test_a_phrase_is_found_that_the_beam_would_lose() -> None:
    path = [2, 0, 1, 0, 3, 0]  # a b
    log_probs = torch.full((6, 1, 4), 0.02)
    for frame, label in enumerate(path):
        log_probs[frame, 0, label] = 0.5
        log_probs[frame, 0, {2: 3, 3: 2, 1: 2, 0: 2}[label]] = 0.5 - 0.04 + 0.02
    log_probs = (log_probs / log_probs.sum(2, keepdim=True)).log()
    decoder = BeamDecoder(CHARACTERS, replace(OPEN, beam=8), None, 0.02, CPU)

    def text(hot: HotWords | None) -> str:
        decoding = decoder.start(hot)
        decoder.step([decoding], log_probs, torch.tensor([6]))
        return decoder.finish([decoding])[0][0].text

    assert text({"b b": 8.0}) == "b b" != text(None)
    assert text({"a b": 8.0}) == "a b"


@pytest.mark.parametrize("method", ["beam", "native"])
def test_hot_words_are_normalised_like_transcripts(method: str) -> None:
    options = replace(OPEN, method=method, hot_word_bonus=9.0, threads=1)
    log_probs, lengths = speechlike(40, 4, 4).log_softmax(2), torch.full((4,), 40)

    def texts(*hot_words: str) -> list[str]:
        decoder = make_decoder(replace(options, hot_words=list(hot_words)), CHARACTERS, 0.02, CPU)
        return [row[0].text for row in decoder.decode(log_probs, lengths)]

    assert texts(" Ab ") == texts("ab") != texts()
    if method == "beam":
        decoder = make_decoder(options, CHARACTERS, 0.02, CPU)
        streams = [decoder.start({"B  B": None}) for _ in range(4)]
        decoder.step(streams, log_probs, lengths)
        assert [row[0].text for row in decoder.finish(streams)] == texts("b b") != texts()


@pytest.mark.parametrize("lexicon", [False, True])
def test_a_phrase_of_the_settings_counts_as_one_of_a_session(lexicon: bool, tmp_path: Path) -> None:
    options, lm = replace(OPEN, lexicon=lexicon, hot_word_bonus=9.0), language_model(tmp_path, "word")
    configured = BeamDecoder(CHARACTERS, replace(options, hot_words=["b b", "ab"]), lm, 0.02, CPU)
    plain = BeamDecoder(CHARACTERS, options, lm, 0.02, CPU)
    log_probs, lengths = speechlike(40, 4, 4).log_softmax(2), torch.full((4,), 40)
    streams = [plain.start({"b b": None, "ab": None}) for _ in range(4)]
    plain.step(streams, log_probs, lengths)
    texts = [row[0].text for row in configured.decode(log_probs, lengths)]
    assert texts == [row[0].text for row in plain.finish(streams)]
    assert texts != [row[0].text for row in plain.decode(log_probs, lengths)]


def test_a_session_gives_a_word_of_the_settings_another_bonus() -> None:
    plain, configured = (
        BeamDecoder(CHARACTERS, replace(OPEN, beam=4, hot_words=words, hot_word_bonus=9.3), None, 0.02, CPU)
        for words in ([], ["bab"])
    )
    log_probs, lengths = speechlike(40, 4, 4).log_softmax(2), torch.full((4,), 40)
    hypotheses = []
    for decoder in (plain, configured):
        streams = [decoder.start({"bab": 1.5}) for _ in range(4)]
        decoder.step(streams, log_probs, lengths)
        hypotheses.append([[(h.text, h.score) for h in row] for row in decoder.finish(streams)])
    assert hypotheses[0] == hypotheses[1]


@pytest.mark.parametrize("lexicon", [False, True])
def test_sessions_with_other_hot_words_share_a_batch(lexicon: bool, tmp_path: Path) -> None:
    decoder = BeamDecoder(CHARACTERS, replace(OPEN, lexicon=lexicon), language_model(tmp_path, "word"), 0.02, CPU)
    log_probs = speechlike(40, 4, 4).log_softmax(2)
    hot: list[HotWords | None] = [None, {"abab": 6.0}, {"ba ba": 4.0, "bbb": 2.0}, {"abab": 6.0}]
    together = [decoder.start(words) for words in hot]
    for start in range(0, 40, 7):
        chunk = log_probs[start : start + 7]
        decoder.step(together, chunk, torch.full((4,), len(chunk)))
    found = decoder.finish(together)
    for row, words in enumerate(hot):
        other = BeamDecoder(CHARACTERS, decoder.options, language_model(tmp_path, "word"), 0.02, CPU)
        alone = other.start(words)
        other.step([alone], log_probs[:, row : row + 1], torch.tensor([40]))
        assert [h.text for h in found[row]] == [h.text for h in other.finish([alone])[0]]


@pytest.mark.parametrize("alpha", [0.0, 0.7])
@pytest.mark.parametrize("hot", [{}, {"bbaab": 2.0}], ids=["words", "hot words"])
def test_a_lexicon_holds_the_search_whatever_the_models_weight(hot: HotWords, alpha: float, tmp_path: Path) -> None:
    options, lm = replace(OPEN, lexicon=True, alpha=alpha), language_model(tmp_path, "word")
    decoder = BeamDecoder(CHARACTERS, options, lm, 0.02, CPU)
    decoding = decoder.start(hot)
    for frame in random_log_probs(30, 1, 4):
        decoder.step([decoding], frame[None], torch.tensor([1]))
        beams = decoder.search.streams.beams([decoding.state])
        assert (beams.integers[..., NODE][beams.acoustic > NONE] != OFF).all()


def test_a_hot_word_outside_the_lexicon_is_recognised(tmp_path: Path) -> None:
    decoder = BeamDecoder(CHARACTERS, replace(OPEN, lexicon=True), language_model(tmp_path, "word"), 0.02, CPU)
    labels = [3, 0, 3, 0, 2, 0, 2, 0, 3]
    log_probs = torch.full((9, 1, 4), 0.01)
    log_probs[range(9), 0, labels] = 0.97
    text = {}
    for hot in ((), ("bbaab",)):
        decoding = decoder.start(dict.fromkeys(hot, 20.0))
        decoder.step([decoding], log_probs.log(), torch.tensor([9]))
        text[bool(hot)] = decoder.finish([decoding])[0][0].text
    assert "bbaab" not in decoder.lexicon
    assert text[True] == "bbaab" != text[False]


def test_nodes_come_and_go_with_their_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds2.decoding.lexicon.SPARE_NODES", 4)
    decoder = BeamDecoder(CHARACTERS, OPEN, None, 0.02, CPU)
    trie = decoder.search.fusion.trie
    texts = ["".join(letters) for letters in product("ab", repeat=4)]
    kept = []
    for number, text in enumerate(texts):
        with torch.inference_mode(number % 2 == 0):  # within a batch and outside
            kept.append(decoder.start({text: 1.0}))
    most = len(trie.nodes.word)
    assert len(trie.phrases) == len(texts)
    del kept
    gc.collect()
    assert not trie.phrases and not trie.roots
    for text in texts * 3:
        same = [decoder.start({text: 1.0}) for _ in range(3)]
        assert len(trie.phrases) == 1
        del same
    assert len(trie.nodes.word) == most


@pytest.mark.parametrize(
    ("hot", "message"),
    [
        ({"": 1.0}, "hot phrases"),
        ({"c": 1.0}, "characters that the network writes: a b"),
        ({"a" * 201: 1.0}, "200 characters"),
        ({"a": float("nan")}, "bonus nan of the hot phrase 'a': give numbers from -1000000 to 1000000"),
        ({"a": 1e39}, r"bonus 1e\+39"),
        ({"a": 10**400}, "bonus 1000"),
        ({"a": "3"}, "bonus '3'"),
        ({"a": True}, "bonus True"),
        ({None: 1.0}, r"\[None\]: phrases are texts"),
        (dict.fromkeys((f"{n:b}".replace("0", "a").replace("1", "b") for n in range(1001)), 1.0), "1000 at most"),
    ],
)
def test_what_cannot_be_looked_for_is_named(hot: HotWords, message: str) -> None:
    with pytest.raises(LexiconError, match=message):
        BeamDecoder(CHARACTERS, OPEN, None, 0.02, CPU).start(hot)
    with pytest.raises(LexiconError, match=r"decode\.method=beam"):
        GreedyDecoder(CHARACTERS, 0.02).start(hot)
