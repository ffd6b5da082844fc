"""A second look at what a search found: its N best ranked anew with a recurrent language model."""

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
"""Takes the N best of each utterance, best first, without word times; gives what is to be kept of them."""


def searched(options: DecodeConfig) -> DecodeConfig:
    """The settings of the search: it gives all hypotheses that `make_second_pass` ranks."""
    if not options.rescore:
        return options
    return replace(options, nbest=max(options.nbest, options.rescore_hypotheses))


def make_second_pass(options: DecodeConfig, alphabet: Alphabet, model: RecurrentLM) -> SecondPass:
    """What ranks the hypotheses of a search anew by the model of `recurrent_model`."""
    return Rescorer(model, options, alike=alphabet.normalises_as(model.alphabet))


def recurrent_model(options: DecodeConfig, alphabet: Alphabet, device: torch.device) -> RecurrentLM | None:
    """Read the model that `decode.rescore` names; None where it names none.

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
    return model


class Rescorer:
    """Ranks hypotheses by Q(y) with a mixture of both models' log-probs in place of the n-gram's.

        Q(y) = log p_ctc(y|x) + alpha ((1 - w) log p_ngram(y) + w log p_recurrent(y)) + beta words(y)

    Args:
        model: the recurrent one.
        options: alpha, w (`rescore_weight`) and how many hypotheses are kept (`nbest`).
        alike: what the network writes is normalised as the model's texts were, whatever the labels of both.
    """

    def __init__(self, model: RecurrentLM, options: DecodeConfig, *, alike: bool) -> None:
        self.model, self.options, self.alike = model, options, alike

    def __call__(self, rows: Rows) -> Rows:
        """Rank the hypotheses of each utterance; all utterances' are scored in one batch, each text once."""
        heard = [row for row in rows if row != [EMPTY]]
        texts = sorted({h.text for row in heard for h in row})
        scores = dict(zip(texts, self.model.score(texts, normalised=self.alike), strict=True))
        return [self._ranked(row, scores) if row != [EMPTY] else row for row in rows]

    def _ranked(self, row: list[Hypothesis], scores: Mapping[str, float]) -> list[Hypothesis]:
        """The best of a row; only they are made anew, which takes longer than to rank all."""
        share = self.options.alpha * self.options.rescore_weight
        best = sorted(row, key=lambda h: share * (h.lm - scores[h.text]) - h.score)[: self.options.nbest]
        return [mixed(h, scores[h.text], self.options) for h in best]


def mixed(hypothesis: Hypothesis, log_prob: float, options: DecodeConfig) -> Hypothesis:
    """The hypothesis with the recurrent model's natural log-prob mixed in."""
    lm = (1 - options.rescore_weight) * hypothesis.lm + options.rescore_weight * log_prob
    return replace(hypothesis, lm=lm, score=hypothesis.score + options.alpha * (lm - hypothesis.lm))
