"""The batched beam search on whichever device: prefixes ranked and read out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from ds2_ops.ctc import beam as kernel
from ds2_ops.ctc import labels as traces
from numpy.typing import NDArray
from torch import Tensor

from ds2.config.schema import DecodeConfig
from ds2.decoding.beam.fusion import LENGTH, Fusion
from ds2.decoding.beam.kernel_search import KernelSearch, read_labels
from ds2.decoding.beam.places import PlacedSearch, Places
from ds2.decoding.beam.torch_search import HASH, PARENT, Beams, join, search, split
from ds2.decoding.frames import NONE, pack, pack_next
from ds2.decoding.lexicon import ROOT

Labels = tuple[int, ...]
Held = Beams | list[Places]  # utterances that a search in PyTorch, or the kernel, hears chunk by chunk


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
        self.placed: PlacedSearch | None = None

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
            return Found(read_labels(traces.trace(entries, end.grown)), table.cpu().numpy())
        start = Beams.start(self.fusion, len(lengths), self.options.beam, log_probs.shape[2])
        held, certain = self.hear(start, log_probs, lengths)
        return self.found(self.closed(held), certain)

    def start(self, batch: int, labels: int, root: int = ROOT) -> Held:
        """Begin utterances that come chunk by chunk; their words start at a root of the fusion's forest."""
        placed = self._placed(labels)
        return (
            [placed.start(batch, root)] if placed else Beams.start(self.fusion, batch, self.options.beam, labels, root)
        )

    def join(self, parts: Sequence[Held]) -> Held:
        """The utterances of several as one batch, in order."""
        if isinstance(parts[0], Beams):
            return join(cast(Sequence[Beams], parts))
        return [places for part in parts for places in cast(list[Places], part)]

    def split(self, held: Held, parts: Sequence[Held], sizes: Sequence[int]) -> Sequence[Held]:
        """The inverse of `join`, of what came from those parts."""
        return split(held, sizes) if isinstance(held, Beams) else parts

    def hear(self, held: Held, log_probs: Tensor, lengths: Tensor) -> tuple[Held, list[list[int]]]:
        """Hear the next frames, as in `search` but for lengths, that may be 0; a run of blanks at their end waits.

        Returns:
            The utterances, and the first labels of each, that all its prefixes share: they are not kept here any more.
        """
        if not isinstance(held, Beams):
            assert self.placed is not None
            return held, self.placed.hear(held, log_probs, lengths)
        packed, counts, run = pack_next(log_probs, lengths, self.options, held.run)
        heard = search(self.fusion, held, packed, counts, self.options.prune)
        return _without_shared(replace(heard, run=run))

    def closed(self, held: Held) -> Beams:
        """Hear the runs of blanks that waited, as if the utterances ended."""
        if not isinstance(held, Beams):
            assert self.placed is not None
            return self.placed.closed(held)
        run = held.run
        heard = search(self.fusion, held, run.log_probs[None], run.there.long(), self.options.prune)
        return replace(heard, run=run.emptied())

    def read(self, held: Held) -> Beams:
        """The utterances as values."""
        if isinstance(held, Beams):
            return held
        assert self.placed is not None
        return self.placed.beams(held)

    def only(self, held: Held, wanted: Tensor) -> tuple[Held, list[list[int]]]:
        """Drop prefixes that are not among the wanted (B, K); what is left, and its shared labels, as `hear`."""
        if not isinstance(held, Beams):
            assert self.placed is not None
            return held, self.placed.only(held, wanted)
        return _without_shared(held.only(wanted))

    def _placed(self, labels: int) -> PlacedSearch | None:
        if (
            self.placed is None
            and self.kernel is not None
            and self.kernel.fits(torch.empty(1, 1, labels, device="meta"))
        ):
            self.placed = PlacedSearch(self.kernel, self.options, labels)
        return self.placed

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


def _without_shared(beams: Beams) -> tuple[Beams, list[list[int]]]:
    """The first labels that all prefixes share, taken away from them."""
    counts = beams.certain()
    if not counts.any():
        return beams, [[] for _ in counts]
    slots = (beams.acoustic > NONE).int().argmax(1)
    shared = beams.spelled[torch.arange(len(slots), device=slots.device), slots].cpu().numpy()
    labels = [row[:count].tolist() for row, count in zip(shared, counts.tolist(), strict=True)]
    return beams.without_first(counts), labels


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
