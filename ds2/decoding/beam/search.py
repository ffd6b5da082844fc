"""The batched beam search on whichever device: prefixes ranked and read out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from ds2_ops.ctc import beam as kernel
from numpy.typing import NDArray
from torch import Tensor

from ds2.config.schema import DecodeConfig
from ds2.decoding.beam.fusion import LENGTH, Fusion
from ds2.decoding.beam.kernel_search import KernelSearch, read_labels
from ds2.decoding.beam.torch_search import HASH, PARENT, Beams, search
from ds2.decoding.frames import NONE, pack, pack_next

Labels = tuple[int, ...]


@dataclass(frozen=True)
class Found:
    """The N best label sequences of each utterance, best first, on the CPU."""

    labels: list[list[Labels]]
    scores: NDArray[np.float64]  # (B, N, 4): total, acoustic, language model, bonus; total -inf: none


class BatchedBeamSearch:
    """Searches batches of any sizes with fixed settings; not to be shared between threads."""

    def __init__(self, fusion: Fusion, options: DecodeConfig) -> None:
        self.fusion, self.options = fusion, options
        self.kernel = KernelSearch(fusion, options) if fusion.device.type == "cuda" else None

    def search(self, log_probs: Tensor, lengths: Tensor) -> Found:
        """Find the best label sequences of whole utterances: by one launch of the kernel where it takes them.

        Args:
            log_probs: (T, B, V) float32 on the fusion's device, finite or -inf, checked by the caller.
            lengths: (B,) CPU int64, at least 1.
        """
        if self.kernel is not None and self.kernel.fits(log_probs):
            packed, counts = pack(log_probs, lengths, self.options)
            end = self.kernel.search(packed, counts)
            table, slots = _rank(self.fusion, torch.logaddexp(*end.halves), end, self.options.nbest)
            entries = end.names[..., _ENTRY].gather(1, slots)
            return Found(read_labels(kernel.trace(entries, end.grown)), table.cpu().numpy())
        return self.found(self.closed(self.hear(self.start(len(lengths), log_probs.shape[2]), log_probs, lengths)))

    def start(self, batch: int, labels: int) -> Beams:
        """Begin utterances that come chunk by chunk."""
        return Beams.start(self.fusion, batch, self.options.beam, labels)

    def hear(self, beams: Beams, log_probs: Tensor, lengths: Tensor) -> Beams:
        """Hear the next frames, as in `search` but for lengths, that may be 0; a run of blanks at their end waits."""
        packed, counts, run = pack_next(log_probs, lengths, self.options, beams.run)
        heard = search(self.fusion, beams, packed, counts, self.options.prune)
        return replace(heard, run=run)

    def closed(self, beams: Beams) -> Beams:
        """Hear the runs of blanks that waited, as the utterances end."""
        run = beams.run
        heard = search(self.fusion, beams, run.log_probs[None], run.there.long(), self.options.prune)
        return replace(heard, run=run.emptied())

    def found(self, beams: Beams, certain: Sequence[Sequence[int]] = ()) -> Found:
        """Rank prefixes and read them out; `certain` labels of each utterance come before those of its prefixes."""
        table, slots = _rank(self.fusion, beams.acoustic, beams, self.options.nbest)
        spelled = beams.spelled.gather(1, slots[..., None].expand(-1, -1, beams.spelled.shape[2])).cpu().numpy()
        counts = beams.counts.gather(1, slots).tolist()
        before = [tuple(labels) for labels in certain] or [()] * len(spelled)
        labels = [
            [first + tuple(prefix[:count].tolist()) for prefix, count in zip(prefixes, sizes, strict=True)]
            for first, prefixes, sizes in zip(before, spelled, counts, strict=True)
        ]
        return Found(labels, table.cpu().numpy())


_ENTRY = 3  # of the names that the kernel gives


def _rank(fusion: Fusion, acoustic: Tensor, end: kernel.Found | Beams, nbest: int) -> tuple[Tensor, Tensor]:
    """Join prefixes that differ in a last space only: scores (B, N, 4) as in `Found` and slots (B, N) of the best."""
    log_prob, bonus, fused = fusion.finish(end.integers, end.floats, acoustic > NONE)
    hashes, parents = end.names[..., HASH], end.names[..., PARENT]
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
    return table, slots
