"""Rescoring: every hypothesis of the search gets the mixture of both models, and the best of them comes first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.decoding_cases import CHARACTERS, CPU, PIECES, WIDE, language_model, random_log_probs

from ds2.config.schema import DecodeConfig
from ds2.decoding.decoder import Decoder
from ds2.decoding.hypothesis import EMPTY
from ds2.decoding.methods import make_decoder
from ds2.lm.ngram import LanguageModelError
from ds2.lm.recurrent import RecurrentLM, RecurrentShape, save_recurrent
from ds2.recognition.tuning import DevLogProbs, tune_rescoring
from ds2.text.alphabet import Alphabet

LENGTHS = torch.tensor([6, 4, 1])
LETTERS_AND_PIECES = Alphabet(("", "\u2581a", "\u2581", "a", "b"))


def recurrent(folder: Path, alphabet: Alphabet = CHARACTERS) -> tuple[str, RecurrentLM]:
    torch.manual_seed(4)
    model = RecurrentLM(alphabet, RecurrentShape(hidden=8, layers=1)).eval()
    with torch.no_grad():
        model.classifier.weight.mul_(20)  # of decided opinions
    save_recurrent(folder / "rnn.safetensors", model, {})
    return str(folder / "rnn.safetensors"), model


def decoder_of(options: DecodeConfig, tmp_path: Path, alphabet: Alphabet = CHARACTERS) -> Decoder:
    return make_decoder(options, alphabet, 0.02, CPU, language_model(tmp_path, "word"))


@pytest.mark.parametrize(
    ("alphabet", "labels"), [(CHARACTERS, CHARACTERS), (PIECES, CHARACTERS), (CHARACTERS, LETTERS_AND_PIECES)]
)
@pytest.mark.parametrize("method", ["beam", "native"])
def test_the_best_mixture_comes_first(method: str, alphabet: Alphabet, labels: Alphabet, tmp_path: Path) -> None:
    if method == "native":
        pytest.importorskip("ctc_beam_decoder")
    file, model = recurrent(tmp_path, labels)  # whatever the network writes
    log_probs = random_log_probs(6, 3, 4)
    found = replace(WIDE, method=method, nbest=12, label_min_log_prob=-20.0)
    plain = decoder_of(found, tmp_path, alphabet).decode(log_probs, LENGTHS)
    changed = 0
    for weight in (0.0, 0.3, 1.0):
        options = replace(found, nbest=4, rescore=file, rescore_weight=weight, rescore_hypotheses=12)
        rows = decoder_of(options, tmp_path, alphabet).decode(log_probs, LENGTHS)
        for row, searched in zip(rows, plain, strict=True):
            wanted: dict[str, float] = {}
            for h, score in zip(searched, model.score([h.text for h in searched]), strict=True):
                lm = (1 - weight) * h.lm + weight * score
                wanted[h.text] = h.acoustic + options.alpha * lm + h.bonus
            ranked = sorted(wanted.values(), reverse=True)
            # log-probs are sums of at most 7 float32 of about 10
            assert [h.score for h in row] == pytest.approx(ranked[: len(row)], abs=1e-4)
            assert len(row) == min(4, len(searched))
            for h in row:
                assert h.score == pytest.approx(wanted[h.text], abs=1e-4)
                assert h.score == pytest.approx(h.acoustic + options.alpha * h.lm + h.bonus, abs=1e-4)
                assert [word.text for word in h.words] == h.text.split()  # times are of what was chosen
            changed += row[0].text != searched[0].text
    assert changed > 0


def test_streams_are_rescored_at_their_end(tmp_path: Path) -> None:
    file, _ = recurrent(tmp_path)
    options = replace(WIDE, rescore=file, rescore_weight=0.8)
    decoder, log_probs = decoder_of(options, tmp_path), random_log_probs(6, 2, 4)
    streams = [decoder.start(), decoder.start()]
    decoder.step(streams, log_probs[:4], torch.tensor([4, 0]))
    decoder.step(streams, log_probs[4:], torch.tensor([2, 0]))
    rows = decoder.finish(streams)
    [whole] = decoder.decode(log_probs[:, :1], torch.tensor([6]))
    assert [(h.text, h.words) for h in rows[0]] == [(h.text, h.words) for h in whole]
    assert rows[1] == [EMPTY]


def test_the_share_is_found_on_a_dev_set(tmp_path: Path) -> None:
    """With references that the recurrent model alone puts first, its share must end above 0."""
    file, model = recurrent(tmp_path)
    options = replace(WIDE, rescore=file, rescore_hypotheses=40, alpha=3.0)
    log_probs, lm = random_log_probs(6, 3, 4), language_model(tmp_path, "word")
    only = replace(options, rescore_weight=1.0)
    references = [row[0].text for row in make_decoder(only, CHARACTERS, 0.02, CPU, lm).decode(log_probs, LENGTHS)]
    dev = DevLogProbs([(log_probs, LENGTHS)], references, 0.02, CHARACTERS, lm, CPU)
    shares = tune_rescoring(dev, options, model)
    errors = [found.errors for _, found in shares]
    assert [share for share, _ in shares] == [tenths / 10 for tenths in range(11)]
    assert errors[-1] == 0 < errors[0]


def test_what_cannot_be_rescored_is_named(tmp_path: Path) -> None:
    file, _ = recurrent(tmp_path, Alphabet(("", " ", "a")))
    with pytest.raises(LanguageModelError, match="does not know 'b'"):
        decoder_of(replace(WIDE, rescore=file), tmp_path)


def test_greedy_says_that_it_does_not_rescore(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_decoder(DecodeConfig(rescore="none"), CHARACTERS, 0.02, CPU)
    assert "decode.rescore has no effect with decode.method=greedy" in caplog.text


@pytest.mark.gpu
def test_a_gpu_ranks_by_its_own_scores(tmp_path: Path) -> None:
    file, _ = recurrent(tmp_path)
    options = replace(WIDE, nbest=6, rescore=file, rescore_weight=0.5, rescore_hypotheses=12)
    gpu, lm, log_probs = torch.device("cuda"), language_model(tmp_path, "word"), random_log_probs(6, 3, 4)
    here = make_decoder(options, CHARACTERS, 0.02, CPU, lm).decode(log_probs, LENGTHS)
    there = make_decoder(options, CHARACTERS, 0.02, gpu, lm).decode(log_probs.to(gpu), LENGTHS)
    for row, on_gpu in zip(here, there, strict=True):
        wanted = {h.text: h.score for h in row}
        assert [h.score for h in on_gpu] == sorted((h.score for h in on_gpu), reverse=True)
        assert all([word.text for word in h.words] == h.text.split() for h in on_gpu)
        for h in on_gpu:
            # in bfloat16, to 2^-9: at most 7 labels, each by 8 outputs of at most 1 and weights of 20 / sqrt(8)
            if h.text in wanted:
                assert h.score == pytest.approx(wanted[h.text], abs=7 * 8 * 20 / 8**0.5 * 2**-9 * options.alpha)
        assert len({h.text for h in on_gpu} & set(wanted)) > 0
