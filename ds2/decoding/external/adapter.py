"""What the adapters of other packages share."""

from __future__ import annotations

import importlib
import os
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ds2.config.schema import DecodeConfig
from ds2.decoding.frames import pack
from ds2.decoding.hypothesis import DecodeError, Hypothesis
from ds2.lm.ngram import NGram
from ds2.text.alphabet import Alphabet


def find_package(name: str, project: str, method: str) -> Any:
    """Import what a decode method needs; a DecodeError names the package where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DecodeError(
            f"decode.method={method} needs the package {project}: pip install {project}, or take decode.method=beam"
        ) from error


def thread_count(options: DecodeConfig) -> int:
    """Return how many utterances are searched at once."""
    return options.threads or len(os.sched_getaffinity(0))


def packed_rows(log_probs: Tensor, lengths: Tensor, options: DecodeConfig) -> list[NDArray[np.float32]]:
    """Return (T'', V) of each utterance as `pack` gives them: less frames to search, the same result."""
    packed, counts = pack(log_probs.cpu(), lengths, options)
    rows = packed.transpose(0, 1).contiguous().numpy()
    return [row[:count] for row, count in zip(rows, counts.tolist(), strict=True)]


class Rescorer:
    """Splits the score of a text as Q(y) = acoustic + alpha x lm + bonus, so that all decoders report alike."""

    def __init__(self, alphabet: Alphabet, options: DecodeConfig, lm: NGram | None) -> None:
        self.alphabet, self.options, self.lm = alphabet, options, lm
        self.beta = options.beta if lm is not None else 0.0

    def hypothesis(self, text: str, acoustic: float) -> Hypothesis:
        """Return the hypothesis of a text, without word times."""
        words, log_prob = text.split(), 0.0
        if self.lm is not None:
            state = self.lm.start()
            for word in words:
                score, state = self.lm.score(state, word)
                log_prob += score + (0.0 if word in self.lm.ids else self.options.unknown_score)
            log_prob += self.lm.finish(state)
        hot = sum(word in self.options.hot_words for word in words) * self.options.hot_word_bonus
        bonus = self.beta * len(words) + hot
        labels = tuple(self.alphabet.spell(" ".join(words)))
        score = acoustic + (self.options.alpha * log_prob if self.lm is not None else 0.0) + bonus
        return Hypothesis(" ".join(words), score, labels, (), acoustic, log_prob, bonus)

    def split(self, text: str, score: float) -> Hypothesis:
        """Return the hypothesis of a text whose whole Q(y) is `score`."""
        found = self.hypothesis(text, 0.0)
        return replace(found, score=score, acoustic=score - found.score)
