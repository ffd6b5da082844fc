"""Forced alignment: the best path of a batch of log-probs that spells given labels, and what it says of a transcript.

Shapes: T frames, B utterances, V labels (0 is the blank), S = 2 L + 1 states of the longest label sequence with blanks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from ds2_ops.ctc import align as kernel
from numpy.typing import NDArray
from torch import Tensor

from ds2.decoding.hypothesis import Hypothesis, Run, spell_words
from ds2.text.alphabet import BLANK, Alphabet

_STAY, _NEXT, _SKIP = range(3)


@dataclass(frozen=True)
class Alignment:
    """Where each label of one utterance lies on its best path; label i has the frames starts[i] .. ends[i] - 1."""

    labels: tuple[int, ...]
    starts: NDArray[np.int64]  # (L,) frames
    ends: NDArray[np.int64]  # (L,)
    peaks: NDArray[np.float32]  # (L,) natural log-prob of the label at its most certain frame
    log_prob: float  # of the whole path

    def runs(self) -> list[Run]:
        """The runs of the labels, as `spell_words` takes them."""
        columns = (self.starts.tolist(), self.ends.tolist(), self.peaks.tolist())
        return list(zip(self.labels, *columns, strict=True))


def force_align(log_probs: Tensor, lengths: Tensor, targets: Sequence[Sequence[int]]) -> list[Alignment | None]:
    """Find the most probable path through the frames that collapses to each target (Viterbi, float32 scores).

    Args:
        log_probs: (T, B, V) float32 on any device.
        lengths: (B,) CPU int64, valid frames.
        targets: B label sequences without blanks.

    Returns:
        An alignment for each utterance; None where it has fewer frames than its labels need.
    """
    frames, batch, _ = log_probs.shape
    device, longest = log_probs.device, max(map(len, targets), default=0)
    if not batch:
        return []
    if log_probs.is_cuda and kernel.why_not(longest, device) is None:
        return align_by_kernel(log_probs, lengths, targets)
    states = torch.zeros(batch, 2 * longest + 1, dtype=torch.int64)
    for row, target in zip(states, targets, strict=True):
        row[1 : 2 * len(target) : 2] = torch.tensor(list(target), dtype=torch.int64)
    jumps = torch.zeros_like(states, dtype=torch.bool)
    jumps[:, 2:] = (states[:, 2:] != BLANK) & (states[:, 2:] != states[:, :-2])
    emitted = log_probs.gather(2, states.to(device).expand(frames, -1, -1))  # (T, B, S)
    barred = torch.zeros(states.shape, device=device).masked_fill_(~jumps.to(device), -math.inf)
    score = torch.full(states.shape, -math.inf, device=device)
    moves = torch.empty(emitted.shape, dtype=torch.uint8, device=device)
    ends = torch.tensor([2 * len(target) for target in targets], device=device)
    last_frames = (lengths - 1).to(device)
    finals = torch.full((2, batch), -math.inf, device=device)
    rows = torch.arange(batch, device=device)
    for frame in range(frames):
        if frame == 0:
            score[:, :2] = emitted[0, :, :2]
            moves[0] = _STAY
        else:
            one = torch.nn.functional.pad(score, (1, 0), value=-math.inf)[:, :-1]
            two = torch.nn.functional.pad(score, (2, 0), value=-math.inf)[:, : score.shape[1]] + barred
            score, moves[frame] = torch.stack([score, one, two]).max(0)
            score = score + emitted[frame]
        here = torch.stack([score[rows, ends], score[rows, (ends - 1).clamp(min=0)]])
        finals = torch.where(last_frames == frame, here, finals)
    return _trace(moves.cpu().numpy(), finals.cpu().numpy(), emitted, lengths.numpy(), targets)


def align_by_kernel(log_probs: Tensor, lengths: Tensor, targets: Sequence[Sequence[int]]) -> list[Alignment | None]:
    """Align in one launch; two copies to the device and one back.

    Args:
        log_probs: (T, B, V) float32 on a GPU.
        lengths: (B,) CPU int64.
        targets: labels of each utterance.
    """
    device, sizes = log_probs.device, [len(target) for target in targets]
    longest = max(sizes)
    table = np.zeros((len(targets), longest + 1), np.int32)
    table[:, 0] = sizes
    table[:, 1:][np.arange(longest) < table[:, :1]] = [label for target in targets for label in target]
    given = torch.from_numpy(table).to(device)
    labels, counts = given[:, 1:].contiguous(), given[:, 0].contiguous()
    found = kernel.align(log_probs.contiguous(), lengths.to(device), labels, counts)
    columns = [found.log_prob[:, None].view(torch.int32), found.spans.flatten(1), found.peaks.view(torch.int32)]
    packed = torch.cat(columns, 1)
    host = packed.cpu().numpy()
    log_prob, peaks = host[:, 0].view(np.float32), host[:, 1 + 2 * longest :].view(np.float32)
    starts, ends = host[:, 1 : 1 + longest].astype(np.int64), host[:, 1 + longest : 1 + 2 * longest].astype(np.int64)
    return [
        Alignment(tuple(target), starts[row, :size], ends[row, :size], peaks[row, :size], float(log_prob[row]))
        if math.isfinite(log_prob[row])
        else None
        for row, (target, size) in enumerate(zip(targets, sizes, strict=True))
    ]


def _trace(
    moves: NDArray[np.uint8],
    finals: NDArray[np.float32],
    emitted: Tensor,
    lengths: NDArray[np.int64],
    targets: Sequence[Sequence[int]],
) -> list[Alignment | None]:
    """Walk back from each utterance's better final state, all utterances at once."""
    frames, batch, _ = moves.shape
    sizes = np.array([len(target) for target in targets])
    state = 2 * sizes - (finals[1] > finals[0])
    path = np.zeros((frames, batch), np.int64)
    rows = np.arange(batch)
    for frame in range(frames - 1, -1, -1):
        path[frame] = state
        state = np.where(frame < lengths, state - moves[frame, rows, state], state)
    on_path = emitted.gather(2, torch.from_numpy(path)[..., None].to(emitted.device))[..., 0].cpu().numpy()
    found: list[Alignment | None] = []
    for row, target in enumerate(targets):
        log_prob = float(finals[:, row].max()) if sizes[row] else float(finals[0, row])
        if not math.isfinite(log_prob):
            found.append(None)
            continue
        visited, heard = path[: lengths[row], row], on_path[: lengths[row], row]
        spans = np.arange(sizes[row]) * 2 + 1
        starts, ends = np.searchsorted(visited, spans), np.searchsorted(visited, spans, side="right")
        bounds = np.stack([starts, ends], 1).reshape(-1)
        peaks = np.maximum.reduceat(np.append(heard, np.float32(-np.inf)), bounds)[::2] if len(bounds) else heard[:0]
        found.append(Alignment(tuple(target), starts, ends, peaks.astype(np.float32), log_prob))
    return found


def align_all(
    log_probs: Tensor, lengths: Tensor, targets: Sequence[Sequence[Sequence[int]]]
) -> list[list[Alignment | None]]:
    """`force_align` for any number of targets an utterance, those of one rank at once; log-probs as there."""
    found: list[list[Alignment | None]] = [[] for _ in targets]
    for rank in range(max(map(len, targets), default=0)):
        chosen = [index for index, row in enumerate(targets) if rank < len(row)]
        at = torch.tensor(chosen)
        some = log_probs if len(chosen) == len(targets) else log_probs[:, at.to(log_probs.device)]
        aligned = force_align(some, lengths[at], [targets[index][rank] for index in chosen])
        for index, alignment in zip(chosen, aligned, strict=True):
            found[index].append(alignment)
    return found


def with_times(
    rows: Sequence[Sequence[Hypothesis]], log_probs: Tensor, lengths: Tensor, alphabet: Alphabet, frame_s: float
) -> list[list[Hypothesis]]:
    """Give words to the hypotheses, with times and confidences from their best paths through the log-probs.

    Args:
        rows: hypotheses of each utterance.
        log_probs: (T', B, V) natural log-probs.
        lengths: (B,) CPU int64, valid frames.
        alphabet: of the labels.
        frame_s: seconds between two frames.
    """
    aligned = align_all(log_probs, lengths, [[h.labels for h in row] for row in rows])
    return [
        [
            replace(h, words=spell_words([] if alignment is None else alignment.runs(), alphabet, frame_s))
            for h, alignment in zip(row, alignments, strict=True)
        ]
        for row, alignments in zip(rows, aligned, strict=True)
    ]
