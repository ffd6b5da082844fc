"""The batched beam search as a decoder's: on whichever device, its prefixes ranked, read out and given texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from ds2_ops.ctc import beam as kernel
from numpy.typing import NDArray
from torch import Tensor

from ds2.config.schema import DecodeConfig
from ds2.decoding.beam.fusion import LENGTH, Fusion
from ds2.decoding.beam.kernel_search import KernelSearch, read_labels
from ds2.decoding.beam.torch_search import TorchSearch
from ds2.decoding.decoder import Search
from ds2.decoding.frames import NONE, pack, pack_frames
from ds2.decoding.hypothesis import Hypothesis, spell_words
from ds2.lm.ngram import NGram
from ds2.text.alphabet import BLANK, WORD_MARK, Alphabet


@dataclass(frozen=True)
class Found:
    """The N best label sequences of each utterance, best first, on the CPU."""

    labels: list[list[tuple[int, ...]]]
    scores: NDArray[np.float64]  # (B, N, 4): total, acoustic, language model, bonus; total -inf: none


class BatchedBeamSearch:
    """Searches batches of any sizes with fixed settings; not to be shared between threads."""

    def __init__(self, fusion: Fusion, options: DecodeConfig) -> None:
        self.fusion, self.options = fusion, options
        self.kernel = KernelSearch(fusion, options) if fusion.device.type == "cuda" else None

    def search(self, log_probs: Tensor, lengths: Tensor) -> Found:
        """Find the best label sequences.

        Args:
            log_probs: (T, B, V) float32 on the fusion's device, finite or -inf, checked by the caller.
            lengths: (B,) CPU int64, at least 1.
        """
        if self.kernel is not None and self.kernel.fits(log_probs):
            packed, counts = pack(log_probs, lengths, self.options)
            end = self.kernel.search(packed, counts)
            table, entries = _rank(self.fusion, end, self.options.nbest)
            return Found(read_labels(kernel.trace(entries, end.grown)), table.cpu().numpy())
        frames = pack_frames(log_probs, lengths, self.options)
        run = TorchSearch(self.fusion, frames, self.options.beam)
        if log_probs.is_cuda:
            run.advance_by_graph()
        else:
            for _ in range(len(frames.log_probs)):
                run.step()
        table, entries = _rank(self.fusion, run, self.options.nbest)
        return Found(_read_out(entries.cpu().numpy(), run.grown_from, run.grown_by, run.beam), table.cpu().numpy())


def _rank(fusion: Fusion, end: kernel.Found | TorchSearch, nbest: int) -> tuple[Tensor, Tensor]:
    """Join prefixes that differ in a last space only: scores (B, N, 4) as in `Found` and entries (B, N) of the best."""
    acoustic = torch.logaddexp(*end.halves)
    log_prob, bonus, fused = fusion.finish(end.integers, end.floats, acoustic > NONE)
    hashes, parents, _, entry = end.names.unbind(-1)
    beam = hashes.shape[1]
    preferred = torch.arange(beam, device=hashes.device).expand_as(hashes)
    if fusion.spelling.space >= 0:
        ends_in_space = (end.integers[..., LENGTH] == 0) & (hashes != 0)
        hashes = torch.where(ends_in_space, parents, hashes)
        preferred = preferred + beam * ends_in_space
    same = hashes[:, None, :] == hashes[..., None]
    joined = torch.where(same, acoustic[:, None, :], NONE).logsumexp(2)
    first = torch.where(same, preferred[:, None, :], 2 * beam).amin(2) == preferred
    total = torch.where(first, joined + fused, NONE)
    _, slots = total.topk(min(nbest, beam), 1)
    table = torch.stack([total, joined, log_prob, bonus], -1).gather(1, slots[..., None].expand(-1, -1, 4))
    return table, entry.gather(1, slots)


def _read_out(
    entries: NDArray[np.int64], grown_from: Tensor, grown_by: Tensor, beam: int
) -> list[list[tuple[int, ...]]]:
    """Follow entries (B, N) back to the root, all at once, one label a turn."""
    parents, labels = grown_from.cpu().numpy(), grown_by.cpu().numpy()
    rows = np.arange(len(entries))[:, None]
    turns: list[NDArray[np.int64]] = []
    while entries.any():
        frame, slot = np.divmod(np.maximum(entries - 1, 0), beam)
        live = entries > 0
        turns.append(np.where(live, labels[frame, rows, slot], BLANK).astype(np.int64))
        entries = np.where(live, parents[frame, rows, slot], 0)
    columns = np.stack(turns[::-1], -1) if turns else np.zeros((*entries.shape, 0), np.int64)
    return [[tuple(column[column != BLANK].tolist()) for column in row] for row in columns]


def batched_search(alphabet: Alphabet, options: DecodeConfig, lm: NGram | None, device: torch.device) -> Search:
    """The batched prefix beam search on the model's device; its results as hypotheses."""
    beams = BatchedBeamSearch(Fusion(alphabet, options, lm, device), options)
    lexicon = {*lm.vocabulary, *options.hot_words} if options.lexicon and lm is not None else None

    def hypothesis(labels: tuple[int, ...], parts: Sequence[float]) -> Hypothesis:
        if lexicon is not None:
            words = spell_words([(label, at, 0, 0.0) for at, label in enumerate(labels)], alphabet, 1.0)
            if words and words[-1].text not in lexicon:  # no prefix ended with a whole word
                labels = labels[: int(words[-1].start_s)]
        if labels and alphabet.symbols[labels[-1]].isspace():
            labels = labels[:-1]
        text = " ".join(alphabet.decode(labels).replace(WORD_MARK, " ").split())
        score, acoustic, log_prob, bonus = parts
        return Hypothesis(text, score, labels, (), acoustic, log_prob, bonus)

    def search(log_probs: Tensor, lengths: Tensor) -> list[list[Hypothesis]]:
        found = beams.search(log_probs, lengths)
        return [
            _distinct([hypothesis(*pair) for pair in zip(labels, scores, strict=True) if pair[1][0] > -torch.inf])
            for labels, scores in zip(found.labels, found.scores.tolist(), strict=True)
        ]

    return search


def _distinct(hypotheses: Sequence[Hypothesis]) -> list[Hypothesis]:
    """The best of each text (pieces spell a text in several ways); an empty one where the lexicon let none through."""
    best = {h.text: h for h in reversed(hypotheses)}
    kept = [h for h in hypotheses if best[h.text] is h]
    return kept or [Hypothesis("", -torch.inf, (), (), -torch.inf)]
