"""CTC prefix beam search over a whole batch at once, in PyTorch on any device, with an n-gram model in tensors.

Shapes: T frames, B utterances, V labels (0 is the blank), K beam, L labels of the longest prefix that are not certain
yet. A prefix is a label sequence without blanks and repeats, in which spaces at the start and repeated spaces count as
none. Its probability is kept in two halves: alignments that end in a blank, and those that end in its last label
(Hannun et al. 2014, "First-pass large vocabulary continuous speech recognition using bi-directional recurrent DNNs",
algorithm 1), ranked and pruned apart.

All that is known after a frame is a value, `Beams`, batch by batch first: chunks of any length follow one another, and
utterances join and leave a batch between them. No Python loop runs over utterances or prefixes within a frame.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ds2.decoding.beam.fusion import LENGTH, Fusion
from ds2.decoding.frames import NONE, OpenRun
from ds2.decoding.lexicon import ROOT
from ds2.system.cuda_graph import GraphRecorder
from ds2.text.alphabet import BLANK

_PRIMES = (-7046029254386353131, 6364136223846793005)  # odd multipliers of a rolling hash, as signed 64-bit integers
_DEAD_HASH, _DEAD_PARENT, _ROOT_PARENT = 0x1D5A, 0x2E6B, 0x3F7C
HASH, PARENT, LAST = range(3)
_ROOM = 32  # labels that prefixes get place for at a time
_WORTH_A_GRAPH = 32  # frames, below which a CUDA graph takes longer to capture than it saves


@dataclass(frozen=True)
class Beams:
    """The prefixes of B utterances after some frames, best first."""

    blank: Tensor  # (B, K) float64 log-prob of the alignments that end in a blank
    label: Tensor  # (B, K) float64, that end in the last label
    names: Tensor  # (B, K, 3) int64: hash, hash without the last label, last label
    integers: Tensor  # (B, K, 5) int64 and
    floats: Tensor  # (B, K, 2) float64 of the fusion
    spelled: Tensor  # (B, K, L) int16 the labels that are not certain, 0 past the end
    counts: Tensor  # (B, K) int64 how many
    run: OpenRun

    @classmethod
    def start(cls, fusion: Fusion, batch: int, beam: int, labels: int, root: int = ROOT) -> Beams:
        """Utterances that have heard nothing: one empty prefix each."""
        device = fusion.device
        blank = torch.full((batch, beam), NONE, dtype=torch.float64, device=device)
        label = blank.clone()
        blank[:, 0] = 0.0
        slots = torch.arange(beam, device=device)
        names = torch.stack([_DEAD_HASH + slots, torch.full_like(slots, _DEAD_PARENT), torch.zeros_like(slots)], -1)
        names[0, HASH], names[0, PARENT] = 0, _ROOT_PARENT
        names[:, LAST] = max(fusion.spelling.space, 0)
        integers, floats = fusion.start(batch, beam, root)
        spelled = torch.zeros(batch, beam, _ROOM, dtype=torch.int16, device=device)
        counts = torch.zeros(batch, beam, dtype=torch.int64, device=device)
        run = OpenRun.none(batch, labels, device)
        return cls(blank, label, names.repeat(batch, 1, 1), integers, floats, spelled, counts, run)

    @property
    def acoustic(self) -> Tensor:
        """(B, K) float64 log-prob of each prefix, -inf where there is none."""
        return torch.logaddexp(self.blank, self.label)

    def with_room(self, labels: int) -> Beams:
        """The same with place for so many more labels."""
        missing = int(self.counts.max()) + labels + 1 - self.spelled.shape[2]
        if missing <= 0:
            return self
        wider = torch.nn.functional.pad(self.spelled, (0, -(-missing // _ROOM) * _ROOM))
        return replace(self, spelled=wider)

    def certain(self) -> Tensor:
        """(B,) int64 how many labels all prefixes have in common."""
        alive = self.acoustic > NONE
        of_one = self.spelled.gather(1, alive.int().argmax(1)[:, None, None].expand(-1, 1, self.spelled.shape[2]))
        agreed = ((self.spelled == of_one) & (of_one != BLANK)) | ~alive[..., None]
        return agreed.all(1).int().cumprod(1).sum(1) * alive.any(1)

    def without_first(self, counts: Tensor) -> Beams:
        """The same without the first (B,) labels, which are kept elsewhere."""
        length = self.spelled.shape[2]
        places = torch.arange(length, device=counts.device) + counts[:, None]
        padded = torch.nn.functional.pad(self.spelled, (0, 1))
        moved = padded.gather(2, places.clamp(max=length)[:, None].expand(-1, self.spelled.shape[1], -1))
        return replace(self, spelled=moved, counts=(self.counts - counts[:, None]).clamp(min=0))

    def only(self, wanted: Tensor) -> Beams:
        """The same without the prefixes that are not among the wanted (B, K)."""
        slots = torch.arange(wanted.shape[1], device=wanted.device)
        nobody = torch.stack([_DEAD_HASH + slots, torch.full_like(slots, _DEAD_PARENT), self.names[..., LAST][0]], -1)
        return replace(
            self,
            blank=self.blank.masked_fill(~wanted, NONE),
            label=self.label.masked_fill(~wanted, NONE),
            names=torch.where(wanted[..., None], self.names, nobody),
        )


def join(parts: Sequence[Beams]) -> Beams:
    """The utterances of several beams of one search as one batch, in order."""
    if len(parts) == 1:
        return parts[0]
    room = max(part.spelled.shape[2] for part in parts)
    same = [replace(p, spelled=torch.nn.functional.pad(p.spelled, (0, room - p.spelled.shape[2]))) for p in parts]
    return _each(torch.cat, *same)


def split(beams: Beams, sizes: Sequence[int]) -> list[Beams]:
    """The inverse of `join`."""
    if len(sizes) == 1:
        return [beams]
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [
        _each(lambda tensors, first=end - size, last=end: tensors[0][first:last].clone(), beams)  # type: ignore[misc]
        for size, end in zip(sizes, ends, strict=True)
    ]


def _each(make: Callable[[list[Tensor]], Tensor], *beams: Beams) -> Beams:
    """Beams whose every tensor is made from those at its place."""
    runs = [beam.run for beam in beams]
    made = {f.name: make([getattr(beam, f.name) for beam in beams]) for f in fields(Beams) if f.name != "run"}
    return Beams(run=OpenRun(make([r.log_probs for r in runs]), make([r.there for r in runs])), **made)


def search(fusion: Fusion, beams: Beams, packed: Tensor, counts: Tensor, prune: float) -> Beams:
    """Hear packed frames.

    Args:
        fusion: what prefixes are worth beside their acoustics.
        beams: what was heard before.
        packed: (T, B, V) float32 of `ds2.decoding.frames`.
        counts: (B,) int64 frames of each utterance.
        prune: prefixes so far below the best are dropped, natural log.
    """
    most, least = int(counts.max()), int(counts.min())
    beams = beams.with_room(most)
    if packed.is_cuda and most >= _WORTH_A_GRAPH:
        return _search_by_graph(fusion, beams, packed[:most], counts, prune)
    for time in range(most):
        later = step(fusion, beams, packed[time].double(), prune)
        beams = later if time < least else _where(time < counts, later, beams)
    return beams


def step(fusion: Fusion, beams: Beams, log_probs: Tensor, prune: float) -> Beams:
    """Extend all prefixes by one frame (B, V) float64, merge equal ones and keep the best."""
    return keep(fusion, beams, merge(beams, extend(fusion, beams, log_probs)), prune)


@dataclass(frozen=True)
class Grown:
    """What a frame makes of every prefix, float64 log-probs of its alignments."""

    blank: Tensor  # (B, K) as it is, ending in a blank
    label: Tensor  # (B, K) as it is, ending in its last label
    longer: Tensor  # (B, K V) longer by a label; -inf by a blank


def extend(fusion: Fusion, beams: Beams, log_probs: Tensor) -> Grown:
    """Extend every prefix by every label of a frame (B, V) float64."""
    space, last, both = fusion.spelling.space, beams.names[..., LAST], beams.acoustic
    repeats = last[..., None] == torch.arange(log_probs.shape[1], device=last.device)
    longer = torch.where(repeats, beams.blank[..., None], both[..., None]) + log_probs[:, None]  # (B, K, V)
    longer[..., BLANK] = NONE
    label = beams.label + log_probs.gather(1, last)
    if space >= 0:  # another space after a space, or before everything, changes nothing
        boundary = beams.integers[..., LENGTH] == 0
        label = torch.where(boundary, both + log_probs[:, space, None], label)
        longer[..., space].masked_fill_(boundary, NONE)
    return Grown(both + log_probs[:, BLANK, None], label, longer.flatten(1))


def merge(beams: Beams, grown: Grown) -> Grown:
    """Give a longer prefix that is there already to the one that stays."""
    hashes, parents, last = beams.names.unbind(-1)
    slots = torch.arange(hashes.shape[1], device=hashes.device)
    labels = grown.longer.shape[1] // hashes.shape[1]
    same = hashes[:, None, :] == parents[..., None]  # (B, K, K): the second is the first without its last label
    met, at = same.max(2)
    place = at * labels + last
    label = torch.logaddexp(grown.label, grown.longer.gather(1, place).masked_fill_(~met, NONE))
    longer = grown.longer.scatter(1, torch.where(met, place, slots * labels + BLANK), NONE)
    return Grown(grown.blank, label, longer)


def keep(fusion: Fusion, beams: Beams, grown: Grown, prune: float) -> Beams:
    """Keep the K best halves of prefixes, those near enough to the best."""
    beam, labels = beams.counts.shape[1], grown.longer.shape[1] // beams.counts.shape[1]
    slots = torch.arange(beam, device=beams.counts.device)
    worth = fusion.extend(beams.integers, beams.floats)
    scores = torch.cat(
        [grown.blank + worth.stay, grown.label + worth.stay, grown.longer + worth.extended.flatten(1)], 1
    )
    top, chosen = scores.topk(beam, 1)
    alive = (top >= top[:, :1] - prune) & (top > NONE)

    kept = torch.zeros(len(scores), 2 * beam + 1, dtype=torch.bool, device=scores.device)
    kept.scatter_(1, chosen.clamp(max=2 * beam), alive)
    is_longer, is_blank = chosen >= 2 * beam, chosen < beam
    source = torch.where(is_longer, (chosen - 2 * beam) // labels, chosen % beam)
    by = ((chosen - 2 * beam) % labels).masked_fill(~is_longer, BLANK)
    blank_kept, label_kept = kept[:, :beam].gather(1, source), kept[:, beam : 2 * beam].gather(1, source)
    alive &= is_blank | is_longer | ~blank_kept  # the slot of the blank half holds both
    blank = grown.blank.gather(1, source).masked_fill_(~(alive & is_blank), NONE)
    stayed = grown.label.gather(1, source).masked_fill_(~label_kept | is_longer, NONE)
    label = torch.where(is_longer, grown.longer.gather(1, (chosen - 2 * beam).clamp_(min=0)), stayed)

    integers, floats = fusion.take(beams.integers, beams.floats, worth, source, by)
    hashes, parents, last = beams.names.gather(1, source[..., None].expand(-1, -1, 3)).unbind(-1)
    longer = ((hashes ^ (by + 1) * _PRIMES[0]) * _PRIMES[1]) ^ (hashes >> 29)
    names = [
        torch.where(alive, torch.where(is_longer, longer, hashes), _DEAD_HASH + slots),
        torch.where(is_longer, hashes, parents).masked_fill(~alive, _DEAD_PARENT),
        torch.where(is_longer, by, last),
    ]
    rows = source + beam * torch.arange(len(source), device=source.device)[:, None]
    spelled = beams.spelled.flatten(0, 1).index_select(0, rows.flatten()).view_as(beams.spelled)
    counts = beams.counts.gather(1, source)
    spelled.scatter_(2, counts[..., None], by[..., None].short())  # past the end, where a blank changes nothing
    counts = (counts + is_longer).masked_fill_(~alive, 0)
    label.masked_fill_(~alive, NONE)
    return Beams(blank, label, torch.stack(names, -1), integers, floats, spelled, counts, beams.run)


def _where(live: Tensor, later: Beams, before: Beams) -> Beams:
    """The later beams of the utterances that are live (B,), those before of the others."""
    return _each(lambda pair: torch.where(live.view(-1, *[1] * (pair[0].dim() - 1)), pair[0], pair[1]), later, before)


def _search_by_graph(fusion: Fusion, beams: Beams, packed: Tensor, counts: Tensor, prune: float) -> Beams:
    """Run the first frame as it is (it also warms up), the others as replays of one captured step."""
    time = torch.zeros(1, dtype=torch.int64, device=packed.device)
    held = _each(lambda tensors: tensors[0].clone(), beams)

    def advance() -> None:
        later = step(fusion, held, packed.index_select(0, time)[0].double(), prune)
        _each(lambda pair: pair[0].copy_(pair[1]), held, _where(time < counts, later, held))
        time.add_(1)

    replay = GraphRecorder(packed.device).record(advance)  # which runs it once
    for _ in range(len(packed) - 1):
        replay()
    return held
