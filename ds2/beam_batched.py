"""CTC prefix beam search over a whole batch at once, in PyTorch on any device, with an n-gram model in tensors.

Shapes: T frames, B utterances, V labels (0 is the blank), K beam. A prefix is a label sequence without blanks and
repeats, in which spaces at the start and repeated spaces count as none. Its probability is kept in two halves:
alignments that end in a blank, and those that end in its last label (Hannun et al. 2014, "First-pass large vocabulary
continuous speech recognition using bi-directional recurrent DNNs", algorithm 1), ranked and pruned apart.

No Python loop runs over utterances or prefixes, and nothing waits for the device but once a batch. On a GPU all frames
are one launch of the kernel of `beam_kernel`; what it does not take runs as on the CPU, a frame a CUDA graph launch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from ds2_ops.ctc import beam as kernel
from numpy.typing import NDArray
from torch import Tensor

from ds2.beam_kernel import KernelSearch, read_labels
from ds2.beam_search import BLANK
from ds2.config import DecodeConfig
from ds2.fusion import LENGTH, Fusion

_NONE = -math.inf
_PRIMES = (-7046029254386353131, 6364136223846793005)  # odd multipliers of a rolling hash, as signed 64-bit integers
_DEAD_HASH, _DEAD_PARENT, _ROOT_PARENT = 0x1D5A, 0x2E6B, 0x3F7C
HASH, PARENT, LAST, ENTRY = range(4)


@dataclass(frozen=True)
class Frames:
    """The frames of a batch that a search has to look at, packed; the rest only adds to every score."""

    log_probs: (
        Tensor  # (T'', B, V) float32: labels that are not followed are -inf; past an utterance's end only the blank, 0
    )
    prune: Tensor  # (T'', B) float64: what `decode.prune` is there; infinite past the end


@dataclass(frozen=True)
class Found:
    """The N best label sequences of each utterance, best first, on the CPU."""

    labels: list[list[tuple[int, ...]]]
    scores: NDArray[np.float64]  # (B, N, 4): total, acoustic, language model, bonus; total -inf: none


def pack_frames(log_probs: Tensor, lengths: Tensor, options: DecodeConfig) -> Frames:
    """Drop labels below `label_min_log_prob` and join runs of frames in which only the blank is left.

    After the first frame of such a run every prefix ends in a blank, so the others change no rank: the result is that
    of all frames, exactly.

    Args:
        log_probs: (T, B, V) float32.
        lengths: (B,) CPU int64.
    """
    packed, counts = _pack(log_probs, lengths, options)
    longest = int(counts.max()) if len(log_probs) else 0
    live = torch.arange(longest, device=log_probs.device)[:, None] < counts
    packed = packed[:longest]
    packed[:, :, BLANK + 1 :].masked_fill_(~live[..., None], _NONE)
    prune = torch.where(live, options.prune, math.inf)
    return Frames(packed, prune.double())


def _pack(log_probs: Tensor, lengths: Tensor, options: DecodeConfig) -> tuple[Tensor, Tensor]:
    """Return (T + 1, B, V) packed frames and (B,) int64 how many each utterance has, past which they are 0."""
    frames, batch, _ = log_probs.shape
    device = log_probs.device
    valid = torch.arange(frames, device=device)[:, None] < lengths.to(device, non_blocking=True)
    best = log_probs.argmax(2, keepdim=True)
    followed = (log_probs >= options.label_min_log_prob).scatter_(2, best, True)
    if options.lexicon:
        followed[:, :, BLANK] = True  # a way on for prefixes that no word goes on from by the labels followed
    silent = ~followed[:, :, BLANK + 1 :].any(2)
    kept = valid.clone()
    kept[1:] &= ~(silent[1:] & silent[:-1])
    place = kept.long().cumsum(0) - 1
    place = torch.where(valid, place, frames)  # frames past the end land on a row that is cut off
    packed = torch.zeros(frames + 1, batch, log_probs.shape[2], device=device)
    packed.scatter_add_(0, place[..., None].expand_as(log_probs), log_probs.masked_fill(~followed, _NONE))
    return packed, kept.sum(0)


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
            packed, counts = _pack(log_probs, lengths, self.options)
            end = self.kernel.search(packed, counts)
            table, entries = _rank(self.fusion, end, self.options.nbest)
            return Found(read_labels(kernel.trace(entries, end.grown)), table.cpu().numpy())
        frames = pack_frames(log_probs, lengths, self.options)
        run = _Run(self.fusion, frames, self.options.beam)
        if log_probs.is_cuda:
            run.advance_by_graph()
        else:
            for _ in range(len(frames.log_probs)):
                run.step()
        return run.finish(self.options.nbest)


class _Run:
    """The state of one batch, updated in place so that a CUDA graph can replay a step."""

    def __init__(self, fusion: Fusion, frames: Frames, beam: int) -> None:
        self.fusion, self.frames, self.beam = fusion, frames, beam
        length, batch, self.labels = frames.log_probs.shape
        device = frames.log_probs.device
        self.time = torch.zeros(1, dtype=torch.int64, device=device)
        self.halves = torch.full((2, batch, beam), _NONE, dtype=torch.float64, device=device)  # blank, last label
        self.halves[0, :, 0] = 0.0
        self.slots = torch.arange(beam, device=device)
        self.every_label = torch.arange(self.labels, device=device)
        self.names = torch.zeros(batch, beam, 4, dtype=torch.int64, device=device)  # hash, parent's, last label, entry
        self.names[..., HASH] = _DEAD_HASH + self.slots
        self.names[..., PARENT] = _DEAD_PARENT
        self.names[:, 0, HASH], self.names[:, 0, PARENT] = 0, _ROOT_PARENT
        self.names[..., LAST] = max(fusion.spelling.space, 0)
        self.integers, self.floats = fusion.start(batch, beam)
        self.grown_from = torch.zeros(length, batch, beam, dtype=torch.int32, device=device)  # entry 0 is the root
        self.grown_by = torch.zeros(length, batch, beam, dtype=torch.int16, device=device)

    def advance_by_graph(self) -> None:
        """Run all frames: the first as it is (it also warms up), the others as replays of one captured step."""
        length = len(self.frames.log_probs)
        stream = torch.cuda.Stream(self.time.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.time.device))
        with torch.cuda.stream(stream):
            for _ in range(min(1, length)):
                self.step()
        torch.cuda.current_stream(self.time.device).wait_stream(stream)
        if length > 1:
            graph = torch.cuda.CUDAGraph()
            # Other threads may go on calling CUDA: a loader's, that pins the next batch, would else end the capture.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.step()
            for _ in range(length - 1):
                graph.replay()

    def step(self) -> None:
        """Extend all prefixes by one frame, merge equal ones and keep the best."""
        beam, labels, space = self.beam, self.labels, self.fusion.spelling.space
        log_probs = self.frames.log_probs.index_select(0, self.time)[0].double()  # (B, V)
        prune = self.frames.prune.index_select(0, self.time)[0]
        hashes, parents, last, entry = self.names.unbind(-1)
        both = torch.logaddexp(*self.halves)
        in_blank, in_label = self.halves

        repeats = last[..., None] == self.every_label
        acoustic = torch.where(repeats, in_blank[..., None], both[..., None]) + log_probs[:, None]  # (B, K, V)
        acoustic[..., BLANK] = _NONE
        stay_blank = both + log_probs[:, BLANK, None]
        stay_label = in_label + log_probs.gather(1, last)
        if space >= 0:  # another space after a space, or before everything, changes nothing
            boundary = self.integers[..., LENGTH] == 0
            stay_label = torch.where(boundary, both + log_probs[:, space, None], stay_label)
            acoustic[..., space].masked_fill_(boundary, _NONE)

        same = hashes[:, None, :] == parents[..., None]  # (B, K, K): the second is the first without its last label
        met, at = same.max(2)
        place = at * labels + last
        merged = acoustic.flatten(1).gather(1, place).masked_fill_(~met, _NONE)
        stay_label = torch.logaddexp(stay_label, merged)
        blank_place = self.slots * labels + BLANK
        acoustic = acoustic.flatten(1).scatter(1, torch.where(met, place, blank_place), _NONE)

        extensions = self.fusion.extend(self.integers, self.floats)
        scores = torch.cat(
            [stay_blank + extensions.stay, stay_label + extensions.stay, acoustic + extensions.extended.flatten(1)], 1
        )
        top, chosen = scores.topk(min(beam, scores.shape[1]), 1)
        alive = (top >= top[:, :1] - prune[:, None]) & (top > _NONE)

        kept = torch.zeros(len(scores), 2 * beam + 1, dtype=torch.bool, device=scores.device)
        kept.scatter_(1, chosen.clamp(max=2 * beam), alive)
        grown = chosen >= 2 * beam
        source = torch.where(grown, (chosen - 2 * beam) // labels, chosen % beam)
        label = ((chosen - 2 * beam) % labels).masked_fill(~grown, BLANK)
        is_blank = chosen < beam
        blank_kept, label_kept = kept[:, :beam].gather(1, source), kept[:, beam : 2 * beam].gather(1, source)
        alive &= is_blank | grown | ~blank_kept  # the slot of the blank half holds both
        in_blank = stay_blank.gather(1, source).masked_fill_(~(alive & is_blank), _NONE)
        carried = stay_label.gather(1, source).masked_fill_(~label_kept | grown, _NONE)
        in_label = torch.where(grown, acoustic.gather(1, (chosen - 2 * beam).clamp_(min=0)), carried)
        in_label.masked_fill_(~alive, _NONE)

        integers, floats = self.fusion.take(self.integers, self.floats, extensions, source, label)
        hashes, parents, last, entry = self.names.gather(1, source[..., None].expand(-1, -1, 4)).unbind(-1)
        longer = ((hashes ^ (label + 1) * _PRIMES[0]) * _PRIMES[1]) ^ (hashes >> 29)
        names = torch.stack(
            [
                torch.where(alive, torch.where(grown, longer, hashes), _DEAD_HASH + self.slots),
                torch.where(grown, hashes, parents).masked_fill(~alive, _DEAD_PARENT),
                torch.where(grown, label, last),
                torch.where(grown, self.time * beam + self.slots + 1, entry),
            ],
            -1,
        )
        self.grown_from.index_copy_(0, self.time, entry[None].int())
        self.grown_by.index_copy_(0, self.time, label[None].short())
        self.halves.copy_(torch.stack([in_blank, in_label]))
        self.names.copy_(names)
        self.integers.copy_(integers)
        self.floats.copy_(floats)
        self.time += 1

    def finish(self, nbest: int) -> Found:
        """End all prefixes, join those that differ in a last space only, and read the best ones out."""
        table, entries = _rank(self.fusion, self, nbest)
        labels = _read_out(entries.cpu().numpy(), self.grown_from, self.grown_by, self.beam)
        return Found(labels, table.cpu().numpy())


def _rank(fusion: Fusion, end: kernel.Found | _Run, nbest: int) -> tuple[Tensor, Tensor]:
    """Join prefixes that differ in a last space only: scores (B, N, 4) as in `Found` and entries (B, N) of the best."""
    acoustic = torch.logaddexp(*end.halves)
    log_prob, bonus, fused = fusion.finish(end.integers, end.floats, acoustic > _NONE)
    hashes, parents, _, entry = end.names.unbind(-1)
    beam = hashes.shape[1]
    preferred = torch.arange(beam, device=hashes.device).expand_as(hashes)
    if fusion.spelling.space >= 0:
        ends_in_space = (end.integers[..., LENGTH] == 0) & (hashes != 0)
        hashes = torch.where(ends_in_space, parents, hashes)
        preferred = preferred + beam * ends_in_space
    same = hashes[:, None, :] == hashes[..., None]
    joined = torch.where(same, acoustic[:, None, :], _NONE).logsumexp(2)
    first = torch.where(same, preferred[:, None, :], 2 * beam).amin(2) == preferred
    total = torch.where(first, joined + fused, _NONE)
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
