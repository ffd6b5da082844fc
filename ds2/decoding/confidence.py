"""Calibration of word confidences by a logistic function that is fitted on a dev set.

A confidence p becomes sigmoid(slope x logit(p) + offset) (Platt 1999, "Probabilistic outputs for support vector
machines"). Slope 1 and offset 0 change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ds2.decoding.hypothesis import Hypothesis
from ds2.scoring.wer import CORRECT, DELETION, align

IDENTITY = (1.0, 0.0)
_EPSILON = 1e-3  # confidences are clipped to this distance from 0 and 1
_NEWTON_STEPS = 30
_RIDGE = 1e-3


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
