"""Greedy decoding: the most probable label of every frame, collapsed, with times and confidences.

Shapes: T' output frames, B batch, V labels (0 is the CTC blank).
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ds2.decoding.decoder import Decoder, check_log_probs
from ds2.decoding.hypothesis import Hypothesis, Run, Word, spell_words
from ds2.decoding.phrases import HotWords, refuse_hot_words
from ds2.text.alphabet import BLANK, Alphabet


class BestPath:
    """Collapses the best path of one stream: merges repeats, drops blanks and groups labels into words."""

    def __init__(self, alphabet: Alphabet, frame_s: float) -> None:
        self.alphabet, self.frame_s = alphabet, frame_s
        self.score = 0.0  # sum of the log-probs of the labels
        self._frames = 0
        self._labels: list[int] = []  # of complete runs
        self._words: list[Word] = []  # complete ones
        self._text = ""  # of these
        self._runs: list[Run] = []  # complete ones of the last word
        self._open: Run = (BLANK, 0, 0, 0.0)  # the last run, which the next frame may extend
        self._unfinished: tuple[Word, ...] | None = ()  # of the last two; None: they have changed

    def step(self, runs: Sequence[Run], frames: int, score: float) -> None:
        """Add the next frames: runs of one label each, in order, with frames that count from 0; `score` is of all."""
        before, self.score = self._frames, score
        for label, start, end, peak in runs:
            open_label = self._open[0]
            if label == open_label:
                self._open = (label, self._open[1], before + end, max(self._open[3], peak))
            else:
                if open_label != BLANK:
                    self._close()
                self._open = (label, before + start, before + end, peak)
            if label != BLANK or open_label != BLANK:
                self._unfinished = None
        self._frames += frames

    def _close(self) -> None:
        label = self._open[0]
        if self.alphabet.starts_word[label]:
            words = spell_words(self._runs, self.alphabet, self.frame_s)
            self._words += words
            self._text = " ".join(filter(None, [self._text, *(word.text for word in words)]))
            self._runs = []
        self._labels.append(label)
        self._runs.append(self._open)

    def hypothesis(self) -> Hypothesis:
        """Return the hypothesis of all frames so far."""
        label = self._open[0]
        last = [] if label == BLANK else [self._open]
        if self._unfinished is None:
            self._unfinished = spell_words(self._runs + last, self.alphabet, self.frame_s)
        words = (*self._words, *self._unfinished)
        labels = (*self._labels, *(run[0] for run in last))
        text = " ".join(filter(None, [self._text, *(word.text for word in self._unfinished)]))
        complete = len(words) - (not self.alphabet.symbols[label].isspace())
        fixed = complete if self.alphabet.starts_word[label] else len(self._words)
        return Hypothesis(text, self.score, labels, words, self.score, fixed_words=fixed)


def step_paths(paths: Sequence[BestPath], frames: Tensor, lengths: Tensor) -> None:
    """Add the next frames (T', B, V), log-probs, to the path of each stream; one copy from the device a batch."""
    highest, likeliest = frames.max(2)
    packed = torch.stack([highest.double(), likeliest.double()]).cpu().numpy().transpose(0, 2, 1)
    log_probs, labels = packed[0].astype(np.float32), packed[1].astype(np.int64)
    counts, scores = lengths.numpy(), np.array([path.score for path in paths])
    valid = np.arange(labels.shape[1]) < counts[:, None]
    # In order, so that sums do not depend on the chunks.
    scores = np.column_stack([scores, np.where(valid, log_probs, 0.0)]).cumsum(1)[:, -1]
    begins = valid.copy()
    begins[:, 1:] &= labels[:, 1:] != labels[:, :-1]
    first = np.flatnonzero(begins[valid])  # of each run, in the valid frames of all streams
    rows = np.repeat(np.arange(len(counts)), counts)[first]
    start = (counts.cumsum() - counts)[rows]  # of its stream
    peaks = np.maximum.reduceat(log_probs[valid], first) if len(first) else np.empty(0)
    columns = (labels[valid][first], first - start, np.append(first[1:], counts.sum()) - start, peaks)
    runs = list(zip(*(column.tolist() for column in columns), strict=True))
    at = [0, *begins.sum(1).cumsum().tolist()]
    for row, (path, count, score) in enumerate(zip(paths, counts.tolist(), scores.tolist(), strict=True)):
        path.step(runs[at[row] : at[row + 1]], count, score)


class GreedyDecoder(Decoder):
    """Decodes each utterance by its best path: the most probable label of every frame, collapsed; one hypothesis."""

    def __init__(self, alphabet: Alphabet, frame_s: float) -> None:
        self.alphabet, self.frame_s = alphabet, frame_s

    def start(self, hot_words: HotWords | None = None) -> BestPath:
        refuse_hot_words(hot_words)
        return BestPath(self.alphabet, self.frame_s)

    def step(self, streams: Sequence[BestPath], log_probs: Tensor, lengths: Tensor) -> None:
        check_log_probs(log_probs, lengths, len(self.alphabet), allow_empty=True)
        step_paths(streams, log_probs, lengths)

    def best(self, streams: Sequence[BestPath], *, words: bool = False) -> list[Hypothesis]:
        """Return the hypotheses so far, always with words."""
        return [path.hypothesis() for path in streams]
