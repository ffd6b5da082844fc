"""The second pass: the N best hypotheses of a search, ranked again with a recurrent language model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from ds2.config.schema import DecodeConfig
from ds2.decoding.hypothesis import EMPTY, Hypothesis
from ds2.lm.ngram import LanguageModelError
from ds2.lm.recurrent import RecurrentLM, load_recurrent
from ds2.text.alphabet import WORD_MARK, Alphabet, describe

Rows = list[list[Hypothesis]]
SecondPass = Callable[[Rows], Rows]
"""Maps the N best of each utterance, best first and without word times, to a shorter list in a new order."""


def first_pass_options(options: DecodeConfig) -> DecodeConfig:
    """Return the settings of the search, which must return all hypotheses that the second pass ranks."""
    if not options.rescore:
        return options
    return replace(options, nbest=max(options.nbest, options.rescore_hypotheses))


def load_second_pass(options: DecodeConfig, alphabet: Alphabet, device: torch.device) -> NBestRescorer | None:
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
    return NBestRescorer(model, options, normalised=alphabet.normalises_as(model.alphabet))


class NBestRescorer:
    """Ranks hypotheses by Q(y) with a mixture of the log-probs of both models instead of the n-gram model's.

        Q(y) = log p_ctc(y|x) + alpha ((1 - w) log p_ngram(y) + w log p_recurrent(y)) + beta words(y)

    Args:
        model: the recurrent one.
        options: alpha, w (`rescore_weight`) and the number of hypotheses to return (`nbest`).
        normalised: the texts of the network are already normalised as the texts of the model were.
    """

    def __init__(self, model: RecurrentLM, options: DecodeConfig, *, normalised: bool) -> None:
        self.model, self.options, self.normalised = model, options, normalised

    def __call__(self, rows: Rows) -> Rows:
        """Rank the hypotheses of each utterance; all texts are scored in one batch, each once."""
        texts = sorted({h.text for row in rows if row != [EMPTY] for h in row})
        scores = dict(zip(texts, self.model.score(texts, normalised=self.normalised), strict=True))
        return [self._ranked(row, scores) if row != [EMPTY] else row for row in rows]

    def _ranked(self, row: list[Hypothesis], scores: Mapping[str, float]) -> list[Hypothesis]:
        """Return the best of a row; only these are built again, which costs more than ranking all."""
        share = self.options.alpha * self.options.rescore_weight
        best = sorted(row, key=lambda h: share * (h.lm - scores[h.text]) - h.score)[: self.options.nbest]
        return [mix_scores(h, scores[h.text], self.options) for h in best]


def mix_scores(hypothesis: Hypothesis, log_prob: float, options: DecodeConfig) -> Hypothesis:
    """Return the hypothesis with the recurrent model's natural log-prob mixed into `lm` and `score`."""
    lm = (1 - options.rescore_weight) * hypothesis.lm + options.rescore_weight * log_prob
    return replace(hypothesis, lm=lm, score=hypothesis.score + options.alpha * (lm - hypothesis.lm))
