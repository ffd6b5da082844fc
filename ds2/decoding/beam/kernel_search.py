"""The batched beam search as one GPU kernel: what `ds2_ops.ctc.beam` needs of a fusion, and when it can be used."""

from __future__ import annotations

import logging

import torch
from ds2_ops.ctc import beam as kernel
from torch import Tensor

from ds2.config.schema import DecodeConfig
from ds2.decoding.beam.fusion import Fusion
from ds2.lm.ngram import UNKNOWN, NGram

log = logging.getLogger(__name__)


class KernelSearch:
    """The search of `BatchedBeamSearch` with the same settings and results, all frames in one launch."""

    def __init__(self, fusion: Fusion, options: DecodeConfig) -> None:
        self.beam = options.beam
        self.fusion = fusion
        self.grams = None if fusion.lm is None else grams_tables(fusion.lm, fusion)
        self.weights = kernel.Weights(
            alpha=fusion.alpha,
            beta=fusion.beta,
            unknown_score=fusion.unknown_score,
            prune=options.prune,
            closed=fusion.lexicon,
        )
        self._told = False

    def fits(self, log_probs: Tensor) -> bool:
        """Whether the kernel takes log-probs (T, B, V); where not, the reason is logged once."""
        frames, _, labels = log_probs.shape
        device = self.fusion.device
        reason = kernel.why_not(self.beam, labels, frames, self.grams.order if self.grams else 0, device)
        if reason is not None and not self._told:
            self._told = True
            log.warning("the beam search runs in PyTorch, which is many times slower: %s", reason)
        return reason is None

    def search(
        self,
        log_probs: Tensor,
        frames: Tensor,
        going_on: kernel.Found | None = None,
        places: Tensor | None = None,
        roots: Tensor | None = None,
    ) -> kernel.Found:
        """Search packed log-probs (T, B, V) with (B,) int64 frames each; the rest as the kernel takes it."""
        lexicon = lexicon_tables(self.fusion)  # hot words come and go
        return kernel.search(log_probs, frames, self.beam, self.weights, lexicon, self.grams, going_on, places, roots)


def lexicon_tables(fusion: Fusion) -> kernel.Lexicon:
    """Return the spelling and the trie of a fusion as the kernel reads them."""
    spelling, nodes = fusion.spelling, fusion.forest.nodes
    return kernel.Lexicon(
        starts_word=spelling.starts_word,
        characters=spelling.characters,
        counts=spelling.counts,
        children=nodes.children,
        word=nodes.word,
        is_word=nodes.is_word,
        hot=nodes.hot,
        unfinished=nodes.unfinished,
        follow=nodes.follow,
        space=spelling.space,
        has_hot=fusion.forest.has_hot,
    )


def grams_tables(lm: NGram, fusion: Fusion) -> kernel.Grams:
    """Return a model on the fusion's device as the kernel reads it: with the first entry of every state."""
    size = len(lm.vocabulary)
    starts = torch.arange(lm.backoff.numel() + 1, device=lm.keys.device) * size
    return kernel.Grams(
        keys=lm.keys,
        log_prob=lm.log_prob,
        next_state=lm.next_state,
        backoff=lm.backoff,
        suffix=lm.suffix,
        first=torch.searchsorted(lm.keys, starts).int(),
        label_ids=fusion.label_ids.int() if fusion.by_label else None,
        vocabulary=size,
        order=lm.order,
        unknown=lm.ids[UNKNOWN],
        start=lm.start(),
    )


def read_labels(traced: Tensor) -> list[list[tuple[int, ...]]]:
    """Turn (B, N, T) int16 labels, the last first and -1 at the end, into tuples; waits for the device."""
    rows = traced.cpu().numpy()
    ended = (rows < 0).argmax(2)
    return [
        [tuple(labels[:count][::-1].tolist()) for labels, count in zip(row, counts, strict=True)]
        for row, counts in zip(rows, ended, strict=True)
    ]
