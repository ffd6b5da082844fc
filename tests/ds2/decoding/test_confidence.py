"""Words are right or wrong by alignment, calibration errors are those of hand-worked bins, calibrations are found."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from support.paths import ROOT

from ds2.config.schema import ConfigError, DecodeConfig
from ds2.decoding.confidence import calibrate, fit_calibration
from ds2.decoding.methods import make_decoder
from ds2.text.alphabet import Alphabet

TOOL = runpy.run_path(str(ROOT / "tools" / "plot_confidence.py"))


def test_words_are_judged_by_alignment(tmp_path: Path) -> None:
    words = [
        {"text": text, "confidence": sure} for text, sure in (("the", 0.9), ("cat", 0.4), ("sat", 0.8), ("o", 0.1))
    ]
    record = {"text": "the hat sat", "pred_text": "the cat sat o", "words": words}
    (tmp_path / "h.jsonl").write_text(json.dumps(record) + "\n")
    confidences, right = TOOL["read"](tmp_path / "h.jsonl")
    assert confidences.tolist() == [0.9, 0.4, 0.8, 0.1]
    assert right.tolist() == [True, False, True, False]
    found = TOOL["reliability"](confidences, right, bins=2)
    assert found.words.tolist() == [2, 2]
    assert found.calibration_error == pytest.approx((2 * 0.25 + 2 * 0.15) / 4)
    TOOL["draw"](found, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_empty_bins_and_certain_words_have_their_place() -> None:
    found = TOOL["reliability"](np.array([1.0, 1.0]), np.array([True, False]), bins=10)
    assert found.words[-1] == 2
    assert found.calibration_error == pytest.approx(0.5)


def test_hypotheses_without_words_are_named(tmp_path: Path) -> None:
    (tmp_path / "h.jsonl").write_text(json.dumps({"text": "a", "pred_text": "a", "words": []}) + "\n")
    with pytest.raises(ValueError, match=r"decode\.times=true"):
        TOOL["read"](tmp_path / "h.jsonl")


@pytest.mark.parametrize("made_by", [(0.5, -1.0), (0.25, 0.5), (3.0, 2.0)])
def test_the_calibration_that_made_the_words_is_found(made_by: tuple[float, float]) -> None:
    draw = np.random.default_rng(2)
    confidences = draw.beta(0.5, 0.3, 40_000)  # many near 0 and 1, as recognisers give them
    right = draw.uniform(size=len(confidences)) < calibrate(confidences, made_by)
    assert fit_calibration(confidences, right) == pytest.approx(made_by, abs=0.1)
    before, after = (
        TOOL["reliability"](values, right).calibration_error
        for values in (confidences, calibrate(confidences, fit_calibration(confidences, right)))
    )
    assert after < 0.01 < before
    with pytest.raises(ValueError, match="2 words, 2 of them right"):
        fit_calibration([0.5, 0.6], [True, True])


@pytest.mark.parametrize("method", ["greedy", "beam"])
def test_decoders_calibrate_their_words(method: str) -> None:
    log_probs = torch.tensor([[0.1, 0.8, 0.1], [0.9, 0.05, 0.05]]).log()[:, None]

    def confidence(**settings: list[float]) -> float:
        decoder = make_decoder(
            DecodeConfig(method=method, **settings),  # type: ignore[arg-type]
            Alphabet(("", "a", " ")),
            0.02,
            torch.device("cpu"),
        )
        return decoder.decode(log_probs, torch.tensor([2]))[0][0].words[0].confidence

    assert confidence() == pytest.approx(0.8)
    assert confidence(confidence=[0.5, 0.0]) == pytest.approx(2 / 3)  # odds of 4 become odds of 2
    with pytest.raises(ConfigError, match=r"decode\.confidence=\[1\.0\]: allowed are 2 numbers"):
        confidence(confidence=[1.0])
