"""Words are right or wrong by alignment; the fit recovers the calibration that the words were made with."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ds2.config.schema import ConfigError, DecodeConfig
from ds2.decoding.methods import make_decoder
from ds2.decoding.postprocess import IDENTITY, calibrate, correct_words, fit_calibration
from ds2.text.alphabet import Alphabet


def test_words_are_judged_by_alignment() -> None:
    assert correct_words(["the", "hat", "sat"], ["the", "cat", "sat", "o"]) == [True, False, True, False]


def calibration_error(confidences: NDArray[np.float64], right: NDArray[np.bool_], bins: int = 10) -> float:
    """The mean distance between confidence and accuracy over bins, weighted by words (Guo et al. 2017, equation 3)."""
    bin_of = np.minimum((confidences * bins).astype(np.int64), bins - 1)
    gaps = np.bincount(bin_of, confidences, bins) - np.bincount(bin_of, right, bins)
    return float(np.abs(gaps).sum()) / len(confidences)


@pytest.mark.parametrize("made_by", [(0.5, -1.0), (0.25, 0.5), (3.0, 2.0)])
def test_the_calibration_that_made_the_words_is_found(made_by: tuple[float, float]) -> None:
    draw = np.random.default_rng(2)
    confidences = draw.beta(0.5, 0.3, 40_000)  # many near 0 and 1, as recognisers give them
    right = draw.uniform(size=len(confidences)) < calibrate(confidences, made_by)
    assert fit_calibration(confidences, right) == pytest.approx(made_by, abs=0.1)
    before, after = (
        calibration_error(values, right)
        for values in (confidences, calibrate(confidences, fit_calibration(confidences, right)))
    )
    assert after < 0.01 < before
    assert fit_calibration([0.5, 0.6], [True, True]) == fit_calibration([], []) == IDENTITY


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
