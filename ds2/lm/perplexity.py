"""Perplexity of a text under a language model."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import torch

from ds2.lm.ngram import END, UNKNOWN, LanguageModelError, NGram

_BATCH_SENTENCES = 4096
_MOST_NATS = 700.0  # a token: beyond that a perplexity is no number


@dataclass
class Perplexity:
    """Scores of a text: sums of natural-log probabilities, </s> included, <s> not."""

    tokens: int = 0
    sentences: int = 0
    unknown: int = 0  # tokens outside the vocabulary
    log_prob: float = 0.0
    unknown_log_prob: float = 0.0

    def format(self) -> str:
        """One line a figure: perplexity with and without the tokens outside the vocabulary, and their rate."""
        if not self.sentences:
            raise LanguageModelError("the text to score is empty: no line holds a token")
        mean = -self.log_prob / (self.tokens + self.sentences)
        if not 0 <= mean < _MOST_NATS:
            raise LanguageModelError(
                f"the language model is damaged: it gives a token {-mean:g} on average, which is no log-prob: copy the "
                "file again or build it anew"
            )
        known = self.tokens - self.unknown + self.sentences
        return (
            f"perplexity {math.exp(mean):.2f} with OOVs, "
            f"{math.exp(-(self.log_prob - self.unknown_log_prob) / known):.2f} without\n"
            f"OOV rate {100 * self.unknown / max(1, self.tokens):.2f} % ({self.unknown} of {self.tokens} tokens, "
            f"{self.sentences} sentences)"
        )


def perplexity(model: NGram, sentences: Iterable[list[str]]) -> Perplexity:
    """Score sentences, many at a time."""
    total = Perplexity()
    remaining = iter(sentences)
    end, unknown = model.ids[END], model.ids[UNKNOWN]
    while batch := sorted((model.token_ids(s) for s in islice(remaining, _BATCH_SENTENCES)), key=len, reverse=True):
        lengths = torch.tensor([len(sentence) + 1 for sentence in batch])
        words = torch.full((len(batch), int(lengths[0])), end)
        for row, sentence in zip(words, batch, strict=True):
            row[: len(sentence)] = torch.tensor(sentence)
        words = words.to(model.keys.device)
        states = model.start_states(len(batch))
        for t in range(words.shape[1]):
            live = int((lengths > t).sum())
            scores, states = model.score_batch(states[:live], words[:live, t])
            scores = scores.double()
            total.log_prob += float(scores.sum())
            total.unknown_log_prob += float(scores[words[:live, t] == unknown].sum())
        total.sentences += len(batch)
        total.tokens += int(lengths.sum()) - len(batch)
        total.unknown += sum(sentence.count(unknown) for sentence in batch)
    return total
