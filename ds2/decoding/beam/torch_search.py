"""CTC prefix beam search over a whole batch at once, in PyTorch on any device, with an n-gram model in tensors.

Shapes: T frames, B utterances, V labels (0 is the blank), K beam, L labels of the longest prefix that not all prefixes
share. A prefix is a label sequence without blanks and repeats; spaces at its start and repeated spaces are dropped. Its
probability has two halves: alignments that end in a blank, and those that end in its last label (Hannun et al. 2014,
"First-pass large vocabulary continuous speech recognition using bi-directional recurrent DNNs", algorithm 1). Both are
ranked and pruned separately.

The state after a frame is a value, `Beams`, with the batch as first dimension: chunks may have any length, and
utterances join and leave the batch between chunks (`TorchStreams`). No Python loop runs over utterances or prefixes
within a frame.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds2.config.schema import DecodeConfig
from ds2.decoding.beam.fusion import LENGTH, Fusion
from ds2.decoding.frames import NONE, open_frames, pack_next
from ds2.decoding.lexicon import ROOT
from ds2.system.cuda_graph import GraphRecorder
from ds2.text.alphabet import BLANK

_PRIMES = (-7046029254386353131, 6364136223846793005)  # odd multipliers of a rolling hash, as signed 64-bit integers
_DEAD_HASH, _DEAD_PARENT, _ROOT_PARENT = 0x1D5A, 0x2E6B, 0x3F7C
HASH, PARENT, LAST = range(3)
_CAPACITY_STEP = 32  # labels
_GRAPH_FRAMES = 32  # with fewer frames, recording a CUDA graph takes longer than it saves


@dataclass(frozen=True)
class Beams:
    """The prefixes of B utterances after some frames, best first."""

    blank: Tensor  # (B, K) float64 log-prob of the alignments that end in a blank
    label: Tensor  # (B, K) float64 log-prob of those that end in the last label
    names: Tensor  # (B, K, 3) int64: hash of the labels, hash without the last label, last label
    integers: Tensor  # (B, K, 5) int64, of the fusion
    floats: Tensor  # (B, K, 2) float64, of the fusion
    labels: Tensor  # (B, K, L) int16, without those that were taken away as shared; 0 past the end
    counts: Tensor  # (B, K) int64 lengths of `labels`
    runs: Tensor  # (B,) float64, the open ones: see `pack_next`

    @classmethod
    def start(cls, fusion: Fusion, batch: int, beam: int, root: int = ROOT) -> Self:
        """Return the state before the first frame: one empty prefix per utterance."""
        device = fusion.device
        blank = torch.full((batch, beam), NONE, dtype=torch.float64, device=device)
        label = blank.clone()
        blank[:, 0] = 0.0
        slots = torch.arange(beam, device=device)
        names = torch.stack([_DEAD_HASH + slots, torch.full_like(slots, _DEAD_PARENT), torch.zeros_like(slots)], -1)
        names[0, HASH], names[0, PARENT] = 0, _ROOT_PARENT
        names[:, LAST] = max(fusion.spelling.space, 0)
        integers, floats = fusion.start(batch, beam, root)
        labels = torch.zeros(batch, beam, _CAPACITY_STEP, dtype=torch.int16, device=device)
        counts = torch.zeros(batch, beam, dtype=torch.int64, device=device)
        runs = torch.full((batch,), NONE, dtype=torch.float64, device=device)
        return cls(blank, label, names.repeat(batch, 1, 1), integers, floats, labels, counts, runs)

    @property
    def acoustic(self) -> Tensor:
        """(B, K) float64 log-prob of each prefix, -inf for empty slots."""
        return torch.logaddexp(self.blank, self.label)

    def with_capacity(self, more: int) -> Self:
        """Return the same beams with capacity for `more` labels per prefix."""
        missing = int(self.counts.max()) + more + 1 - self.labels.shape[2]
        return self.widened(self.labels.shape[2] + -(-missing // _CAPACITY_STEP) * _CAPACITY_STEP)

    def widened(self, length: int) -> Self:
        """Return the same beams with rows of labels of this length or longer."""
        more = length - self.labels.shape[2]
        return replace(self, labels=torch.nn.functional.pad(self.labels, (0, more))) if more > 0 else self

    def without_shared(self) -> tuple[Self, list[list[int]]]:
        """Return the beams without the first labels that all prefixes of an utterance share, and these labels."""
        alive = self.acoustic > NONE
        first = self.labels[torch.arange(len(alive), device=alive.device), alive.int().argmax(1)]  # (B, L)
        equal = ((self.labels == first[:, None]) & (first != BLANK)[:, None]) | ~alive[..., None]
        counts = equal.all(1).int().cumprod(1).sum(1) * alive.any(1)
        if not counts.any():
            return self, [[] for _ in counts]
        length = self.labels.shape[2]
        positions = (torch.arange(length, device=counts.device) + counts[:, None]).clamp(max=length)
        padded = torch.nn.functional.pad(self.labels, (0, 1))
        labels = padded.gather(2, positions[:, None].expand(-1, self.labels.shape[1], -1))
        beams = replace(self, labels=labels, counts=(self.counts - counts[:, None]).clamp(min=0))
        return beams, first_of_rows(first.cpu().numpy(), counts.cpu().numpy())

    def masked(self, wanted: Tensor) -> Self:
        """Return the same beams without the prefixes that are not `wanted` (B, K)."""
        slots = torch.arange(wanted.shape[1], device=wanted.device)
        dead = torch.stack([_DEAD_HASH + slots, torch.full_like(slots, _DEAD_PARENT), self.names[..., LAST][0]], -1)
        return replace(
            self,
            blank=self.blank.masked_fill(~wanted, NONE),
            label=self.label.masked_fill(~wanted, NONE),
            names=torch.where(wanted[..., None], self.names, dead),
        )


def first_of_rows(rows: NDArray[Any], counts: NDArray[Any]) -> list[list[int]]:
    """Return the first `counts` (B,) numbers of each of the rows (B, L) as lists."""
    numbers, ends = rows[np.arange(rows.shape[1]) < counts[:, None]].tolist(), counts.cumsum().tolist()
    return [numbers[end - count : end] for end, count in zip(ends, counts.tolist(), strict=True)]


@dataclass(eq=False)
class TorchStream:
    """A stream of `TorchStreams`."""

    beams: Beams  # of one utterance


class TorchStreams:
    """The search of streams in PyTorch."""

    def __init__(self, fusion: Fusion, options: DecodeConfig) -> None:
        self.fusion, self.options = fusion, options

    def start(self, root: int) -> TorchStream:
        """Begin a stream whose words start at a root of the trie."""
        return TorchStream(Beams.start(self.fusion, 1, self.options.beam, root))

    def step(self, streams: Sequence[TorchStream], log_probs: Tensor, lengths: Tensor) -> list[list[int]]:
        """Search the next frames (T, B, V); remove and return the first labels that all prefixes of a stream share."""
        beams = self.beams(streams)
        packed, counts, runs = pack_next(log_probs, lengths, self.options, beams.runs)
        beams = search(self.fusion, beams, packed, counts, self.options.prune)
        return self._store(streams, replace(beams, runs=runs))

    def flushed(self, streams: Sequence[TorchStream]) -> Beams:
        """Return the beams after the open runs as well; the streams themselves do not change."""
        beams = self.beams(streams)
        frames, counts = open_frames(beams.runs, self.fusion.labels)
        return search(self.fusion, beams, frames, counts, self.options.prune)

    def beams(self, streams: Sequence[TorchStream]) -> Beams:
        """Return the beams of streams as one batch."""
        if len(streams) == 1:
            return streams[0].beams
        longest = max(stream.beams.labels.shape[2] for stream in streams)
        return _each(torch.cat, *(stream.beams.widened(longest) for stream in streams))

    def mask(self, streams: Sequence[TorchStream], wanted: Tensor) -> list[list[int]]:
        """Drop the prefixes that are not `wanted` (B, K); remove and return the first labels that the others share."""
        return self._store(streams, self.beams(streams).masked(wanted))

    def _store(self, streams: Sequence[TorchStream], beams: Beams) -> list[list[int]]:
        beams, shared = beams.without_shared()
        for row, stream in enumerate(streams):
            stream.beams = _each(lambda tensors, row=row: tensors[0][row : row + 1].clone(), beams)  # type: ignore[misc]
        return shared


def _each(make: Callable[[list[Tensor]], Tensor], *beams: Beams) -> Beams:
    """Return beams of which each tensor is made from the same tensor of all `beams`."""
    return Beams(**{f.name: make([getattr(beam, f.name) for beam in beams]) for f in fields(Beams)})


def search(fusion: Fusion, beams: Beams, packed: Tensor, counts: Tensor, prune: float) -> Beams:
    """Extend the beams by packed frames.

    Args:
        beams: after the previous frames.
        packed: (T, B, V) float32 of `ds2.decoding.frames`.
        counts: (B,) int64 frames of each utterance.
        prune: prefixes this far below the best are dropped, natural log.
    """
    longest, shortest = int(counts.max()), int(counts.min())
    beams = beams.with_capacity(longest)
    if packed.is_cuda and longest >= _GRAPH_FRAMES:
        return _search_by_graph(fusion, beams, packed[:longest], counts, prune)
    for time in range(longest):
        later = step(fusion, beams, packed[time].double(), prune)
        beams = later if time < shortest else _where(time < counts, later, beams)
    return beams


def step(fusion: Fusion, beams: Beams, log_probs: Tensor, prune: float) -> Beams:
    """Extend all prefixes by one frame (B, V) float64, merge equal ones and keep the best."""
    return prune_beams(fusion, beams, merge(beams, extend(fusion, beams, log_probs)), prune)


@dataclass(frozen=True)
class ExtendedPrefixes:
    """The prefixes after one more frame: float64 log-probs of their alignments."""

    blank: Tensor  # (B, K) the prefix itself, ending in a blank
    label: Tensor  # (B, K) the prefix itself, ending in its last label
    longer: Tensor  # (B, K V) the prefix longer by a label; -inf for the blank


def extend(fusion: Fusion, beams: Beams, log_probs: Tensor) -> ExtendedPrefixes:
    """Extend every prefix by every label of a frame (B, V) float64."""
    space, last, both = fusion.spelling.space, beams.names[..., LAST], beams.acoustic
    sounds = fusion.spelling.sounds
    if sounds is None:
        sounds = torch.arange(log_probs.shape[1], device=last.device)
    repeats = sounds[last][..., None] == sounds
    longer = torch.where(repeats, beams.blank[..., None], both[..., None]) + log_probs[:, None]  # (B, K, V)
    longer[..., BLANK] = NONE
    label = beams.label + log_probs.gather(1, last)
    if space >= 0:  # a space after a space, or at the start, changes nothing
        boundary = beams.integers[..., LENGTH] == 0
        label = torch.where(boundary, both + log_probs[:, space, None], label)
        longer[..., space].masked_fill_(boundary, NONE)
    return ExtendedPrefixes(both + log_probs[:, BLANK, None], label, longer.flatten(1))


def merge(beams: Beams, extended: ExtendedPrefixes) -> ExtendedPrefixes:
    """Add the probability of a longer prefix to the equal prefix that the beam already holds."""
    hashes, parents, last = beams.names.unbind(-1)
    slots = torch.arange(hashes.shape[1], device=hashes.device)
    labels = extended.longer.shape[1] // hashes.shape[1]
    same = hashes[:, None, :] == parents[..., None]  # (B, K, K): the second is the first without its last label
    exists, parent = same.max(2)
    position = parent * labels + last
    label = torch.logaddexp(extended.label, extended.longer.gather(1, position).masked_fill_(~exists, NONE))
    longer = extended.longer.scatter(1, torch.where(exists, position, slots * labels + BLANK), NONE)
    return ExtendedPrefixes(extended.blank, label, longer)


def prune_beams(fusion: Fusion, beams: Beams, extended: ExtendedPrefixes, prune: float) -> Beams:
    """Keep the K best halves of prefixes that lie within `prune` of the best."""
    beam, labels = beams.counts.shape[1], extended.longer.shape[1] // beams.counts.shape[1]
    slots = torch.arange(beam, device=beams.counts.device)
    word_scores = fusion.score(beams.integers, beams.floats)
    stay, grow = word_scores.stay, word_scores.extended.flatten(1)
    scores = torch.cat([extended.blank + stay, extended.label + stay, extended.longer + grow], 1)
    top, chosen = scores.topk(beam, 1)
    alive = (top >= top[:, :1] - prune) & (top > NONE)

    selected = torch.zeros(len(scores), 2 * beam + 1, dtype=torch.bool, device=scores.device)
    selected.scatter_(1, chosen.clamp(max=2 * beam), alive)
    is_longer, is_blank = chosen >= 2 * beam, chosen < beam
    source = torch.where(is_longer, (chosen - 2 * beam) // labels, chosen % beam)
    added = ((chosen - 2 * beam) % labels).masked_fill(~is_longer, BLANK)
    has_blank, has_label = selected[:, :beam].gather(1, source), selected[:, beam : 2 * beam].gather(1, source)
    alive &= is_blank | is_longer | ~has_blank  # the slot of the blank half holds both
    blank = extended.blank.gather(1, source).masked_fill_(~(alive & is_blank), NONE)
    stays = extended.label.gather(1, source).masked_fill_(~has_label | is_longer, NONE)
    label = torch.where(is_longer, extended.longer.gather(1, (chosen - 2 * beam).clamp_(min=0)), stays)

    integers, floats = fusion.select(beams.integers, beams.floats, word_scores, source, added)
    hashes, parents, last = beams.names.gather(1, source[..., None].expand(-1, -1, 3)).unbind(-1)
    longer = ((hashes ^ (added + 1) * _PRIMES[0]) * _PRIMES[1]) ^ (hashes >> 29)
    names = [
        torch.where(alive, torch.where(is_longer, longer, hashes), _DEAD_HASH + slots),
        torch.where(is_longer, hashes, parents).masked_fill(~alive, _DEAD_PARENT),
        torch.where(is_longer, added, last),
    ]
    rows = source + beam * torch.arange(len(source), device=source.device)[:, None]
    spelled = beams.labels.flatten(0, 1).index_select(0, rows.flatten()).view_as(beams.labels)
    counts = beams.counts.gather(1, source)
    spelled.scatter_(2, counts[..., None], added[..., None].short())  # a blank past the end changes nothing
    counts = (counts + is_longer).masked_fill_(~alive, 0)
    label.masked_fill_(~alive, NONE)
    return Beams(blank, label, torch.stack(names, -1), integers, floats, spelled, counts, beams.runs)


def _where(live: Tensor, later: Beams, before: Beams) -> Beams:
    """Return the later beams for the utterances that are `live` (B,), the earlier ones for the others."""
    return _each(lambda pair: torch.where(live.view(-1, *[1] * (pair[0].dim() - 1)), pair[0], pair[1]), later, before)


def _search_by_graph(fusion: Fusion, beams: Beams, packed: Tensor, counts: Tensor, prune: float) -> Beams:
    """Run the first frame eagerly, which also warms up, and the others as replays of one recorded step."""
    time = torch.zeros(1, dtype=torch.int64, device=packed.device)
    state = _each(lambda tensors: tensors[0].clone(), beams)

    def advance() -> None:
        later = step(fusion, state, packed.index_select(0, time)[0].double(), prune)
        _each(lambda pair: pair[0].copy_(pair[1]), state, _where(time < counts, later, state))
        time.add_(1)

    replay = GraphRecorder(packed.device).record(advance)  # which runs it once
    for _ in range(len(packed) - 1):
        replay()
    return state
