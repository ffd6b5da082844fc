"""Greedy decoding: the most probable label of every frame, collapsed, with times and confidences.

Shapes: T' output frames, B batch, V labels (0 is the CTC blank).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds2.decoding.decoder import Decoder, Decoding, check_log_probs, refuse_hot_words
from ds2.decoding.hypothesis import DecodeError, Hypothesis, Run, Word, spell_words
from ds2.decoding.lexicon import HotWords
from ds2.text.alphabet import BLANK, Alphabet


def best_path(logits: Tensor, lengths: Tensor) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Find the most probable label of every frame; one copy from the device a batch.

    Args:
        logits: (T', B, V) of any floating type on any device; log-probs too, which log_softmax does not change.
        lengths: (B,) integers on the CPU, valid frames.

    Returns:
        The labels (B, T') int64 and their natural log-probs (B, T') float32; what lies past a length does not count.

    Raises:
        DecodeError: an utterance has NaN or infinite logits in a valid frame.
        ValueError: shapes or lengths that do not fit.
    """
    frames, batch = logits.shape[:2] if logits.dim() == 3 else (0, -1)
    if lengths.shape != (batch,) or (batch and not 0 <= int(lengths.min()) <= int(lengths.max()) <= frames):
        raise ValueError(
            f"logits have shape {tuple(logits.shape)} and lengths are {lengths.tolist()}; expected (T', B, V) and B "
            "lengths of 0 to T' frames"
        )
    log_probs, labels = logits.float().log_softmax(2).max(2)
    packed = torch.stack([log_probs.double(), labels.double()]).cpu().numpy().transpose(0, 2, 1)
    past = np.arange(frames) >= lengths.numpy()[:, None]
    bad = np.flatnonzero(~(np.isfinite(packed[0]) | past).all(1)).tolist()
    if bad:
        raise DecodeError(f"logits of the utterances at {bad} in the batch are NaN or infinite", bad)
    return packed[1].astype(np.int64), packed[0].astype(np.float32)


class BestPath:
    """Collapses the best path of one stream: merges repeats, drops blanks and groups labels into words.

    Args:
        alphabet: symbols of the labels; white space and word marks separate words.
        frame_s: seconds per output frame.
    """

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

    def step(self, runs: Sequence[Run], frames: int) -> None:
        """Add the next frames: runs of one label each, in order, with frames that count from 0."""
        before = self._frames
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
        if self.alphabet.starts_word(label):
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
        fixed = complete if self.alphabet.starts_word(label) else len(self._words)
        return Hypothesis(text, self.score, labels, words, self.score, fixed_words=fixed)


def step_paths(paths: Sequence[BestPath], logits: Tensor, lengths: Tensor) -> None:
    """Add the next frames to the path of each stream; arguments and errors as `best_path`."""
    labels, log_probs = best_path(logits, lengths)
    counts, scores = lengths.numpy(), np.array([path.score for path in paths])
    valid = np.arange(labels.shape[1]) < counts[:, None]
    for frame in range(labels.shape[1]):  # in order, so that sums do not depend on the chunks
        scores += np.where(valid[:, frame], log_probs[:, frame], 0.0)
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
        path.step(runs[at[row] : at[row + 1]], count)
        path.score = score


def greedy_decode(logits: Tensor, lengths: Tensor, alphabet: Alphabet, frame_s: float) -> list[Hypothesis]:
    """Decode each utterance by its best path: the most probable label of every frame, collapsed.

    Args:
        logits: (T', B, V), as :func:`best_path`.
        lengths: (B,) integers on the CPU, valid frames.
        frame_s: seconds per output frame.

    Raises:
        DecodeError: NaN or infinite logits in a valid frame.
        ValueError: shapes that do not fit, or an alphabet of another size than V.
    """
    if logits.shape[-1] != len(alphabet):
        raise ValueError(f"logits have {logits.shape[-1]} labels, the alphabet has {len(alphabet)} with the blank")
    paths = [BestPath(alphabet, frame_s) for _ in lengths]
    step_paths(paths, logits, lengths)
    return [path.hypothesis() for path in paths]


class GreedyDecoder(Decoder):
    """Decodes each utterance by its best path; one hypothesis per utterance."""

    def __init__(self, alphabet: Alphabet, frame_s: float) -> None:
        self.alphabet, self.frame_s = alphabet, frame_s

    def decode(self, log_probs: Tensor, lengths: Tensor) -> list[list[Hypothesis]]:
        check_log_probs(log_probs, lengths, len(self.alphabet))
        return [[h] for h in greedy_decode(log_probs, lengths, self.alphabet, self.frame_s)]

    def start(self, rows: int = 1, hot_words: HotWords | None = None) -> GreedyDecoding:
        """Begin streams; the result of their chunks is that of the whole."""
        refuse_hot_words(hot_words)
        return GreedyDecoding(rows, self.alphabet, self.frame_s)

    def step(self, decodings: Sequence[GreedyDecoding], log_probs: Tensor, lengths: Tensor) -> None:
        check_log_probs(log_probs, lengths, len(self.alphabet), allow_empty=True)
        step_paths([path for decoding in decodings for path in decoding.paths], log_probs, lengths)


class GreedyDecoding(Decoding):
    """Streams of a greedy decoder; no frames are kept."""

    def __init__(self, rows: int, alphabet: Alphabet, frame_s: float) -> None:
        self.decoder = GreedyDecoder(alphabet, frame_s)
        self.paths = [BestPath(alphabet, frame_s) for _ in range(rows)]

    def step(self, log_probs: Tensor, lengths: Tensor) -> None:
        self.decoder.step([self], log_probs, lengths)

    def best(self) -> list[Hypothesis]:
        """Return the hypotheses so far, with words."""
        return [path.hypothesis() for path in self.paths]
