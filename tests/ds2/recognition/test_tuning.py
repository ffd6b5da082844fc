"""Tuning finds the weights that mend what greedy gets wrong, and takes the narrowest beam that is as good."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from ds2.config.schema import DecodeConfig
from ds2.decoding.keywords import BONUSES
from ds2.lm.kneser_ney import estimate
from ds2.lm.ngram import NGram
from ds2.lm.sentences import SentenceReader
from ds2.recognition.tuning import DevLogProbs, TuningTrial, choose, plot, search, tune_confidence, tune_keywords
from ds2.scoring.wer import ErrorCounts
from ds2.system import UserError
from ds2.text.alphabet import Alphabet

ALPHABET = Alphabet(("", " ", "a", "b"))
TEXTS = ["ab ba", "ba ab", "ab ab", "ba ba"]


def model_of(texts: list[str], folder: Path) -> NGram:
    path = folder / "text.txt"
    path.write_text("".join(f"{text}\n" for text in texts * 3), encoding="utf-8")
    return estimate(SentenceReader([path], "word", ALPHABET, "stop"), 2, [0], unit="word").model


def misheard(texts: list[str], lm: NGram, frame_s: float = 0.02) -> DevLogProbs:
    """Log-probs in which the last letter of each text is a little less likely than the other letter."""
    paths = [[label for symbol in text for label in (ALPHABET.encode(symbol) or [1])] for text in texts]
    log_probs = torch.full((2 * len(paths[0]), len(texts), 4), 0.01)
    for row, path in enumerate(paths):
        log_probs[0::2, row, :] += torch.nn.functional.one_hot(torch.tensor(path), 4)
        log_probs[1::2, row, 0] += 1
        log_probs[len(log_probs) - 2, row] = torch.tensor([0.01, 0.01, 0.44, 0.44])
        log_probs[len(log_probs) - 2, row, 5 - path[-1]] += 0.1
    batch = (log_probs.log().log_softmax(2), torch.full((len(texts),), len(log_probs)))
    return DevLogProbs([batch], texts, frame_s, ALPHABET, lm, torch.device("cpu"))


@pytest.mark.parametrize("method", ["beam", "native", "native with lexicon"])
def test_the_search_finds_weights_that_mend_errors(method: str, tmp_path: Path) -> None:
    dev = misheard(TEXTS, model_of(TEXTS, tmp_path))
    lexicon = method.endswith("lexicon")
    options = DecodeConfig(method=method.split(maxsplit=1)[0], beam=32, unknown_score=-0.1, lexicon=lexicon, threads=1)
    trials = list(search(dev, options, [0.0, 1.0], [0.0, 1.0], beams=(4, 32)))
    points = {(t.alpha, t.beta): t.errors for t in trials}
    assert points[0.0, 0.0].errors == (0 if lexicon else len(TEXTS))  # what is misheard is no word
    assert points[1.0, 0.0].errors == 0
    assert len({(t.alpha, t.beta, t.beam) for t in trials}) == len(trials) > 9
    assert choose(trials).errors.errors == 0
    plot(trials, choose(trials), tmp_path / "surface.png")
    with pytest.raises(UserError, match="is no kind of picture"):
        plot(trials, choose(trials), tmp_path / "surface.xyz")
    assert (tmp_path / "surface.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("narrow_errors", "beam"), [(51, 16), (60, 64)])
def test_a_narrower_beam_is_taken_where_it_costs_little(narrow_errors: int, beam: int) -> None:
    trials = [
        TuningTrial(0.5, 1.0, 64, ErrorCounts(9950, 50)),
        TuningTrial(0.5, 1.0, 16, ErrorCounts(10000 - narrow_errors, narrow_errors)),
        TuningTrial(0.7, 1.0, 16, ErrorCounts(9900, 100)),
    ]
    assert choose(trials).beam == beam
    assert math.isclose(choose(trials).alpha, 0.5)


def test_confidences_are_calibrated_on_what_was_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds2.decoding.beam.decoder.finalise", None)  # utterances of a second: one whole
    texts = [" ".join([text] * 5) for text in TEXTS]
    dev = misheard(texts, model_of(texts, tmp_path))
    mended = DecodeConfig(method="beam", beam=32, alpha=1.0, beta=0.0, unknown_score=-0.1)
    assert tune_confidence(dev, mended) == (1.0, 0.0)  # all words are right: nothing to learn
    half_wrong = DecodeConfig(method="beam", beam=32, alpha=0.0, beta=0.0, unknown_score=-0.1)
    slope, offset = tune_confidence(dev, half_wrong)
    assert slope > 1 and math.isfinite(offset)  # the misheard words are the doubtful ones


def test_false_alarms_of_keywords_are_counted(tmp_path: Path) -> None:
    texts = ["aaabb abbab", "abbab aaabb", "aaabb aaabb", "abbab abbab"]
    lm = model_of([*texts, "aaabb abbaa"], tmp_path)
    dev = misheard(texts, lm, 3.6)
    options = DecodeConfig(method="beam", beam=32, alpha=1.0, beta=0.0, unknown_score=-0.1, lexicon=True)
    trials = tune_keywords(dev, options)
    hours = sum(int(lengths.sum()) for _, lengths in dev.batches) / 1000
    assert [trial.bonus for trial in trials] == list(BONUSES)
    assert all(trial.alarms * hours * 2 % 1 == pytest.approx(0.5) for trial in trials)
    assert trials[-1].recall == 1.0 and trials[0].recall < 1.0  # "abbaa" is chosen for "abbab" where that costs more
    short = tune_keywords(misheard(TEXTS, lm), options)
    assert not short  # no word of five letters
