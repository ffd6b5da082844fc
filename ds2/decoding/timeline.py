"""When words were said in sources of any length: alignment in memory and time that do not grow with them.

A timeline keeps the frames of one utterance that its last words may still be aligned to. Up to `LONGEST_S` these are
all frames, and words get the times of one alignment of the whole. Past that, what is certain and lies `GUARD_S` back is
settled every `PERIOD_S` of frames heard, wherever the chunks end: so times do not depend on how a source was cut.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ds2.decoding.alignment import Alignment, align_all, force_align
from ds2.decoding.hypothesis import Hypothesis, Run, spell_words
from ds2.text.alphabet import BLANK, Alphabet

PERIOD_S = 5.0
LONGEST_S = 20.0
MOST_S = 60.0  # frames kept while hypotheses disagree about what was said in them; then the best one is believed
GUARD_S = 5.0
_SILENCE_S = 1.0  # of a longer silence only so much is kept once `LONGEST_S` are: no label is held over the rest


class Timeline:
    """The frames of one utterance whose words have no certain times yet, and the times of the others.

    Args:
        alphabet: of the labels.
        frame_s: seconds a frame.
        silent_log_prob: where all labels but the blank lie below, a frame is silent.
    """

    def __init__(self, alphabet: Alphabet, frame_s: float, silent_log_prob: float) -> None:
        self.alphabet, self.frame_s, self.silent_log_prob = alphabet, frame_s, silent_log_prob
        self.heard = 0  # frames
        self._period = max(1, round(PERIOD_S / frame_s))
        self.settled: list[Run] = []
        self.kept = 0  # frames
        self._frames: list[Tensor] = []  # (T, V) each
        self._numbers: list[Tensor] = []  # (T,) which frames of the source they are
        # New objects for every chunk of every stream would make garbage collections frequent and long.
        self._batches: list[Tensor] = []  # (T, B, V) that hold what is new
        self._spans = array("q")  # row, first and last frame in each of them

    def hear(self, log_probs: Tensor, row: int, first: int, last: int) -> None:
        """Take the next frames, `first` to before `last` of a row of a batch (T, B, V), which must stay as it is."""
        self._batches.append(log_probs)  # looked into when it is needed
        self._spans.extend((row, first, last))
        self.heard += last - first
        self.kept += last - first

    def until_turn(self) -> int:
        """Frames until the next time at which `settle` is due, at least 1."""
        frames = self._period - self.heard % self._period
        while (self.kept + frames) * self.frame_s <= LONGEST_S:
            frames += self._period
        return frames

    def is_due(self) -> bool:
        """Whether it is time to `settle`: more is kept than one alignment should take."""
        return self.heard % self._period == 0 and self.kept * self.frame_s > LONGEST_S

    def settle(self, labels: Sequence[int], certain: int) -> int:
        """Let go of frames that words were aligned to.

        Args:
            labels: of the best hypothesis, from the first of the utterance.
            certain: how many of them all hypotheses share.

        Returns:
            How many labels have certain times now. It is more than `certain` where `MOST_S` of frames gave no
            agreement: hypotheses that have other labels must be dropped.
        """
        self._drop_long_silences()
        frames, numbers = self.window()
        done, late = len(self.settled), self.kept * self.frame_s > MOST_S
        [alignment] = force_align(frames[:, None], torch.tensor([len(frames)]), [labels[done:]])
        if alignment is None:
            return done
        limit = max(0, len(frames) - round(GUARD_S / self.frame_s))
        known = len(labels) - done if late else certain - done
        count = min(known, int(alignment.ends.searchsorted(limit, side="right")))
        self.settled += _numbered(alignment.runs()[:count], numbers)
        cut = int(alignment.ends[count - 1]) if count else 0
        if late or count < known:  # what follows is certain too, or nobody will ever agree: it starts where it starts
            cut = min([limit, *alignment.starts[count : count + 1].tolist()])
        self._keep(frames[cut:].clone(), numbers[cut:].clone())
        return len(self.settled)

    def window(self) -> tuple[Tensor, Tensor]:
        """The frames (T, V) that are kept and their numbers (T,)."""
        rows, firsts, lasts = (self._spans[at::3] for at in range(3))
        self._frames += [
            b[first:last, row] for b, row, first, last in zip(self._batches, rows, firsts, lasts, strict=True)
        ]
        self._numbers.append(torch.arange(self.heard - sum(lasts) + sum(firsts), self.heard))
        self._batches, self._spans = [], array("q")
        return torch.cat(self._frames), torch.cat(self._numbers)

    def _keep(self, frames: Tensor, numbers: Tensor) -> None:
        self._frames, self._numbers, self.kept = [frames], [numbers], len(numbers)

    def _drop_long_silences(self) -> None:
        frames, numbers = self.window()
        silent = (frames[:, BLANK + 1 :].amax(1) < self.silent_log_prob).cpu()
        place = torch.arange(len(frames))
        begun = torch.where(silent, 0, place + 1).cummax(0).values  # one past the last frame that is not silent
        wanted = place - begun < round(_SILENCE_S / self.frame_s)
        self._keep(frames[wanted.to(frames.device)], numbers[wanted])


def _numbered(runs: Sequence[Run], numbers: Tensor) -> list[Run]:
    """Runs of a window's frames as runs of the source's."""
    return [(label, int(numbers[start]), int(numbers[end - 1]) + 1, peak) for label, start, end, peak in runs]


def with_words(rows: Sequence[Sequence[Hypothesis]], timelines: Sequence[Timeline]) -> list[list[Hypothesis]]:
    """Give words to the N best hypotheses of each utterance, of a frame or more, with times and confidences."""
    windows, numbers = map(list, zip(*(timeline.window() for timeline in timelines), strict=True))
    lengths = torch.tensor([len(window) for window in windows])
    targets = [[h.labels[len(t.settled) :] for h in row] for row, t in zip(rows, timelines, strict=True)]
    aligned = align_all(pad_sequence(windows), lengths, targets)

    def worded(hypothesis: Hypothesis, alignment: Alignment | None, timeline: Timeline, at: Tensor) -> Hypothesis:
        runs = timeline.settled + ([] if alignment is None else _numbered(alignment.runs(), at))
        return replace(hypothesis, words=spell_words(runs, timeline.alphabet, timeline.frame_s))

    return [
        [worded(h, alignment, timeline, at) for h, alignment in zip(row, alignments, strict=True)]
        for row, alignments, timeline, at in zip(rows, aligned, timelines, numbers, strict=True)
    ]
