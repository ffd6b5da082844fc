"""The beam search as a GPU kernel (`ds2_ops.ctc.beam`), for whole utterances and for streams.

`KernelSearch` searches whole utterances in one launch. `KernelStreams` goes on from chunk to chunk: the state of all
streams lies in tables on the GPU. A stream has a slot, one row of the tables, from its first chunk to its last, and a
batch is a list of slots.

Shapes: N slots, B streams in a batch, K beam, V labels, L labels of a prefix that not all prefixes share.
"""

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from ds2_ops.ctc import beam as kernel
from numpy.typing import NDArray
from torch import Tensor

from ds2.config.schema import DecodeConfig
from ds2.decoding.beam.fusion import NODE, SESSION_ROOT, Fusion
from ds2.decoding.beam.torch_search import Beams, first_of_rows
from ds2.decoding.decoder import start_copy
from ds2.decoding.frames import NONE, open_frames, pack_next
from ds2.lm.ngram import UNKNOWN, NGram

log = logging.getLogger(__name__)
MAX_REMOVED = 32  # shared labels that one launch takes away from the prefixes of a stream
_FIRST_CAPACITY = 256  # L; doubled when prefixes disagree for long
_FIRST_SLOTS = 16  # N; doubled when all are taken


class KernelSearch:
    """The search of `torch_search` with the same settings and results, all frames in one launch."""

    def __init__(self, fusion: Fusion, options: DecodeConfig) -> None:
        self.beam = options.beam
        self.fusion = fusion
        self.grams = None if fusion.lm is None else grams_tables(fusion.lm, fusion)
        self.weights = kernel.SearchWeights(
            alpha=fusion.alpha,
            beta=fusion.beta,
            unknown_score=fusion.unknown_score,
            prune=options.prune,
            closed=fusion.lexicon,
        )
        self._warned = False

    def fits(self, frames: int) -> bool:
        """Return whether the kernel takes so many frames at once; if not, log the reason once."""
        device, labels = self.fusion.device, self.fusion.labels
        reason = kernel.why_not(self.beam, labels, frames, self.grams.order if self.grams else 0, device)
        if reason is not None and not self._warned:
            self._warned = True
            log.warning("the beam search runs in PyTorch, which is many times slower: %s", reason)
        return reason is None

    def search(
        self,
        log_probs: Tensor,
        frames: Tensor,
        before: kernel.PrefixTables | None = None,
        slots: Tensor | None = None,
        roots: Tensor | None = None,
    ) -> kernel.PrefixTables:
        """Search packed log-probs (T, B, V) with (B,) int64 frames each; other arguments as the kernel's."""
        lexicon = lexicon_tables(self.fusion)  # anew for each call: sessions add and remove hot words
        return kernel.search(log_probs, frames, self.beam, self.weights, lexicon, self.grams, before, slots, roots)


def lexicon_tables(fusion: Fusion) -> kernel.LexiconTables:
    """Return the spelling and the trie of a fusion in the form of the kernel."""
    spelling, nodes = fusion.spelling, fusion.trie.nodes
    return kernel.LexiconTables(
        starts_word=spelling.starts_word,
        characters=spelling.characters,
        counts=spelling.counts,
        **vars(nodes),
        space=spelling.space,
        has_hot=fusion.trie.has_hot,
        sounds=None if spelling.sounds is None else spelling.sounds.int(),
    )


def grams_tables(lm: NGram, fusion: Fusion) -> kernel.NGramTables:
    """Return a model on the device of the fusion in the form of the kernel: with the first entry of every state."""
    size = len(lm.vocabulary)
    starts = torch.arange(lm.backoff.numel() + 1, device=lm.keys.device) * size
    return kernel.NGramTables(
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
    """Convert (B, N, T) int16 labels, reversed and with -1 at the end, to tuples; waits for the device."""
    rows = traced.cpu().numpy()
    ended = (rows < 0).argmax(2)
    return [
        [tuple(labels[:count][::-1].tolist()) for labels, count in zip(row, counts, strict=True)]
        for row, counts in zip(rows, ended, strict=True)
    ]


@dataclass(eq=False)
class StreamSlot:
    """The slot of a stream; it is free again when this object is deleted."""

    number: int
    root: int  # of the trie, where words start
    empty: bool = True  # nothing is written into the tables yet


@dataclass
class _Tables:
    """The state of all streams, by slot."""

    blank: Tensor  # (N, K), as in `Beams`
    label: Tensor
    names: Tensor  # (N, K, 4)
    integers: Tensor  # (N, K, 4), without the roots
    floats: Tensor
    labels: Tensor  # (N, K, L)
    counts: Tensor  # (N, K) int32
    runs: Tensor  # (N,)
    roots: Tensor  # (N,) int32


class KernelStreams:
    """A search that goes on from chunk to chunk on the GPU; one thread steps, others may start streams.

    Tables are written in inference mode only, as they may be inference tensors.
    """

    def __init__(self, search: KernelSearch, options: DecodeConfig) -> None:
        self.search, self.options, self.device = search, options, search.fusion.device
        self._first = Beams.start(search.fusion, 1, search.beam)
        self._lock = threading.Lock()
        self.used, self.free = 0, list[int]()
        self._halves, self.tables = self._allocate(_FIRST_SLOTS, _FIRST_CAPACITY)
        self._longest = np.zeros(_FIRST_SLOTS, np.int64)  # (N,) labels of the longest prefix of each

    def _allocate(self, slots: int, capacity: int) -> tuple[Tensor, _Tables]:
        beam, device = self.search.beam, self.device
        halves = torch.zeros(2, slots, beam, dtype=torch.float64, device=device)
        integers = torch.zeros(2, slots, beam, 4, dtype=torch.int64, device=device)
        return halves, _Tables(
            halves[0],
            halves[1],
            integers[0],
            integers[1],
            torch.zeros(slots, beam, 2, dtype=torch.float64, device=device),
            torch.zeros(slots, beam, capacity, dtype=torch.int16, device=device),
            torch.zeros(slots, beam, dtype=torch.int32, device=device),
            torch.zeros(slots, dtype=torch.float64, device=device),
            torch.zeros(slots, dtype=torch.int32, device=device),
        )

    def start(self, root: int) -> StreamSlot:
        """Take a slot for a new stream whose words start at a root of the trie."""
        with self._lock:
            number = self.free.pop() if self.free else self.used
            self.used = max(self.used, number + 1)
        slot = StreamSlot(number, root)
        weakref.finalize(slot, self.free.append, number)
        return slot

    @torch.inference_mode()
    def step(self, slots: Sequence[StreamSlot], log_probs: Tensor, lengths: Tensor) -> list[list[int]]:
        """Search the next frames (T, B, V); remove and return the first labels that all prefixes of a stream share."""
        return self.start_step(slots, log_probs, lengths)()

    @torch.inference_mode()
    def start_step(
        self, slots: Sequence[StreamSlot], log_probs: Tensor, lengths: Tensor
    ) -> Callable[[], list[list[int]]]:
        """Launch `step`; the function that is returned waits for it, at latest before the next step."""
        numbers, rows = self._prepare(slots, len(log_probs) + 1)
        tables = self.tables
        packed, counts, runs = pack_next(log_probs, lengths, self.options, tables.runs[rows])
        wait = self._start_search(packed, counts, numbers, rows)
        tables.runs[rows] = runs  # not before: if the search has no memory, another one of these frames follows
        return wait

    @torch.inference_mode()
    def flushed(self, slots: Sequence[StreamSlot]) -> Beams:
        """Return the beams after the open runs as well; the streams themselves do not change."""
        copies = [self.start(0) for _ in slots]
        for copy in copies:
            copy.empty = False
        (sources, rows), (numbers, to) = self._prepare(slots, 2), self._prepare(copies, 2)
        for table in vars(self.tables).values():
            table[to] = table[rows]
        tables = self.tables
        frames, counts = open_frames(tables.runs[rows], self.search.fusion.labels)
        self._launch(frames, counts, to, max_removed=0)
        self._longest[numbers] = self._longest[sources]  # an open run is of blanks, which add no labels
        return self.beams(copies)

    @torch.inference_mode()
    def beams(self, slots: Sequence[StreamSlot]) -> Beams:
        """Return a copy of the beams of streams."""
        numbers, rows = self._prepare(slots, 0)
        t = self.tables
        roots = t.roots[rows].long()[:, None, None].expand(-1, self.search.beam, 1)
        longest = 1 + int(self._longest[numbers].max())
        integers = torch.cat([t.integers[rows], roots], 2)
        names, labels, counts = t.names[rows][..., :3], t.labels[rows][..., :longest], t.counts[rows].long()
        return Beams(t.blank[rows], t.label[rows], names, integers, t.floats[rows], labels, counts, t.runs[rows])

    @torch.inference_mode()
    def mask(self, slots: Sequence[StreamSlot], wanted: Tensor) -> list[list[int]]:
        """Drop the prefixes that are not `wanted` (B, K); remove and return the first labels that the others share."""
        (numbers, rows), tables = self._prepare(slots, 1), self.tables
        beams = self.beams(slots).masked(wanted)
        tables.blank[rows], tables.label[rows] = beams.blank, beams.label
        tables.names[rows] = torch.nn.functional.pad(beams.names, (0, 1))
        frame, _ = open_frames(beams.runs, self.search.fusion.labels)
        shared: list[list[int]] = [[] for _ in rows]
        more = [[0] * MAX_REMOVED]
        while any(len(labels) == MAX_REMOVED for labels in more):
            more = self._start_search(frame, torch.zeros_like(rows), numbers, rows)()  # no frames: only removes labels
            shared = [before + labels for before, labels in zip(shared, more, strict=True)]
        return shared

    def _start_search(
        self, packed: Tensor, counts: Tensor, numbers: NDArray[np.int64], rows: Tensor
    ) -> Callable[[], list[list[int]]]:
        copy = start_copy(self._launch(packed, counts, rows, MAX_REMOVED))
        self._longest[numbers] += len(packed)  # at most

        def wait() -> list[list[int]]:
            [shared] = copy()
            self._longest[numbers] = shared[:, 1]
            return first_of_rows(shared[:, 2:], shared[:, 0])

        return wait

    def _launch(self, packed: Tensor, counts: Tensor, rows: Tensor, max_removed: int) -> Tensor:
        """Search packed frames without a wait for the device; return what `append_labels` does."""
        tables, slots = self.tables, rows.int()
        grown = torch.empty(0, dtype=torch.int32, device=self.device)
        before = kernel.PrefixTables(self._halves, tables.names, tables.integers, tables.floats, grown)
        after = self.search.search(packed, counts, before, slots, tables.roots)
        return kernel.append_labels(counts, slots, after, tables.labels, tables.counts, max_removed)

    def _prepare(self, slots: Sequence[StreamSlot], more_labels: int) -> tuple[NDArray[np.int64], Tensor]:
        """Return (B,) rows of streams, on the host and on the device, with capacity for more labels in the tables."""
        numbers = np.array([slot.number for slot in slots])
        known = numbers[numbers < len(self._longest)]
        self._grow(int(self._longest[known].max(initial=0)) + more_labels)
        empty = [slot for slot in slots if slot.empty]
        if empty:
            self._initialise(empty)
        return numbers, self._on_device(numbers)

    def _on_device(self, array: NDArray[np.int64]) -> Tensor:
        """Start to copy an array to the device, from pinned memory: the array may be gone before the copy reads it."""
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)

    def _initialise(self, slots: Sequence[StreamSlot]) -> None:
        """Write the first state of new streams, all at once: a batch may hold hundreds."""
        tables, first = self.tables, self._first
        rows, roots = self._on_device(np.array([(slot.number, slot.root) for slot in slots])).unbind(1)
        tables.blank[rows], tables.label[rows], tables.floats[rows] = first.blank, first.label, first.floats
        tables.names[rows] = torch.nn.functional.pad(first.names, (0, 1))
        integers = first.integers[..., :SESSION_ROOT].repeat(len(slots), 1, 1)
        integers[..., NODE] = roots[:, None]
        tables.integers[rows] = integers
        tables.roots[rows] = roots.int()
        for table, value in ((tables.counts, 0), (tables.runs, NONE)):
            table[rows] = value
        for slot in slots:
            slot.empty = False
        self._longest[[slot.number for slot in slots]] = 0

    def _grow(self, labels: int) -> None:
        """Grow the tables to a slot for every stream and capacity for `labels` per prefix."""
        slots, _, capacity = before = self.tables.labels.shape
        while slots < self.used:
            slots *= 2
        while capacity < labels:
            capacity *= 2
        if (slots, self.search.beam, capacity) == tuple(before):
            return
        old, old_halves = self.tables, self._halves
        self._halves, self.tables = self._allocate(slots, capacity)
        self._halves[:, : before[0]] = old_halves
        self._longest = np.pad(self._longest, (0, slots - before[0]))
        self.tables.labels[: before[0], :, : before[2]] = old.labels
        for name, table in vars(old).items():
            if name not in ("blank", "label", "labels"):
                getattr(self.tables, name)[: before[0]] = table
