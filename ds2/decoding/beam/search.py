"""The batched beam search: chooses PyTorch or the GPU kernel, and ranks the prefixes at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from ds2_ops.ctc import beam as kernel
from numpy.typing import NDArray
from torch import Tensor

from ds2.config.schema import DecodeConfig
from ds2.decoding.beam.fusion import LENGTH, Fusion
from ds2.decoding.beam.kernel_search import KernelSearch, KernelStreams, Slots, read_labels
from ds2.decoding.beam.torch_search import HASH, PARENT, Beams, join, search, split
from ds2.decoding.frames import NONE, pack, pack_next
from ds2.decoding.lexicon import ROOT

Labels = tuple[int, ...]
SearchState = Beams | list[Slots]  # of streams: of the search in PyTorch, or of the kernel


@dataclass(frozen=True)
class NBest:
    """The N best label sequences of each utterance, best first, on the CPU."""

    labels: list[list[Labels]]
    scores: NDArray[np.float64]  # (B, N, 4): total, acoustic, language model, bonus; total -inf: no hypothesis


class BatchedBeamSearch:
    """Searches batches of any size with fixed settings; only one thread may use it at a time."""

    def __init__(self, fusion: Fusion, options: DecodeConfig) -> None:
        self.fusion, self.options = fusion, options
        self.kernel = KernelSearch(fusion, options) if fusion.device.type == "cuda" else None
        self.streams: KernelStreams | None = None

    def search(self, log_probs: Tensor, lengths: Tensor) -> NBest:
        """Find the best label sequences of whole utterances, with one launch of the kernel if it takes them.

        Args:
            log_probs: (T, B, V) float32 on the device of the fusion, finite or -inf; the caller checks them.
            lengths: (B,) CPU int64, at least 1.
        """
        if self.kernel is not None and self.kernel.fits(log_probs):
            packed, counts = pack(log_probs, lengths, self.options)
            end = self.kernel.search(packed, counts)
            table, slots = _rank(self.fusion, torch.logaddexp(*end.halves), end, self.options.nbest)
            entries = end.names[..., _ENTRY].gather(1, slots)
            return NBest(read_labels(kernel.trace_labels(entries, end.grown)), table.cpu().numpy())
        start = Beams.start(self.fusion, len(lengths), self.options.beam, log_probs.shape[2])
        state, shared = self.step(start, log_probs, lengths)
        return self.nbest(self.flushed(state), shared)

    def start(self, batch: int, alphabet_size: int, root: int = ROOT) -> SearchState:
        """Return the first state of streams whose words start at a root of the trie."""
        fits = self.kernel is not None and self.kernel.fits(torch.empty(1, 1, alphabet_size, device="meta"))
        if self.kernel is None or not fits:
            return Beams.start(self.fusion, batch, self.options.beam, alphabet_size, root)
        if self.streams is None:
            self.streams = KernelStreams(self.kernel, self.options, alphabet_size)
        return [self.streams.start(batch, root)]

    def join(self, parts: Sequence[SearchState]) -> SearchState:
        """Concatenate the streams of several states into one batch."""
        if isinstance(parts[0], Beams):
            return join(cast(Sequence[Beams], parts))
        return [slots for part in parts for slots in cast(list[Slots], part)]

    def split(self, state: SearchState, parts: Sequence[SearchState], sizes: Sequence[int]) -> Sequence[SearchState]:
        """Undo `join` after steps: `parts` are the states that were joined, `sizes` their numbers of streams."""
        return split(state, sizes) if isinstance(state, Beams) else parts

    def step(self, state: SearchState, log_probs: Tensor, lengths: Tensor) -> tuple[SearchState, list[list[int]]]:
        """Search the next frames; a run of blanks at their end stays open.

        Args:
            state: of B streams; it must not be used again.
            log_probs: as `search`.
            lengths: (B,) CPU int64, 0 too.

        Returns:
            The next state, and the first labels that all prefixes of a stream share: the state no longer holds them.
        """
        if not isinstance(state, Beams):
            assert self.streams is not None
            return state, self.streams.step(state, log_probs, lengths)
        packed, counts, run = pack_next(log_probs, lengths, self.options, state.run)
        beams = search(self.fusion, state, packed, counts, self.options.prune)
        return _without_shared(replace(beams, run=run))

    def flushed(self, state: SearchState) -> Beams:
        """Return the beams after the open runs of blanks, as if the streams ended; the state stays valid."""
        if not isinstance(state, Beams):
            assert self.streams is not None
            return self.streams.flushed(state)
        run = state.run
        beams = search(self.fusion, state, run.log_probs[None], run.exists.long(), self.options.prune)
        return replace(beams, run=run.cleared())

    def beams(self, state: SearchState) -> Beams:
        """Return the beams of a state."""
        if isinstance(state, Beams):
            return state
        assert self.streams is not None
        return self.streams.beams(state)

    def mask(self, state: SearchState, wanted: Tensor) -> tuple[SearchState, list[list[int]]]:
        """Drop prefixes that are not `wanted` (B, K); returns as `step`."""
        if not isinstance(state, Beams):
            assert self.streams is not None
            return state, self.streams.mask(state, wanted)
        return _without_shared(state.masked(wanted))

    def nbest(self, beams: Beams, shared: Sequence[Sequence[int]] = ()) -> NBest:
        """Rank prefixes; `shared` are the labels of each utterance that `step` took away from its prefixes."""
        table, slots = _rank(self.fusion, beams.acoustic, beams, self.options.nbest)
        rows = beams.labels.gather(1, slots[..., None].expand(-1, -1, beams.labels.shape[2])).cpu().numpy()
        counts = beams.counts.gather(1, slots).tolist()
        before = [tuple(labels) for labels in shared] or [()] * len(rows)
        labels = [
            [first + tuple(prefix[:count].tolist()) for prefix, count in zip(prefixes, sizes, strict=True)]
            for first, prefixes, sizes in zip(before, rows, counts, strict=True)
        ]
        return NBest(labels, table.cpu().numpy())


def _without_shared(beams: Beams) -> tuple[Beams, list[list[int]]]:
    """Take the first labels that all prefixes share away from them."""
    counts = beams.shared_counts()
    if not counts.any():
        return beams, [[] for _ in counts]
    slots = (beams.acoustic > NONE).int().argmax(1)
    shared = beams.labels[torch.arange(len(slots), device=slots.device), slots].cpu().numpy()
    labels = [row[:count].tolist() for row, count in zip(shared, counts.tolist(), strict=True)]
    return beams.without_first(counts), labels


_ENTRY = 3  # column of the kernel's `names`: the last entry of the prefix in the trace


def _rank(fusion: Fusion, acoustic: Tensor, end: kernel.PrefixTables | Beams, nbest: int) -> tuple[Tensor, Tensor]:
    """Join prefixes that differ in a last space only; return scores (B, N, 4) as in `NBest` and slots (B, N)."""
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
