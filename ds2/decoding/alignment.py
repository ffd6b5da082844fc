"""Forced alignment: the times of labels and words, for whole utterances and for streams of any length.

`force_align` aligns whole utterances. `IncrementalAligner` aligns a stream in bounded memory and time: up to
`SINGLE_ALIGNMENT_S` it keeps all frames, and words get the times of one alignment of the whole. Beyond that, every
`PERIOD_S` it fixes the times of labels that all hypotheses share and that end `GUARD_S` before the last frame. These
moments depend on the number of frames only, so times do not depend on how a stream was cut into chunks.

Shapes: T frames, B utterances, V labels (0 is the blank), S = 2 L + 1 states of the longest label sequence with blanks.
"""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from ds2_ops.ctc import align as kernel
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ds2.decoding.hypothesis import Hypothesis, Run, Word, spell_words
from ds2.text.alphabet import BLANK, Alphabet

_STAY = 0  # a move of the path: 0 stays in a state, 1 enters the next one, 2 skips a blank
PERIOD_S = 5.0
SINGLE_ALIGNMENT_S = 20.0
MAX_PENDING_S = 60.0  # frames kept while hypotheses disagree; beyond it the best hypothesis is taken as final
GUARD_S = 5.0
_SILENCE_S = 1.0  # a longer silence is cut to this length in streams beyond `SINGLE_ALIGNMENT_S`


@dataclass(frozen=True)
class Alignment:
    """The frames of each label of one utterance on its best path; label i has frames starts[i] .. ends[i] - 1."""

    labels: tuple[int, ...]
    starts: NDArray[np.int64]  # (L,) frames
    ends: NDArray[np.int64]  # (L,)
    peaks: NDArray[np.float32]  # (L,) natural log-prob of the label at its most certain frame
    log_prob: float  # natural, of the whole path

    def runs(self) -> list[Run]:
        """The labels with their frames, as `spell_words` takes them."""
        columns = (self.starts.tolist(), self.ends.tolist(), self.peaks.tolist())
        return list(zip(self.labels, *columns, strict=True))


def no_skips(states: Tensor) -> Tensor:
    """Return (B, S) bool: whether paths cannot enter a CTC state from two before it, by the labels (Graves et al.)."""
    result = torch.ones_like(states, dtype=torch.bool)
    result[:, 2:] = (states[:, 2:] == BLANK) | (states[:, 2:] == states[:, :-2])
    return result


def scores_before(scores: Tensor, no_skip: Tensor) -> Tensor:
    """Return (3, B, S): for each state its own score, that of the state before, and two before; -inf by `no_skip`."""
    padded = torch.nn.functional.pad(scores, (2, 0), value=-math.inf)
    return torch.stack([scores, padded[:, 1:-1], padded[:, :-2].masked_fill(no_skip, -math.inf)])


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
        return align_on_gpu(log_probs, lengths, targets)
    states = torch.zeros(batch, 2 * longest + 1, dtype=torch.int64)
    for row, target in zip(states, targets, strict=True):
        row[1 : 2 * len(target) : 2] = torch.tensor(list(target), dtype=torch.int64)
    emitted = log_probs.gather(2, states.to(device).expand(frames, -1, -1))  # (T, B, S)
    no_skip = no_skips(states).to(device)
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
            score, moves[frame] = scores_before(score, no_skip).max(0)
            score = score + emitted[frame]
        final = torch.stack([score[rows, ends], score[rows, (ends - 1).clamp(min=0)]])
        finals = torch.where(last_frames == frame, final, finals)
    return _trace(moves.cpu().numpy(), finals.cpu().numpy(), emitted, lengths.numpy(), targets)


def align_on_gpu(log_probs: Tensor, lengths: Tensor, targets: Sequence[Sequence[int]]) -> list[Alignment | None]:
    """`force_align` in one kernel launch; waits for the device once, for the result.

    Args:
        log_probs: (T, B, V) float32 on a GPU.
        lengths: (B,) CPU int64.
    """
    device, sizes = log_probs.device, [len(target) for target in targets]
    longest = max(sizes)
    table = np.zeros((len(targets), longest + 1), np.int32)
    table[:, 0] = sizes
    table[:, 1:][np.arange(longest) < table[:, :1]] = [label for target in targets for label in target]
    on_device = torch.from_numpy(table).to(device, non_blocking=True)
    labels, counts = on_device[:, 1:].contiguous(), on_device[:, 0].contiguous()
    result = kernel.align(log_probs.contiguous(), lengths.to(device, non_blocking=True), labels, counts)
    columns = [result.log_prob[:, None].view(torch.int32), result.spans.flatten(1), result.peaks.view(torch.int32)]
    host = torch.cat(columns, 1).cpu().numpy()
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
    """Trace the paths back from the better final state of each utterance, all utterances at once."""
    frames, batch, _ = moves.shape
    sizes = np.array([len(target) for target in targets])
    state = 2 * sizes - (finals[1] > finals[0])
    path = np.zeros((frames, batch), np.int64)
    rows = np.arange(batch)
    for frame in range(frames - 1, -1, -1):
        path[frame] = state
        state = np.where(frame < lengths, state - moves[frame, rows, state], state)
    on_path = emitted.gather(2, torch.from_numpy(path)[..., None].to(emitted.device))[..., 0].cpu().numpy()
    alignments: list[Alignment | None] = []
    for row, target in enumerate(targets):
        log_prob = float(finals[:, row].max())
        if not math.isfinite(log_prob):
            alignments.append(None)
            continue
        visited, path_log_probs = path[: lengths[row], row], on_path[: lengths[row], row]
        spans = np.arange(sizes[row]) * 2 + 1
        starts, ends = np.searchsorted(visited, spans), np.searchsorted(visited, spans, side="right")
        bounds = np.stack([starts, ends], 1).reshape(-1)
        padded = np.append(path_log_probs, np.float32(-np.inf))
        peaks = np.maximum.reduceat(padded, bounds)[::2] if len(bounds) else padded[:0]
        alignments.append(Alignment(tuple(target), starts, ends, peaks.astype(np.float32), log_prob))
    return alignments


def align_all(
    log_probs: Tensor, lengths: Tensor, targets: Sequence[Sequence[Sequence[int]]]
) -> list[list[Alignment | None]]:
    """`force_align` for any number of targets per utterance; the n-th targets of all utterances form one batch."""
    alignments: list[list[Alignment | None]] = [[] for _ in targets]
    for rank in range(max(map(len, targets), default=0)):
        chosen = [index for index, row in enumerate(targets) if rank < len(row)]
        rows = torch.tensor(chosen)
        own = log_probs if len(chosen) == len(targets) else log_probs[:, rows.to(log_probs.device, non_blocking=True)]
        aligned = force_align(own, lengths[rows], [targets[index][rank] for index in chosen])
        for index, alignment in zip(chosen, aligned, strict=True):
            alignments[index].append(alignment)
    return alignments


def add_word_times(
    rows: Sequence[Sequence[Hypothesis]], log_probs: Tensor, lengths: Tensor, alphabet: Alphabet, frame_s: float
) -> list[list[Hypothesis]]:
    """Return the hypotheses with words, whose times and confidences come from a forced alignment.

    Searches of other packages return no labels. Where those that spell the text by merges need more frames than there
    are, each word has an equal share of the time and the probability of the text.

    Args:
        rows: hypotheses of each utterance.
        log_probs: (T', B, V) natural log-probs.
        lengths: (B,) CPU int64, valid frames.
    """
    aligned = align_all(log_probs, lengths, [[h.labels for h in row] for row in rows])
    return [
        [
            replace(h, words=_shares(h, length * frame_s) if a is None else spell_words(a.runs(), alphabet, frame_s))
            for h, a in zip(row, alignments, strict=True)
        ]
        for row, alignments, length in zip(rows, aligned, lengths.tolist(), strict=True)
    ]


def _shares(hypothesis: Hypothesis, duration_s: float) -> tuple[Word, ...]:
    texts, confidence = hypothesis.text.split(), math.exp(min(hypothesis.acoustic, 0.0))
    share_s = duration_s / max(len(texts), 1)
    return tuple(Word(text, i * share_s, (i + 1) * share_s, confidence) for i, text in enumerate(texts))


class IncrementalAligner:
    """Aligns the labels of one stream: holds the frames whose alignment may change, and the aligned labels before them.

    Args:
        silent_log_prob: a frame is silent if all labels but the blank lie below it.
    """

    def __init__(self, alphabet: Alphabet, frame_s: float, silent_log_prob: float) -> None:
        self.alphabet, self.frame_s, self.silent_log_prob = alphabet, frame_s, silent_log_prob
        self.total_frames = 0  # of the stream so far
        self._period = max(1, round(PERIOD_S / frame_s))
        self.final_runs: list[Run] = []
        self.pending_frames = 0
        self.due_at = self._next_due()  # the number of frames after which `finalise` is due
        # Pending frames are cut out of their batches only when they are needed: a new object for every chunk of every
        # stream would make garbage collections frequent and long.
        self._batches: list[Tensor] = []  # (T, B, V)
        self._spans = array("q")  # row, first and last frame in each of `_batches`
        self._numbers = torch.empty(0, dtype=torch.int64)  # positions in the stream of the first pending frames

    def append(self, log_probs: Tensor, row: int, first: int, last: int) -> None:
        """Add the next frames: `first` to before `last` of a row of a batch (T, B, V), which must not change."""
        self._batches.append(log_probs)
        self._spans.extend((row, first, last))
        self.total_frames += last - first
        self.pending_frames += last - first

    def _next_due(self) -> int:
        """Return with how many frames more are pending than one alignment should take: a multiple of the period."""
        frames = self._period - self.total_frames % self._period
        while (self.pending_frames + frames) * self.frame_s <= SINGLE_ALIGNMENT_S:
            frames += self._period
        return self.total_frames + frames

    def window(self) -> tuple[Tensor, Tensor]:
        """Return the pending frames (T, V) and their positions (T,) in the stream."""
        spans = zip(self._batches, *(self._spans[at::3] for at in range(3)), strict=True)
        frames = torch.cat([batch[first:last, row] for batch, row, first, last in spans])
        later = torch.arange(self.total_frames - len(frames) + len(self._numbers), self.total_frames)
        self._hold(frames, torch.cat([self._numbers, later]))
        return frames, self._numbers

    def _hold(self, frames: Tensor, numbers: Tensor) -> None:
        self._batches, self._spans, self._numbers = [frames[:, None]], array("q", (0, 0, len(frames))), numbers

    def keep(self, frames: Tensor, numbers: Tensor) -> None:
        """Replace the pending frames (T, V) and their positions (T,)."""
        self._hold(frames, numbers)
        self.pending_frames = len(numbers)
        self.due_at = self._next_due()

    def fix_times(self, labels: Sequence[int], shared: int, alignment: Alignment | None) -> int:
        """Take the final times of labels from an alignment, and drop their frames; return how many labels have them.

        Args:
            labels, shared: as for `finalise`, of this stream.
            alignment: of the labels without final times to the pending frames; without one nothing changes.
        """
        done, overdue = len(self.final_runs), self.pending_frames * self.frame_s > MAX_PENDING_S
        if alignment is None:
            return done
        frames, numbers = self.window()
        limit = max(0, len(frames) - round(GUARD_S / self.frame_s))
        known = len(labels) - done if overdue else shared - done
        count = min(known, int(alignment.ends.searchsorted(limit, side="right")))
        self.final_runs += _in_stream(alignment.runs()[:count], numbers)
        cut = int(alignment.ends[count - 1]) if count else 0
        if overdue or count < known:  # the next label is final too: keep its frames from its start on
            cut = min([limit, *alignment.starts[count : count + 1].tolist()])
        self.keep(frames[cut:].clone(), numbers[cut:].clone())
        return len(self.final_runs)


def finalise(
    aligners: Sequence[IncrementalAligner], labels: Sequence[Sequence[int]], shared: Sequence[int]
) -> list[int]:
    """Fix the times of labels of streams, and drop their frames; to be called when each has its `due_at` frames.

    Args:
        aligners: B streams of one decoder.
        labels: of the best hypothesis of each, from the start of the stream.
        shared: the number of first labels that all hypotheses of each share.

    Returns:
        The number of labels of each with final times. It is larger than `shared` after `MAX_PENDING_S` without
        agreement: the caller then drops the hypotheses that have other labels.
    """
    _drop_long_silences(aligners)
    frames = [aligner.window()[0] for aligner in aligners]
    targets = [own[len(aligner.final_runs) :] for own, aligner in zip(labels, aligners, strict=True)]
    alignments = force_align(pad_sequence(frames), torch.tensor(list(map(len, frames))), targets)
    streams = zip(aligners, labels, shared, alignments, strict=True)
    return [aligner.fix_times(own, count, alignment) for aligner, own, count, alignment in streams]


def _drop_long_silences(aligners: Sequence[IncrementalAligner]) -> None:
    """Cut long silences in the pending frames of streams of one decoder; it waits for the device once."""
    windows = [aligner.window() for aligner in aligners]
    padded = pad_sequence([frames for frames, _ in windows])
    silent = (padded[:, :, BLANK + 1 :].amax(2) < aligners[0].silent_log_prob).t().cpu()
    for aligner, (frames, numbers), own in zip(aligners, windows, silent, strict=True):
        positions = torch.arange(len(frames))
        silence_start = torch.where(own[: len(frames)], 0, positions + 1).cummax(0).values
        wanted = (positions - silence_start < round(_SILENCE_S / aligner.frame_s)).nonzero()[:, 0]
        shorter = frames[wanted.to(frames.device)] if len(wanted) < len(frames) else frames
        aligner.keep(shorter, numbers[wanted])


def _in_stream(runs: Sequence[Run], numbers: Tensor) -> list[Run]:
    """Convert runs in frames of a window to runs in frames of the stream, whose positions are `numbers`."""
    positions = numbers.tolist()
    return [(label, positions[start], positions[end - 1] + 1, peak) for label, start, end, peak in runs]


def add_stream_word_times(
    rows: Sequence[Sequence[Hypothesis]], aligners: Sequence[IncrementalAligner]
) -> list[list[Hypothesis]]:
    """`add_word_times` for the N best hypotheses of streams, each with one frame or more and its aligner."""
    windows, numbers = map(list, zip(*(aligner.window() for aligner in aligners), strict=True))
    lengths = torch.tensor([len(window) for window in windows])
    targets = [[h.labels[len(a.final_runs) :] for h in row] for row, a in zip(rows, aligners, strict=True)]
    aligned = align_all(pad_sequence(windows), lengths, targets)

    def with_words(
        hypothesis: Hypothesis, alignment: Alignment | None, aligner: IncrementalAligner, positions: Tensor
    ) -> Hypothesis:
        labels, count = hypothesis.labels, min(len(aligner.final_runs), len(hypothesis.labels))
        while alignment is None and 0 < count < len(labels) and not aligner.alphabet.starts_word[labels[count]]:
            count -= 1  # the frames left are too few for the other labels of this word
        runs = aligner.final_runs[:count] + ([] if alignment is None else _in_stream(alignment.runs(), positions))
        return replace(hypothesis, words=spell_words(runs, aligner.alphabet, aligner.frame_s))

    return [
        [with_words(h, alignment, aligner, positions) for h, alignment in zip(row, alignments, strict=True)]
        for row, alignments, aligner, positions in zip(rows, aligned, aligners, numbers, strict=True)
    ]
