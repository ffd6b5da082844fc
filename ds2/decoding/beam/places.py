"""Utterances that the search kernel hears chunk by chunk: what is known of all of them lies in tables on the GPU.

An utterance has a place, a row of the tables, from its first chunk to its last; a batch is a list of places.

Shapes: N places, B in a batch, K beam, V labels, L labels of a prefix that are not certain, M taken away at once.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from ds2_ops.ctc import beam as kernel
from ds2_ops.ctc.labels import spell
from torch import Tensor

from ds2.config.schema import DecodeConfig
from ds2.decoding.beam.kernel_search import KernelSearch
from ds2.decoding.beam.torch_search import Beams
from ds2.decoding.frames import OpenRun, pack_next

MOST = 32  # M
_ROOM = 256  # L at first; doubled where prefixes disagree for long
_PLACES = 16  # at first; doubled when they are taken


@dataclass(eq=False)
class Places:
    """Utterances of a decoding in tables; their places are free again when this is gone."""

    numbers: list[int]
    root: int  # of the trie, where their words start
    fresh: bool = True  # nothing is in the tables yet
    __weakref__: object = field(init=False, repr=False)


@dataclass
class _Tables:
    """All that is known of utterances, by place."""

    blank: Tensor  # (N, K) and so on: `Beams`
    label: Tensor
    names: Tensor  # (N, K, 4)
    integers: Tensor  # (N, K, 4): without the roots
    floats: Tensor
    spelled: Tensor  # (N, K, L)
    counts: Tensor  # (N, K) int32
    runs: Tensor  # (N, V)
    there: Tensor  # (N,)
    roots: Tensor  # (N,) int32


class PlacedSearch:
    """A search that goes on from chunk to chunk on the GPU; one thread hears, others may start utterances.

    Tables are written in inference mode only, in which they may have grown.
    """

    def __init__(self, search: KernelSearch, options: DecodeConfig, labels: int) -> None:
        self.search, self.options, self.device = search, options, search.fusion.device
        self._first = Beams.start(search.fusion, 1, search.beam, labels)
        self._lock = threading.Lock()
        self.used, self.free = 0, list[int]()
        self._halves, self.tables = self._make(_PLACES, _ROOM)
        self._longest: dict[int, int] = {}  # labels that a prefix of a place has at most

    def _make(self, places: int, room: int) -> tuple[Tensor, _Tables]:
        first, beam, device = self._first, self.search.beam, self.device
        halves = torch.zeros(2, places, beam, dtype=torch.float64, device=device)
        integers = torch.zeros(2, places, beam, 4, dtype=torch.int64, device=device)
        return halves, _Tables(
            halves[0],
            halves[1],
            integers[0],
            integers[1],
            torch.zeros(places, beam, 2, dtype=torch.float64, device=device),
            torch.zeros(places, beam, room, dtype=torch.int16, device=device),
            torch.zeros(places, beam, dtype=torch.int32, device=device),
            torch.zeros(places, first.run.log_probs.shape[1], device=device),
            torch.zeros(places, dtype=torch.bool, device=device),
            torch.zeros(places, dtype=torch.int32, device=device),
        )

    def start(self, rows: int, root: int) -> Places:
        """Begin utterances whose words start at a root of the trie."""
        with self._lock:
            numbers = [self.free.pop() for _ in range(min(rows, len(self.free)))]
            while len(numbers) < rows:
                numbers.append(self.used)
                self.used += 1
        places = Places(numbers, root)
        weakref.finalize(places, self.free.extend, list(numbers))
        return places

    @torch.inference_mode()
    def hear(self, parts: Sequence[Places], log_probs: Tensor, lengths: Tensor) -> list[list[int]]:
        """Hear the next frames (T, B, V); return the labels of each utterance that all prefixes share now."""
        at = self._settled(parts, len(log_probs) + 1)
        tables = self.tables
        before = OpenRun(tables.runs[at], tables.there[at])
        packed, counts, run = pack_next(log_probs, lengths, self.options, before)
        tables.runs[at], tables.there[at] = run.log_probs, run.there
        return self._search(packed, counts, at)

    @torch.inference_mode()
    def closed(self, parts: Sequence[Places]) -> Beams:
        """What is known once the open runs are heard too; the utterances themselves stay as they are."""
        count = sum(len(part.numbers) for part in parts)
        copies = self.start(count, 0)
        copies.fresh = False
        at, to = self._settled(parts, 2), self._settled([copies], 2)
        for table in vars(self.tables).values():
            table[to] = table[at]
        tables = self.tables
        self._search(tables.runs[at][None].contiguous(), tables.there[at].long(), to, most=0)
        return self.beams([copies])

    @torch.inference_mode()
    def beams(self, parts: Sequence[Places]) -> Beams:
        """The utterances as values, for reading."""
        at = self._settled(parts, 0)
        t = self.tables
        homes = t.roots[at].long()[:, None, None].expand(-1, self.search.beam, 1)
        room = 1 + max(self._longest.get(number, 0) for part in parts for number in part.numbers)
        run = OpenRun(t.runs[at], t.there[at])
        integers = torch.cat([t.integers[at], homes], 2)
        names, spelled, counts = t.names[at][..., :3], t.spelled[at][..., :room], t.counts[at].long()
        return Beams(t.blank[at], t.label[at], names, integers, t.floats[at], spelled, counts, run)

    @torch.inference_mode()
    def only(self, parts: Sequence[Places], agrees: Tensor) -> list[list[int]]:
        """Drop the prefixes that are not among the wanted (B, K); return what all that are left share."""
        at, tables = self._settled(parts, 1), self.tables
        beams = self.beams(parts).only(agrees)
        tables.blank[at], tables.label[at] = beams.blank, beams.label
        tables.names[at] = torch.nn.functional.pad(beams.names, (0, 1))
        nothing = beams.run.log_probs[None].contiguous()
        found: list[list[int]] = [[] for _ in at]
        more = [[0] * MOST]
        while any(len(labels) == MOST for labels in more):
            more = self._search(nothing, torch.zeros_like(at), at)
            found = [before + labels for before, labels in zip(found, more, strict=True)]
        return found

    def _search(self, packed: Tensor, counts: Tensor, at: Tensor, most: int = MOST) -> list[list[int]]:
        tables, places = self.tables, at.int()
        grown = torch.empty(0, dtype=torch.int32, device=self.device)
        before = kernel.Found(self._halves, tables.names, tables.integers, tables.floats, grown)
        found = self.search.search(packed, counts, before, places, tables.roots)
        certain = spell(counts, places, found, tables.spelled, tables.counts, most).cpu().numpy()
        self._longest.update(zip(at.tolist(), certain[:, 1].tolist(), strict=True))
        return [row[2 : 2 + row[0]].tolist() for row in certain]

    def _settled(self, parts: Sequence[Places], more_labels: int) -> Tensor:
        """(B,) int64 where utterances are, which have a place there by then, and for so many more labels."""
        self._grow(max(self._longest.get(n, 0) for part in parts for n in part.numbers) + more_labels)
        fresh = [part for part in parts if part.fresh]
        if fresh:
            self._write_first(fresh)
        return torch.tensor([number for part in parts for number in part.numbers], device=self.device)

    def _write_first(self, parts: Sequence[Places]) -> None:
        """Let utterances begin, all at once: hundreds may in one batch."""
        tables, first = self.tables, self._first
        begun = [(number, part.root) for part in parts for number in part.numbers]
        at, roots = torch.tensor(begun, device=self.device).unbind(1)
        tables.blank[at], tables.label[at], tables.floats[at] = first.blank, first.label, first.floats
        tables.names[at] = torch.nn.functional.pad(first.names, (0, 1))
        integers = first.integers[..., :4].repeat(len(begun), 1, 1)
        integers[..., 1] = roots[:, None]
        tables.integers[at] = integers
        tables.roots[at] = roots.int()
        for table, value in ((tables.counts, 0), (tables.runs, 0), (tables.there, False)):
            table[at] = value
        for part in parts:
            part.fresh = False
        self._longest.update((number, 0) for number, _ in begun)

    def _grow(self, labels: int) -> None:
        """Have a place for every utterance and room for so many labels."""
        places, _, room = before = self.tables.spelled.shape
        while places < self.used:
            places *= 2
        while room < labels:
            room *= 2
        if (places, self.search.beam, room) == tuple(before):
            return
        old, old_halves = self.tables, self._halves
        self._halves, self.tables = self._make(places, room)
        self._halves[:, : before[0]] = old_halves
        self.tables.spelled[: before[0], :, : before[2]] = old.spelled
        for name, table in vars(old).items():
            if name not in ("blank", "label", "spelled"):
                getattr(self.tables, name)[: before[0]] = table
