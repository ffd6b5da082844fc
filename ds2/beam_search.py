"""Logits to words: the best path, with times and confidences.

Shapes: T' output frames, B batch, V labels (0 is the CTC blank).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds2.alphabet import Alphabet

BLANK = 0


class DecodeError(ValueError):
    """Logits that cannot be decoded; `rows` are the utterances' places in the batch."""

    def __init__(self, message: str, rows: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.rows = list(rows)


@dataclass(frozen=True)
class Word:
    """A word and where it was heard.

    `confidence` is the product of its labels' probabilities, each at its most certain frame: 0 to 1, not calibrated.
    """

    text: str
    start_s: float
    end_s: float
    confidence: float


@dataclass(frozen=True)
class Hypothesis:
    """What was recognised in one utterance; `score` is a natural logarithm, of a greedy one the best path's."""

    text: str
    score: float
    labels: tuple[int, ...]
    words: tuple[Word, ...]


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
        return Hypothesis("", score, (), ())
    starts = np.flatnonzero(np.concatenate([[True], labels[1:] != labels[:-1]]))
    ends = np.concatenate([starts[1:], [len(labels)]])
    peaks = np.maximum.reduceat(log_probs, starts)
    kept = labels[starts] != BLANK
    runs = list(zip(*(column[kept].tolist() for column in (labels[starts], starts, ends, peaks)), strict=True))
    words: list[Word] = []
    spelled: list[tuple[int, int, int, float]] = []
    for run in [*runs, None]:
        if run is not None and not alphabet.symbols[run[0]].isspace():
            spelled.append(run)
        elif spelled:
            text = alphabet.decode(label for label, *_ in spelled)
            confidence = float(np.exp(sum(peak for *_, peak in spelled)))
            words.append(Word(text, spelled[0][1] * frame_s, spelled[-1][2] * frame_s, confidence))
            spelled = []
    return Hypothesis(" ".join(word.text for word in words), score, tuple(run[0] for run in runs), tuple(words))


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
