"""Alphabets, language models, log-probs and brute force that the tests of decoders share."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ds2.config.schema import DecodeConfig
from ds2.lm.files import read_arpa
from ds2.lm.ngram import NGram
from ds2.text.alphabet import Alphabet

CHARACTERS = Alphabet(("", " ", "a", "b"))
PIECES = Alphabet(("", "\u2581a", "b", "\u2581b"))
CPU = torch.device("cpu")
WIDE = DecodeConfig(method="beam", beam=300, prune=1e9, label_min_log_prob=-1e9, alpha=0.7, beta=0.4, nbest=4)

WORD_ARPA = """\\data\\
ngram 1=6
ngram 2=4

\\1-grams:
-1.0\t<unk>\t0
-99\t<s>\t-0.3
-0.9\t</s>\t0
-0.6\ta\t-0.2
-0.7\tab\t-0.4
-1.1\tba\t-0.1

\\2-grams:
-0.2\t<s> ab
-0.3\ta ab
-0.5\tab ba
-0.4\tba </s>

\\end\\
"""
LABEL_ARPA = """\\data\\
ngram 1=6
ngram 2=3

\\1-grams:
-2.0\t<unk>\t0
-99\t<s>\t-0.3
-0.9\t</s>\t0
-0.6\t{0}\t-0.2
-0.7\t{1}\t-0.4
-0.8\t{2}\t-0.1

\\2-grams:
-0.2\t<s> {1}
-0.3\t{0} {1}
-0.5\t{1} {2}

\\end\\
"""


def language_model(folder: Path, unit: str) -> NGram:
    tokens = ("<space>", "a", "b") if unit == "character" else PIECES.symbols[1:]
    path = folder / f"{unit}.arpa"
    path.write_text(WORD_ARPA if unit == "word" else LABEL_ARPA.format(*tokens), encoding="utf-8")
    return replace(read_arpa(path), unit=unit)


def random_log_probs(frames: int, batch: int, labels: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(frames, batch, labels, generator=generator) * 1.5).log_softmax(2)


def spell(labels: tuple[int, ...], alphabet: Alphabet) -> str:
    return " ".join(alphabet.decode(labels).replace("\u2581", " ").split())


def brute_force(
    log_probs: Tensor, alphabet: Alphabet, worth: Callable[[tuple[int, ...]], float]
) -> list[tuple[str, float]]:
    """Q of every label sequence, idle spaces taken out, from the sum over all its alignments."""
    totals: dict[tuple[int, ...], float] = defaultdict(float)
    for path in itertools.product(range(log_probs.shape[1]), repeat=len(log_probs)):
        labels = tuple(label for label, _ in itertools.groupby(path) if label)
        if alphabet is CHARACTERS:
            labels = tuple(alphabet.encode(alphabet.decode(labels)))
        totals[labels] += math.exp(sum(float(log_probs[t, label]) for t, label in enumerate(path)))
    scored = [(spell(labels, alphabet), math.log(total) + worth(labels)) for labels, total in totals.items()]
    return sorted(scored, key=lambda item: -item[1])


def word_worth(lm: NGram | None, options: DecodeConfig, alphabet: Alphabet) -> Callable[[tuple[int, ...]], float]:
    def worth(labels: tuple[int, ...]) -> float:
        words = spell(labels, alphabet).split()
        hot = options.hot_word_bonus * sum(word in options.hot_words for word in words)
        if lm is None:
            return hot
        if options.lexicon and not all(word in lm.ids or word in options.hot_words for word in words):
            return -math.inf
        unknown = options.unknown_score * sum(word not in lm.ids for word in words)
        return options.alpha * (sum(lm.sentence(words)) + unknown) + options.beta * len(words) + hot

    return worth


def label_worth(lm: NGram, options: DecodeConfig, alphabet: Alphabet) -> Callable[[tuple[int, ...]], float]:
    def worth(labels: tuple[int, ...]) -> float:
        tokens = [alphabet.symbols[label] for label in labels]
        return options.alpha * sum(lm.sentence(tokens)) + options.beta * len(spell(labels, alphabet).split())

    return worth


def speechlike(frames: int, batch: int, labels: int) -> Tensor:
    """Peaky log-probs with runs of blank, uncertain labels between them, in which some utterances end in a space."""
    generator = torch.Generator().manual_seed(4)
    path = torch.randint(1, labels, (frames, batch), generator=generator)
    path[torch.rand(frames, batch, generator=generator) < 0.6] = 0
    logits = torch.randn(frames, batch, labels, generator=generator) * 2
    logits.scatter_add_(2, path[..., None], torch.full((frames, batch, 1), 6.0))
    logits[frames // 3 : frames // 2, :, 1:] -= 12.0
    return logits.log_softmax(2)
