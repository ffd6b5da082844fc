"""Calibration of word confidences by a logistic function that is fitted on a dev set.

A confidence p becomes sigmoid(slope x logit(p) + offset) (Platt 1999, "Probabilistic outputs for support vector
machines"). Slope 1 and offset 0 change nothing.
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

IDENTITY = (1.0, 0.0)
_EPSILON = 1e-3  # confidences are clipped to this distance from 0 and 1
_NEWTON_STEPS = 30
_RIDGE = 1e-3


class CalibratedDecoder:
    """Wraps a decoder and calibrates the confidences of its words."""

    def __init__(self, decoder: Decoder, calibration: Sequence[float]) -> None:
        self.decoder, self.calibration = decoder, calibration
        self.hot_characters = decoder.hot_characters

    def decode(self, log_probs: Tensor, lengths: Tensor) -> list[list[Hypothesis]]:
        """Decode a batch; see :class:`~ds2.decoding.decoder.Decoder`."""
        return [[calibrated(h, self.calibration) for h in row] for row in self.decoder.decode(log_probs, lengths)]

    def start(self, rows: int = 1, hot_words: HotWords | None = None) -> CalibratedDecoding:
        """Begin streams; see :class:`~ds2.decoding.decoder.Decoder`."""
        return CalibratedDecoding(self.decoder.start(rows, hot_words), self.calibration)

    def best(self, decodings: Sequence[CalibratedDecoding]) -> list[list[Hypothesis]]:
        """Return the best hypotheses of each decoding."""
        best = self.decoder.best([d.decoding for d in decodings])
        return [[calibrated(h, self.calibration) for h in row] for row in best]

    def finish(self, decodings: Sequence[CalibratedDecoding]) -> list[list[list[Hypothesis]]]:
        """Return the N best hypotheses of each decoding."""
        nbest = self.decoder.finish([d.decoding for d in decodings])
        return [[[calibrated(h, self.calibration) for h in row] for row in rows] for rows in nbest]

    def step(self, decodings: Sequence[CalibratedDecoding], log_probs: Tensor, lengths: Tensor) -> None:
        """Decode the next frames; see :class:`~ds2.decoding.decoder.Decoder`."""
        self.decoder.step([d.decoding for d in decodings], log_probs, lengths)


class CalibratedDecoding:
    """Wraps a decoding and calibrates the confidences of its words."""

    def __init__(self, decoding: Decoding, calibration: Sequence[float]) -> None:
        self.decoding, self.calibration = decoding, calibration

    def step(self, log_probs: Tensor, lengths: Tensor) -> None:
        """Decode the next frames; see :class:`~ds2.decoding.decoder.Decoding`."""
        self.decoding.step(log_probs, lengths)

    def best(self) -> list[Hypothesis]:
        """Return the best hypotheses so far; see :class:`~ds2.decoding.decoder.Decoding`."""
        return [calibrated(h, self.calibration) for h in self.decoding.best()]

    def finish(self) -> list[list[Hypothesis]]:
        """Return the N best hypotheses; see :class:`~ds2.decoding.decoder.Decoding`."""
        return [[calibrated(h, self.calibration) for h in row] for row in self.decoding.finish()]


def calibrated(hypothesis: Hypothesis, calibration: Sequence[float]) -> Hypothesis:
    """Return the hypothesis with calibrated word confidences."""
    if not hypothesis.words or tuple(calibration) == IDENTITY:
        return hypothesis
    values = calibrate(np.array([word.confidence for word in hypothesis.words]), calibration).tolist()
    words = (replace(word, confidence=value) for word, value in zip(hypothesis.words, values, strict=True))
    return replace(hypothesis, words=tuple(words))


def calibrate(confidences: NDArray[np.float64], calibration: Sequence[float]) -> NDArray[np.float64]:
    """Apply (slope, offset) to confidences (N,) between 0 and 1."""
    slope, offset = calibration
    return _sigmoid(slope * _logit(confidences) + offset)


def correct_words(reference: Sequence[str], words: Sequence[str]) -> list[bool]:
    """Return for each recognised word whether it is correct, by its alignment to the reference."""
    return [edit == CORRECT for edit in align(reference, words) if edit != DELETION]


def fit_calibration(confidences: Iterable[float], right: Iterable[bool]) -> tuple[float, float]:
    """Fit (slope, offset) by maximum likelihood.

    Args:
        confidences: of recognised words, 0 to 1, of a decoder without calibration.
        right: whether each word is correct.

    Raises:
        ValueError: there are no words, or all are right, or all are wrong.
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
        while loss(weights + step) > loss(weights) and np.abs(step).max() > _EPSILON:  # a Newton step may overshoot
            step = step / 2
        weights = weights + step
    return float(weights[0]), float(weights[1])


def _sigmoid(values: NDArray[np.float64]) -> NDArray[np.float64]:
    result: NDArray[np.float64] = 0.5 * (1 + np.tanh(values / 2))  # does not overflow
    return result


def _logit(values: NDArray[np.float64]) -> NDArray[np.float64]:
    clipped = np.clip(values, _EPSILON, 1 - _EPSILON)
    odds: NDArray[np.float64] = np.log(clipped / (1 - clipped))
    return odds
