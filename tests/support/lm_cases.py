"""Texts and comparisons of n-gram models that several tests share."""

from __future__ import annotations

import random

import torch

from ds2.lm.ngram import NGram


def zipf_text(lines: int = 400, words: int = 60, seed: int = 3) -> list[list[str]]:
    """Sentences with frequent and rare words, so that discounts exist at low orders and not at high ones."""
    draw = random.Random(seed)
    return [[f"w{int(words ** draw.random())}" for _ in range(draw.randint(1, 9))] for _ in range(lines)]


def same(a: NGram, b: NGram) -> bool:
    names = ("keys", "log_prob", "next_state", "backoff", "suffix")
    return a.vocabulary == b.vocabulary and all(torch.equal(getattr(a, n), getattr(b, n)) for n in names)
