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


def best_path(logits: Tensor, lengths: Tensor) -> list[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """Find the most probable label of every frame; one copy from the device a batch.

    Args:
        logits: (T', B, V) of any floating type on any device; log-probs too, which log_softmax does not change.
        lengths: (B,) integers on the CPU, valid frames.

    Returns:
        For each utterance the labels (length,) int64 and their natural log-probs (length,) float32.

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
    packed = torch.stack([log_probs.double(), labels.double()]).cpu().numpy()
    paths = [
        (packed[1, :length, row].astype(np.int64), packed[0, :length, row].astype(np.float32))
        for row, length in enumerate(lengths.tolist())
    ]
    bad = [row for row, (_, path_log_probs) in enumerate(paths) if not np.isfinite(path_log_probs).all()]
    if bad:
        raise DecodeError(f"logits of the utterances at {bad} in the batch are NaN or infinite", bad)
    return paths


class BestPath:
    """Collapses the best path of one stream: merges repeats, drops blanks and groups labels into words.

    Args:
        alphabet: symbols of the labels; white space and word marks separate words.
        frame_s: seconds per output frame.
    """

    def __init__(self, alphabet: Alphabet, frame_s: float) -> None:
        self.alphabet, self.frame_s = alphabet, frame_s
        self._starts_word = [alphabet.starts_word(label) for label in range(len(alphabet))]
        self._frames, self._score = 0, 0.0
        self._labels: list[int] = []  # of complete runs
        self._words: list[Word] = []  # complete ones
        self._runs: list[Run] = []  # complete ones of the last word
        self._open: Run = (BLANK, 0, 0, 0.0)  # the last run, which the next frame may extend

    def step(self, labels: NDArray[np.int64], log_probs: NDArray[np.float32]) -> None:
        """Add the labels (T',) of the next frames and their natural log-probs (T',)."""
        if not len(labels):
            return
        self._score = float(np.add.accumulate(np.append(self._score, log_probs))[-1])  # in order
        starts = np.flatnonzero(np.concatenate([[True], labels[1:] != labels[:-1]]))
        ends = np.concatenate([starts[1:], [len(labels)]]) + self._frames
        peaks = np.maximum.reduceat(log_probs, starts)
        columns = (labels[starts], starts + self._frames, ends, peaks)
        self._frames += len(labels)
        for label, start, end, peak in zip(*(column.tolist() for column in columns), strict=True):
            if label == self._open[0]:
                self._open = (label, self._open[1], end, max(self._open[3], peak))
            else:
                self._close()
                self._open = (label, start, end, peak)

    def _close(self) -> None:
        label = self._open[0]
        if label == BLANK:
            return
        if self._starts_word[label]:
            self._words += spell_words(self._runs, self.alphabet, self.frame_s)
            self._runs = []
        self._labels.append(label)
        self._runs.append(self._open)

    def hypothesis(self) -> Hypothesis:
        """Return the hypothesis of all frames so far."""
        last = [] if self._open[0] == BLANK else [self._open]
        words = (*self._words, *spell_words(self._runs + last, self.alphabet, self.frame_s))
        labels = (*self._labels, *(run[0] for run in last))
        text = " ".join(word.text for word in words)
        open_symbol = self.alphabet.symbols[self._open[0]]
        fixed = len(words) - (not open_symbol.isspace()) if self._starts_word[self._open[0]] else len(self._words)
        return Hypothesis(text, self._score, labels, words, self._score, fixed_words=fixed)


def greedy_decode(logits: Tensor, lengths: Tensor, alphabet: Alphabet, frame_s: float) -> list[Hypothesis]:
    """Decode each utterance by its best path: the most probable label of every frame, collapsed.

    Args:
        logits: (T', B, V), as :func:`best_path`.
        lengths: (B,) integers on the CPU, valid frames.
        alphabet: symbols of the V labels.
        frame_s: seconds per output frame.

    Raises:
        DecodeError: NaN or infinite logits in a valid frame.
        ValueError: shapes that do not fit, or an alphabet of another size than V.
    """
    if logits.shape[-1] != len(alphabet):
        raise ValueError(f"logits have {logits.shape[-1]} labels, the alphabet has {len(alphabet)} with the blank")
    hypotheses = []
    for labels, log_probs in best_path(logits, lengths):
        path = BestPath(alphabet, frame_s)
        path.step(labels, log_probs)
        hypotheses.append(path.hypothesis())
    return hypotheses


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
        paths = [path for decoding in decodings for path in decoding.paths]
        for path, frames in zip(paths, best_path(log_probs, lengths), strict=True):
            path.step(*frames)


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
