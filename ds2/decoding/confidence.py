"""Words' confidences that mean what they say: a logistic calibration of the recogniser's own, fitted on a dev set.

A confidence p becomes sigmoid(slope x logit(p) + offset) (Platt 1999, "Probabilistic outputs for support vector
machines"). Slope 1 and offset 0 leave it as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ds2.decoding.decoder import Decoder, Decoding
from ds2.decoding.hypothesis import Hypothesis
from ds2.decoding.lexicon import HotWords
from ds2.scoring.wer import CORRECT, DELETION, align

AS_IT_IS = (1.0, 0.0)
_LEAST = 1e-3  # nearer to 0 or 1 a confidence tells no more
_NEWTON_STEPS = 30
_RIDGE = 1e-3


class CalibratedDecoder:
    """A decoder whose words carry calibrated confidences."""

    def __init__(self, decoder: Decoder, calibration: Sequence[float]) -> None:
        self.decoder, self.calibration = decoder, calibration
        self.hot_characters = decoder.hot_characters

    def decode(self, log_probs: Tensor, lengths: Tensor) -> list[list[Hypothesis]]:
        """Decode as the decoder does; see :class:`~ds2.decoding.decoder.Decoder`."""
        return [[calibrated(h, self.calibration) for h in row] for row in self.decoder.decode(log_probs, lengths)]

    def start(self, rows: int = 1, hot_words: HotWords | None = None) -> CalibratedDecoding:
        """Begin as the decoder does."""
        return CalibratedDecoding(self.decoder.start(rows, hot_words), self.calibration)

    def best(self, decodings: Sequence[CalibratedDecoding]) -> list[list[Hypothesis]]:
        """The best of each."""
        found = self.decoder.best([d.decoding for d in decodings])
        return [[calibrated(h, self.calibration) for h in row] for row in found]

    def finish(self, decodings: Sequence[CalibratedDecoding]) -> list[list[list[Hypothesis]]]:
        """The N best of each."""
        found = self.decoder.finish([d.decoding for d in decodings])
        return [[[calibrated(h, self.calibration) for h in row] for row in rows] for rows in found]

    def step(self, decodings: Sequence[CalibratedDecoding], log_probs: Tensor, lengths: Tensor) -> None:
        """Step as the decoder does; see :class:`~ds2.decoding.decoder.Decoder`."""
        self.decoder.step([d.decoding for d in decodings], log_probs, lengths)


class CalibratedDecoding:
    """Utterances on their way whose words carry calibrated confidences."""

    def __init__(self, decoding: Decoding, calibration: Sequence[float]) -> None:
        self.decoding, self.calibration = decoding, calibration

    def step(self, log_probs: Tensor, lengths: Tensor) -> None:
        """Hear the next frames; see :class:`~ds2.decoding.decoder.Decoding`."""
        self.decoding.step(log_probs, lengths)

    def best(self) -> list[Hypothesis]:
        """The best so far; see :class:`~ds2.decoding.decoder.Decoding`."""
        return [calibrated(h, self.calibration) for h in self.decoding.best()]

    def finish(self) -> list[list[Hypothesis]]:
        """The N best; see :class:`~ds2.decoding.decoder.Decoding`."""
        return [[calibrated(h, self.calibration) for h in row] for row in self.decoding.finish()]


def calibrated(hypothesis: Hypothesis, calibration: Sequence[float]) -> Hypothesis:
    """Return the hypothesis with its words' confidences calibrated."""
    if not hypothesis.words or tuple(calibration) == AS_IT_IS:
        return hypothesis
    values = calibrate(np.array([word.confidence for word in hypothesis.words]), calibration).tolist()
    words = (replace(word, confidence=value) for word, value in zip(hypothesis.words, values, strict=True))
    return replace(hypothesis, words=tuple(words))


def calibrate(confidences: NDArray[np.float64], calibration: Sequence[float]) -> NDArray[np.float64]:
    """Apply a (slope, offset) to confidences (N,) of 0 to 1."""
    slope, offset = calibration
    return _sigmoid(slope * _logit(confidences) + offset)


def judge(reference: Sequence[str], words: Sequence[str]) -> list[bool]:
    """Return whether each recognised word is right, by its alignment to the reference."""
    return [edit == CORRECT for edit in align(reference, words) if edit != DELETION]


def fit_calibration(confidences: Iterable[float], right: Iterable[bool]) -> tuple[float, float]:
    """Return the (slope, offset) under which words were most probably right or wrong as they were.

    Args:
        confidences: of recognised words, 0 to 1, as a decoder without calibration gives them.
        right: whether each is right.

    Raises:
        ValueError: no words, or all of them right or all wrong: nothing to fit.
    """
    inputs = _logit(np.fromiter(confidences, np.float64))
    targets = np.fromiter(right, np.float64)
    if not 0 < targets.sum() < len(targets):
        raise ValueError(f"{len(targets)} words, {int(targets.sum())} of them right: a calibration needs some of both")
    design, weights = np.stack([inputs, np.ones_like(inputs)], 1), np.zeros(2)

    def loss(weights: NDArray[np.float64]) -> float:
        return float(np.logaddexp(0, (1 - 2 * targets) * (design @ weights)).sum() + _RIDGE / 2 * weights @ weights)

    for _ in range(_NEWTON_STEPS):
        predicted = _sigmoid(design @ weights)
        downhill = design.T @ (targets - predicted) - _RIDGE * weights
        curvature = (design * (predicted * (1 - predicted))[:, None]).T @ design + _RIDGE * np.eye(2)
        step = np.linalg.solve(curvature, downhill)
        while loss(weights + step) > loss(weights) and np.abs(step).max() > _LEAST:  # Newton's step may go too far
            step = step / 2
        weights = weights + step
    return float(weights[0]), float(weights[1])


def _sigmoid(values: NDArray[np.float64]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = 0.5 * (1 + np.tanh(values / 2))  # does not overflow
    return found


def _logit(values: NDArray[np.float64]) -> NDArray[np.float64]:
    held = np.clip(values, _LEAST, 1 - _LEAST)
    odds: NDArray[np.float64] = np.log(held / (1 - held))
    return odds
