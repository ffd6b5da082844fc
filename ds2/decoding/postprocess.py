"""Hypotheses after a search: the N best ranked again with a recurrent language model, and calibrated confidences.

The calibration is a logistic function fitted on a dev set: a confidence p becomes sigmoid(slope x logit(p) + offset)
(Platt 1999, "Probabilistic outputs for support vector machines"). Slope 1 and offset 0 change nothing.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ds2.config.schema import DecodeConfig
from ds2.decoding.hypothesis import EMPTY, Hypothesis
from ds2.lm.ngram import LanguageModelError
from ds2.lm.recurrent import RecurrentLM, load_recurrent
from ds2.scoring.wer import CORRECT, DELETION, align
from ds2.text.alphabet import WORD_MARK, Alphabet, describe

Rows = list[list[Hypothesis]]
SecondPass = Callable[[Rows], Rows]
"""Maps the N best of each utterance, best first and without word times, to a shorter list in a new order."""


def load_second_pass(options: DecodeConfig, alphabet: Alphabet, device: torch.device) -> SecondPass | None:
    """Load the model that `decode.rescore` names; return None if it names none.

    Raises:
        LanguageModelError: it is no recurrent model, or cannot read what the network writes.
        CheckpointError: the file is missing or damaged.
    """
    if not options.rescore:
        return None
    model = load_recurrent(Path(options.rescore), device)
    written = "".join(alphabet.symbols).replace(WORD_MARK, " ")
    _, unknown = model.alphabet.normalise(" ".join(written))
    if unknown:
        raise LanguageModelError(
            f"{options.rescore} does not know {describe(unknown)}, which this network writes: train one with "
            "`ds2 lm train --model` of the network"
        )
    normalised = alphabet.normalises_as(model.alphabet)
    return partial(rank_again, model=model, options=options, normalised=normalised)


def rank_again(rows: Rows, model: RecurrentLM, options: DecodeConfig, *, normalised: bool) -> Rows:
    """Rank hypotheses by Q(y) with a mixture of the log-probs of both models instead of the n-gram model's.

        Q(y) = log p_ctc(y|x) + alpha ((1 - w) log p_ngram(y) + w log p_recurrent(y)) + beta words(y)

    All texts are scored in one batch, each once.

    Args:
        rows: the hypotheses of each utterance.
        options: alpha, w (`rescore_weight`) and the number of hypotheses to return (`nbest`).
        normalised: the texts of the network are already normalised as the texts of the model were.
    """
    texts = sorted({h.text for row in rows if row != [EMPTY] for h in row})
    scores = dict(zip(texts, model.score(texts, normalised=normalised), strict=True))
    share = options.alpha * options.rescore_weight

    def ranked(row: list[Hypothesis]) -> list[Hypothesis]:
        best = sorted(row, key=lambda h: share * (h.lm - scores[h.text]) - h.score)[: options.nbest]
        return [mix_scores(h, scores[h.text], options) for h in best]  # only these: it costs more than ranking all

    return [ranked(row) if row != [EMPTY] else row for row in rows]


def mix_scores(hypothesis: Hypothesis, log_prob: float, options: DecodeConfig) -> Hypothesis:
    """Return the hypothesis with the recurrent model's natural log-prob mixed into `lm` and `score`."""
    lm = (1 - options.rescore_weight) * hypothesis.lm + options.rescore_weight * log_prob
    return replace(hypothesis, lm=lm, score=hypothesis.score + options.alpha * (lm - hypothesis.lm))


IDENTITY = (1.0, 0.0)
_EPSILON = 1e-3  # confidences are clipped to this distance from 0 and 1
_NEWTON_STEPS = 30
_RIDGE = 1e-3


def calibrated(hypothesis: Hypothesis, calibration: Sequence[float]) -> Hypothesis:
    """Return a hypothesis with calibrated confidences of its words."""
    if not hypothesis.words:
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
    """Fit (slope, offset) by maximum likelihood; if no word is right or none is wrong, `IDENTITY`.

    Args:
        confidences: of recognised words, 0 to 1, of a decoder without calibration.
        right: whether each word is correct.
    """
    inputs = _logit(np.fromiter(confidences, np.float64))
    targets = np.fromiter(right, np.float64)
    if not 0 < targets.sum() < len(targets):
        return IDENTITY
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
