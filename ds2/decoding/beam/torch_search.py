"""CTC prefix beam search over a whole batch at once, in PyTorch on any device, with an n-gram model in tensors.

Shapes: T frames, B utterances, V labels (0 is the blank), K beam. A prefix is a label sequence without blanks and
repeats, in which spaces at the start and repeated spaces count as none. Its probability is kept in two halves:
alignments that end in a blank, and those that end in its last label (Hannun et al. 2014, "First-pass large vocabulary
continuous speech recognition using bi-directional recurrent DNNs", algorithm 1), ranked and pruned apart.

No Python loop runs over utterances or prefixes, and nothing waits for the device but once a batch. On a GPU all frames
are one launch of the kernel of `kernel_search`; what it does not take runs as on the CPU, a frame a CUDA graph launch.
"""

from __future__ import annotations

import torch

from ds2.decoding.beam.fusion import LENGTH, Fusion
from ds2.decoding.frames import NONE, Frames
from ds2.text.alphabet import BLANK

_PRIMES = (-7046029254386353131, 6364136223846793005)  # odd multipliers of a rolling hash, as signed 64-bit integers
_DEAD_HASH, _DEAD_PARENT, _ROOT_PARENT = 0x1D5A, 0x2E6B, 0x3F7C
HASH, PARENT, LAST, ENTRY = range(4)


class TorchSearch:
    """The state of one batch, updated in place so that a CUDA graph can replay a step."""

    def __init__(self, fusion: Fusion, frames: Frames, beam: int) -> None:
        self.fusion, self.frames, self.beam = fusion, frames, beam
        length, batch, self.labels = frames.log_probs.shape
        device = frames.log_probs.device
        self.time = torch.zeros(1, dtype=torch.int64, device=device)
        self.halves = torch.full((2, batch, beam), NONE, dtype=torch.float64, device=device)  # blank, last label
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
        acoustic[..., BLANK] = NONE
        stay_blank = both + log_probs[:, BLANK, None]
        stay_label = in_label + log_probs.gather(1, last)
        if space >= 0:  # another space after a space, or before everything, changes nothing
            boundary = self.integers[..., LENGTH] == 0
            stay_label = torch.where(boundary, both + log_probs[:, space, None], stay_label)
            acoustic[..., space].masked_fill_(boundary, NONE)

        same = hashes[:, None, :] == parents[..., None]  # (B, K, K): the second is the first without its last label
        met, at = same.max(2)
        place = at * labels + last
        merged = acoustic.flatten(1).gather(1, place).masked_fill_(~met, NONE)
        stay_label = torch.logaddexp(stay_label, merged)
        blank_place = self.slots * labels + BLANK
        acoustic = acoustic.flatten(1).scatter(1, torch.where(met, place, blank_place), NONE)

        extensions = self.fusion.extend(self.integers, self.floats)
        scores = torch.cat(
            [stay_blank + extensions.stay, stay_label + extensions.stay, acoustic + extensions.extended.flatten(1)], 1
        )
        top, chosen = scores.topk(min(beam, scores.shape[1]), 1)
        alive = (top >= top[:, :1] - prune[:, None]) & (top > NONE)

        kept = torch.zeros(len(scores), 2 * beam + 1, dtype=torch.bool, device=scores.device)
        kept.scatter_(1, chosen.clamp(max=2 * beam), alive)
        grown = chosen >= 2 * beam
        source = torch.where(grown, (chosen - 2 * beam) // labels, chosen % beam)
        label = ((chosen - 2 * beam) % labels).masked_fill(~grown, BLANK)
        is_blank = chosen < beam
        blank_kept, label_kept = kept[:, :beam].gather(1, source), kept[:, beam : 2 * beam].gather(1, source)
        alive &= is_blank | grown | ~blank_kept  # the slot of the blank half holds both
        in_blank = stay_blank.gather(1, source).masked_fill_(~(alive & is_blank), NONE)
        carried = stay_label.gather(1, source).masked_fill_(~label_kept | grown, NONE)
        in_label = torch.where(grown, acoustic.gather(1, (chosen - 2 * beam).clamp_(min=0)), carried)
        in_label.masked_fill_(~alive, NONE)

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
