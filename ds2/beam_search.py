"""Logits to words: the best path, with times and confidences.

Shapes: T' output frames, B batch, V labels (0 is the CTC blank).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds2.system.errors import UserError
from ds2.text.alphabet import BLANK, WORD_MARK, Alphabet


class DecodeError(UserError):
    """Logits that cannot be decoded; `rows` are the utterances' places in the batch."""

    def __init__(self, message: str, rows: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.rows = list(rows)


@dataclass(frozen=True)
class Word:
    """A word and where it was heard.

    `confidence`, 0 to 1, is the product of its labels' probabilities, each at its most certain frame; where
    `decode.confidence` was fitted on a dev set, the share of such words that were right there.
    """

    text: str
    start_s: float
    end_s: float
    confidence: float


@dataclass(frozen=True)
class Hypothesis:
    """What was recognised in one utterance; scores are natural logarithms.

    `score` is Q(y) = acoustic + alpha x lm + bonus, of a greedy one the best path's log-prob.
    """

    text: str
    score: float
    labels: tuple[int, ...]
    words: tuple[Word, ...]
    acoustic: float = 0.0  # log p_ctc(y|x), summed over the alignments that the search followed
    lm: float = 0.0  # log p_lm(y), not weighted
    bonus: float = 0.0  # beta x words + hot words


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


def spell_words(runs: Sequence[tuple[int, int, int, float]], alphabet: Alphabet, frame_s: float) -> tuple[Word, ...]:
    """Gather labels into words, at white space or, in alphabets of pieces, before the word mark.

    Args:
        runs: label, first frame, frame after the last, highest log-prob; in order.
        alphabet: symbols of the labels.
        frame_s: seconds an output frame.
    """
    spelled: list[list[tuple[int, int, int, float]]] = [[]]
    for run in runs:
        symbol = alphabet.symbols[run[0]]
        if symbol.isspace() or symbol.startswith(WORD_MARK):
            spelled.append([])
        if symbol.strip().removeprefix(WORD_MARK):
            spelled[-1].append(run)
    return tuple(
        Word(
            alphabet.decode(label for label, *_ in word).replace(WORD_MARK, ""),
            word[0][1] * frame_s,
            word[-1][2] * frame_s,
            math.exp(sum(peak for *_, peak in word)),
        )
        for word in spelled
        if word
    )


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
