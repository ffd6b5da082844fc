"""Decoders beside brute force over all alignments, beside each other, and on input that cannot be decoded."""

from __future__ import annotations

import math
import sys
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.decoding_cases import (
    CHARACTERS,
    CPU,
    PIECES,
    WIDE,
    brute_force,
    label_worth,
    language_model,
    random_log_probs,
    speechlike,
    spell,
    word_worth,
)
from torch import Tensor

from ds2.config.allowed import REMOVED
from ds2.config.schema import ConfigError, DecodeConfig
from ds2.decoding.decoder import decode_long
from ds2.decoding.hypothesis import DecodeError, Hypothesis
from ds2.decoding.methods import METHODS, make_decoder
from ds2.decoding.phrases import LexiconError
from ds2.lm.files import read_arpa
from ds2.lm.ngram import LanguageModelError
from ds2.text.alphabet import Alphabet


def assert_best(found: list[Hypothesis], expected: list[tuple[str, float]], options: DecodeConfig) -> None:
    best: dict[str, float] = {}
    for text, score in expected:
        best.setdefault(text, score)
    wanted = list(best.items())[: len(found)]
    assert [h.text for h in found] == [text for text, _ in wanted]
    for hypothesis, (_, score) in zip(found, wanted, strict=True):
        assert hypothesis.score == pytest.approx(score, abs=1e-5)
        parts = hypothesis.acoustic + options.alpha * hypothesis.lm + hypothesis.bonus
        assert hypothesis.score == pytest.approx(parts, abs=1e-6)


@pytest.mark.parametrize("alphabet", [CHARACTERS, PIECES])
@pytest.mark.parametrize(
    "changes",
    [{}, {"unknown_score": -2.0}, {"lexicon": True}, {"hot_words": ["bb"], "hot_word_bonus": 3.0}],
    ids=["far unknown", "open", "lexicon", "hot"],
)
@pytest.mark.parametrize("with_lm", [False, True])
def test_a_wide_beam_equals_brute_force(
    alphabet: Alphabet, changes: dict[str, object], with_lm: bool, tmp_path: Path
) -> None:
    lm = language_model(tmp_path, "word") if with_lm or "lexicon" in changes else None
    options = replace(WIDE, **changes)  # type: ignore[arg-type]
    log_probs, lengths = random_log_probs(5, 3, 4), torch.tensor([5, 3, 1])
    rows = make_decoder(options, alphabet, 0.02, CPU, lm).decode(log_probs, lengths)
    for row, found in enumerate(rows):
        expected = brute_force(log_probs[: lengths[row], row], alphabet, word_worth(lm, options, alphabet))
        assert_best(found, [item for item in expected if item[1] > -math.inf], options)


@pytest.mark.parametrize(("alphabet", "unit"), [(CHARACTERS, "character"), (PIECES, "piece")])
def test_models_of_labels_equal_brute_force(alphabet: Alphabet, unit: str, tmp_path: Path) -> None:
    lm, options = language_model(tmp_path, unit), replace(WIDE, nbest=1)
    log_probs, lengths = random_log_probs(5, 3, 4, seed=1), torch.tensor([5, 4, 2])
    rows = make_decoder(options, alphabet, 0.02, CPU, lm).decode(log_probs, lengths)
    for row, found in enumerate(rows):
        expected = brute_force(log_probs[: lengths[row], row], alphabet, label_worth(lm, options, alphabet))
        assert_best(found, expected, options)


@pytest.mark.parametrize("beam", [4, 32])
@pytest.mark.parametrize("with_lm", [False, True])
def test_native_and_batched_search_agree_with_pruning(beam: int, with_lm: bool, tmp_path: Path) -> None:
    pytest.importorskip("ctc_beam_decoder")
    lm = language_model(tmp_path, "word") if with_lm else None
    path = str(tmp_path / "word.arpa") if with_lm else ""
    options = DecodeConfig(method="beam", beam=beam, lm=path, nbest=3, hot_words=["bab"], unknown_score=-3.0)
    log_probs, lengths = speechlike(80, 6, 4), torch.full((6,), 80)
    ours = make_decoder(options, CHARACTERS, 0.02, CPU, lm).decode(log_probs, lengths)
    theirs = make_decoder(replace(options, method="native"), CHARACTERS, 0.02, CPU, lm).decode(log_probs, lengths)
    for mine, native in zip(ours, theirs, strict=True):
        assert mine[0].text == native[0].text
        for a, b in zip(mine, native, strict=False):
            assert (a.text, a.words, a.labels) == (b.text, b.words, b.labels)
            assert a.score == pytest.approx(b.score, abs=1e-4)
            assert a.acoustic == pytest.approx(b.acoustic, abs=1e-4)


def test_batch_mates_and_padding_do_not_matter(tmp_path: Path) -> None:
    lm = language_model(tmp_path, "word")
    decoder = make_decoder(DecodeConfig(method="beam", beam=16, nbest=3), CHARACTERS, 0.02, CPU, lm)
    log_probs, lengths = speechlike(60, 3, 4), torch.tensor([60, 17, 41])
    log_probs[17:, 1], log_probs[41:, 2] = math.nan, math.inf
    together = decoder.decode(log_probs, lengths)
    for row, length in enumerate(lengths.tolist()):
        [alone] = decoder.decode(log_probs[:length, row : row + 1], lengths[row : row + 1])
        assert alone == together[row]


@pytest.mark.gpu
@pytest.mark.parametrize("unit", ["none", "word", "character"])
def test_cpu_and_gpu_search_agree(unit: str, tmp_path: Path) -> None:
    lm = None if unit == "none" else language_model(tmp_path, unit)
    options = DecodeConfig(method="beam", beam=16, nbest=3, hot_words=["bab"], unknown_score=-3.0)
    log_probs, lengths = speechlike(80, 6, 4), torch.tensor([80, 70, 33, 1, 80, 64])
    here = make_decoder(options, CHARACTERS, 0.02, CPU, lm).decode(log_probs, lengths)
    gpu = torch.device("cuda")
    there = make_decoder(options, CHARACTERS, 0.02, gpu, lm).decode(log_probs.to(gpu), lengths)
    for ours, theirs in zip(here, there, strict=True):
        assert [(h.text, h.labels) for h in ours] == [(h.text, h.labels) for h in theirs]
        assert [h.score for h in ours] == pytest.approx([h.score for h in theirs], abs=1e-4)


def test_words_carry_times_and_confidences() -> None:
    path, sure = [0, 2, 2, 0, 3, 1, 0, 3], 0.94
    log_probs = torch.full((8, 1, 4), math.log((1 - sure) / 3))
    log_probs[range(8), 0, path] = math.log(sure)
    [[found]] = make_decoder(DecodeConfig(method="beam"), CHARACTERS, 0.02, CPU).decode(log_probs, torch.tensor([8]))
    first, second = found.words
    assert (first.text, second.text) == ("ab", "b")
    times_s = [first.start_s, first.end_s, second.start_s, second.end_s]
    assert times_s == pytest.approx([0.02, 0.1, 0.14, 0.16])
    assert first.confidence == pytest.approx(sure**2, rel=1e-5)


@pytest.mark.parametrize("method", ["greedy", "beam", "native"])
@pytest.mark.parametrize("case", ["nan", "unnormalised", "no frames"])
def test_log_probs_that_cannot_be_decoded_are_named(method: str, case: str) -> None:
    if method == "native":
        pytest.importorskip("ctc_beam_decoder")
    log_probs, lengths = random_log_probs(4, 3, 4), torch.tensor([4, 4, 4])
    if case == "nan":
        log_probs[1, 2, 0] = math.nan
    elif case == "unnormalised":
        log_probs[:, 2] += 1.0
    else:
        lengths[2] = 0
    message = {"nan": "NaN", "unnormalised": "log_softmax", "no frames": "T = 0"}[case]
    decoder = make_decoder(DecodeConfig(method=method), CHARACTERS, 0.02, CPU)
    with pytest.raises(DecodeError, match=message) as caught:
        decoder.decode(log_probs, lengths)
    assert caught.value.rows == [2]
    assert decoder.decode(log_probs[:, :0], lengths[:0]) == []


class Ctcdecode:
    """The package's decoder as far as the adapter calls it: finds "ab", worth -2.5."""

    def __init__(self, labels: list[str], model_path: str, **settings: object) -> None:
        assert labels == ["_", " ", "a", "b"]
        assert read_arpa(Path(model_path)).order == 2
        self.settings = settings

    def decode(self, log_probs: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        assert log_probs.shape == (3, 4, 4) and lengths.tolist() == [4, 4, 2]
        found = torch.tensor([2, 3, 0, 0]).repeat(3, 1, 1)
        return found, torch.full((3, 1), 2.5), torch.zeros_like(found), torch.full((3, 1), 2)


def test_ctcdecode_gets_a_model_that_it_can_read_and_its_scores_are_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ctcdecode", SimpleNamespace(CTCBeamDecoder=Ctcdecode))
    lm = language_model(tmp_path, "word")
    options = DecodeConfig(method="ctcdecode", lm="model.lm", alpha=0.7, beta=0.4)
    rows = make_decoder(options, CHARACTERS, 0.02, CPU, lm).decode(random_log_probs(4, 3, 4), torch.tensor([4, 4, 2]))
    for [found] in rows:
        assert (found.text, found.labels) == ("ab", (2, 3))
        word, end = lm.sentence(["ab"])
        assert found.lm == pytest.approx(word + end) and found.bonus == pytest.approx(0.4)
        # The package returned Q - alpha (word + end) - 2 beta, with Q = acoustic + alpha word + beta.
        assert found.acoustic == pytest.approx(-2.5 + 0.7 * end + 0.4)
        assert found.score == pytest.approx(found.acoustic + 0.7 * found.lm + found.bonus)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beam": 0}, "decode.beam=0"),
        ({"nbest": 0}, "decode.nbest=0"),
        ({"prune": 0.0}, "decode.prune"),
        ({"label_min_log_prob": 0.0}, "label_min_log_prob"),
        ({"method": "viterbi"}, ", ".join(METHODS)),
        ({"prune": math.inf}, "decode.prune"),
        ({"alpha": math.nan}, "decode.alpha=nan: allowed are numbers from"),
        ({"alpha": math.inf}, "decode.alpha=inf"),
        ({"confidence": [1.0, math.nan]}, "decode.confidence"),
        ({"beam": 1_000_000}, "decode.beam=1000000 .*10000 or less.*native"),
        ({"method": "ctcdecode"}, "pip install ctcdecode"),
        ({"method": "greedy", "hot_words": ["ab"]}, r"greedy has no search .*decode=beam.*leave out decode\.hot_words"),
    ],
)
def test_settings_that_cannot_work_are_named(changes: dict[str, object], message: str) -> None:
    options = replace(DecodeConfig(method="beam"), **changes)  # type: ignore[arg-type]
    with pytest.raises((ConfigError, DecodeError), match=message):
        make_decoder(options, CHARACTERS, 0.02, CPU)


def test_a_beam_takes_as_many_labels_as_it_can_store() -> None:
    symbols = ("", *map(chr, range(0x20000, 0x20000 + 2**15)))
    log_probs = torch.full((2, 1, 2**15), -20.0)
    log_probs[[0, 1], 0, [-1, -2]] = 0.0
    [[best, *_]] = make_decoder(WIDE, Alphabet(symbols[:-1]), 0.02, CPU).decode(log_probs, torch.tensor([2]))
    assert best.labels == (2**15 - 1, 2**15 - 2)
    with pytest.raises(DecodeError, match=r"of 32769 labels is .*=greedy or native, or train with 32768 or fewer"):
        make_decoder(WIDE, Alphabet(symbols), 0.02, CPU)


def test_vocabulary_and_hot_words_must_fit_the_alphabet(tmp_path: Path) -> None:
    lm = language_model(tmp_path, "word")
    with pytest.raises(LanguageModelError, match="alphabet"):
        make_decoder(WIDE, Alphabet(("", " ", "x", "y")), 0.02, CPU, lm)
    with pytest.raises(LexiconError, match="hot phrases"):
        make_decoder(replace(WIDE, hot_words=["a!"]), CHARACTERS, 0.02, CPU)
    with pytest.raises(LexiconError, match="hot phrases"):
        make_decoder(replace(WIDE, hot_words=["a b!"]), CHARACTERS, 0.02, CPU)
    with pytest.raises(LexiconError, match="language model of words"):
        make_decoder(replace(WIDE, lexicon=True), CHARACTERS, 0.02, CPU)


def test_a_lexicon_that_lets_nothing_through_gives_an_empty_text(tmp_path: Path) -> None:
    lm = language_model(tmp_path, "word")
    decoder = make_decoder(replace(WIDE, lexicon=True, beam=1), CHARACTERS, 0.02, CPU, lm)
    log_probs = torch.full((1, 1, 4), -30.0)
    log_probs[0, 0, 3] = 0.0
    assert decoder.decode(log_probs.log_softmax(2), torch.tensor([1]))[0][0].text == ""


def test_a_long_recording_is_decoded_in_pieces_with_times_of_the_whole() -> None:
    decoder = make_decoder(DecodeConfig(method="beam", beam=16), CHARACTERS, 0.02, CPU)
    path = ([0, 2, 0, 3, 1] * 6 + [0] * 4) * 10
    log_probs = torch.full((len(path), 4), math.log(0.02))
    log_probs[range(len(path)), path] = math.log(0.94)
    [[whole]] = decoder.decode(log_probs[:, None], torch.tensor([len(path)]))
    cut = decode_long(decoder, log_probs, CHARACTERS, 0.02, piece_s=3.0)
    assert len(whole.words) == 60
    assert [w.text for w in cut.words] == [w.text for w in whole.words]
    assert [w.start_s for w in cut.words] == pytest.approx([w.start_s for w in whole.words])
    assert [w.end_s for w in cut.words] == pytest.approx([w.end_s for w in whole.words])
    assert spell(cut.labels, CHARACTERS) == cut.text == whole.text
    assert (1, 1) not in pairwise(cut.labels)


def test_the_table_holds_every_method_and_every_setting_counts_for_one() -> None:
    (declared,) = (field for field in fields(DecodeConfig) if field.name == "method")
    assert set(METHODS) == set(declared.metadata["allowed"])
    settings = {field.name for field in fields(DecodeConfig) if REMOVED not in field.metadata} - {
        "method",
        "confidence",
    }
    assert set().union(*(row.options for row in METHODS.values())) == settings


def test_settings_that_a_method_ignores_are_named_with_the_methods_that_take_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    make_decoder(DecodeConfig(hot_word_bonus=3.0, beam=9), CHARACTERS, 0.02, CPU)
    assert "decode.beam has no effect with decode.method=greedy; beam, native, ctcdecode read it" in caplog.text
    assert "decode.hot_word_bonus has no effect with decode.method=greedy; beam, native read it" in caplog.text
    caplog.clear()
    make_decoder(DecodeConfig(method="beam", hot_words=["ab"]), CHARACTERS, 0.02, CPU)
    make_decoder(DecodeConfig(), CHARACTERS, 0.02, CPU)
    assert not caplog.text


def test_settings_of_no_use_without_another_are_named_with_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = DecodeConfig(method="beam", alpha=2.0, unknown_score=-3.0, rescore_weight=0.1)
    make_decoder(options, CHARACTERS, 0.02, CPU)
    assert [record.getMessage() for record in caplog.records] == [
        "decode.alpha has no effect without decode.lm or decode.rescore",
        "decode.unknown_score has no effect without decode.lm",
        "decode.rescore_weight has no effect without decode.rescore",
    ]
    caplog.clear()
    make_decoder(replace(options, rescore_weight=0.5), CHARACTERS, 0.02, CPU, language_model(tmp_path, "word"))
    make_decoder(DecodeConfig(alpha=2.0), CHARACTERS, 0.02, CPU)  # greedy: said otherwise
    assert "without" not in caplog.text
