"""The best path: the most probable label of every frame, collapsed, with times and confidences.

Shapes: T' output frames, B batch, V labels (0 is the CTC blank).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds2.decoding.decoder import check_log_probs
from ds2.decoding.hypothesis import DecodeError, Hypothesis, spell_words
from ds2.text.alphabet import BLANK, Alphabet


def best_path(logits: Tensor, lengths: Tensor) -> list[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """Find the most probable label of every frame; one copy from the device a batch.

    Args:
        logits: (T', B, V) of any floating type on any device; log-probs will do, as softmax leaves them as they are.
        lengths: (B,) integers on the CPU, valid frames.

    Returns:
        For each utterance its labels (length,) int64 and their natural log-probs (length,) float32.

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


def collapse(
    labels: NDArray[np.int64], log_probs: NDArray[np.float32], alphabet: Alphabet, frame_s: float
) -> Hypothesis:
    """Merge repeats, take blanks away and gather words.

    Args:
        labels: (T',) label of each frame.
        log_probs: (T',) their natural log-probs.
        alphabet: symbols of the labels; white space among them separates words.
        frame_s: seconds an output frame.
    """
    score = float(log_probs.sum(dtype=np.float64))
    if not len(labels):
        return Hypothesis("", score, (), (), score)
    starts = np.flatnonzero(np.concatenate([[True], labels[1:] != labels[:-1]]))
    ends = np.concatenate([starts[1:], [len(labels)]])
    peaks = np.maximum.reduceat(log_probs, starts)
    kept = labels[starts] != BLANK
    runs = list(zip(*(column[kept].tolist() for column in (labels[starts], starts, ends, peaks)), strict=True))
    words = spell_words(runs, alphabet, frame_s)
    return Hypothesis(" ".join(word.text for word in words), score, tuple(run[0] for run in runs), words, score)


def greedy_decode(logits: Tensor, lengths: Tensor, alphabet: Alphabet, frame_s: float) -> list[Hypothesis]:
    """Decode each utterance by its best path: the most probable label of every frame, collapsed.

    Args:
        logits: (T', B, V), as :func:`best_path`.
        lengths: (B,) integers on the CPU, valid frames.
        alphabet: symbols of the V labels.
        frame_s: seconds an output frame.

    Raises:
        DecodeError: NaN or infinite logits in a valid frame.
        ValueError: shapes that do not fit, or an alphabet of another size than V.
    """
    if logits.shape[-1] != len(alphabet):
        raise ValueError(f"logits have {logits.shape[-1]} labels, the alphabet has {len(alphabet)} with the blank")
    return [collapse(labels, log_probs, alphabet, frame_s) for labels, log_probs in best_path(logits, lengths)]


class GreedyDecoder:
    """The most probable label of every frame, collapsed."""

    def __init__(self, alphabet: Alphabet, frame_s: float) -> None:
        self.alphabet, self.frame_s = alphabet, frame_s

    def decode(self, log_probs: Tensor, lengths: Tensor) -> list[list[Hypothesis]]:
        """Decode as :class:`Decoder` says; one hypothesis each."""
        check_log_probs(log_probs, lengths, len(self.alphabet))
        return [[found] for found in greedy_decode(log_probs, lengths, self.alphabet, self.frame_s)]

    def start(self, rows: int = 1) -> GreedyDecoding:
        """Begin utterances whose frames come chunk by chunk; the result is that of the whole."""
        return GreedyDecoding(rows, self.alphabet, self.frame_s)


class GreedyDecoding:
    """Best paths on their way: two numbers a frame are kept."""

    def __init__(self, rows: int, alphabet: Alphabet, frame_s: float) -> None:
        self.alphabet, self.frame_s = alphabet, frame_s
        self._labels = [[np.empty(0, np.int64)] for _ in range(rows)]
        self._log_probs = [[np.empty(0, np.float32)] for _ in range(rows)]

    def step(self, log_probs: Tensor, lengths: Tensor) -> None:
        """Hear the next frames; see :class:`~ds2.decoding.decoder.Decoding`."""
        check_log_probs(log_probs, lengths, len(self.alphabet), empty_too=True)
        for row, (labels, path) in enumerate(best_path(log_probs, lengths)):
            self._labels[row].append(labels)
            self._log_probs[row].append(path)

    def best(self) -> list[Hypothesis]:
        """Collapse what was heard so far; see :class:`~ds2.decoding.decoder.Decoding`."""
        return [
            collapse(np.concatenate(labels), np.concatenate(log_probs), self.alphabet, self.frame_s)
            for labels, log_probs in zip(self._labels, self._log_probs, strict=True)
        ]

    def finish(self) -> list[list[Hypothesis]]:
        """Collapse all; see :class:`~ds2.decoding.decoder.Decoding`."""
        return [[found] for found in self.best()]
