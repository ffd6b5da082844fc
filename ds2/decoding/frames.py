"""Packed frames for a beam search: only likely labels, and runs of blank frames joined, for batches and chunks."""

import math

import torch
from torch import Tensor

from ds2.config.schema import DecodeConfig
from ds2.text.alphabet import BLANK

NONE = -math.inf  # log-prob of a label or prefix that does not exist


def open_frames(runs: Tensor, labels: int) -> tuple[Tensor, Tensor]:
    """Return open runs, (B,) as `pack_next` has them, as packed frames (1, B, V) and (B,) int64 the number of each."""
    frames = runs.new_full((1, len(runs), labels), NONE, dtype=torch.float32)
    frames[0, :, BLANK] = runs
    return frames, (runs > NONE).long()


def pack(log_probs: Tensor, lengths: Tensor, options: DecodeConfig) -> tuple[Tensor, Tensor]:
    """Drop labels below `label_min_log_prob`, and join each run of frames in which only the blank remains.

    After the first frame of such a run every prefix ends in a blank, so the other frames change no rank: the result of
    the search is exactly that of all frames.

    Args:
        log_probs: (T, B, V) float32.
        lengths: (B,) CPU int64.
        options: for `label_min_log_prob` and `lexicon`.

    Returns:
        (T + 1, B, V) packed frames, -inf for dropped labels, and (B,) int64 the number of frames of each utterance.
    """
    none = log_probs.new_full((log_probs.shape[1],), NONE, dtype=torch.float64)
    packed, complete, runs = pack_next(log_probs, lengths, options, none)
    return packed, complete + (runs > NONE)


def pack_next(
    log_probs: Tensor, lengths: Tensor, options: DecodeConfig, before: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`pack` the next chunk of utterances; the packed frames of all chunks equal those of the whole.

    A GPU adds the frames of a run in any order. In float64 that does not change the float32 values of packed frames.

    Args:
        log_probs, lengths, options: as `pack`.
        before: (B,) float64 log-prob of the run of blank frames that was open after the previous chunk, which these
            frames may extend; -inf: none.

    Returns:
        (T + 1, B, V) packed frames, (B,) int64 the number of complete ones of each utterance, and the open runs.
    """
    if not len(log_probs):
        return log_probs.new_zeros(1, *log_probs.shape[1:]), torch.zeros_like(before, dtype=torch.int64), before
    frames, batch, labels = log_probs.shape
    device = log_probs.device
    lengths = lengths.to(device, non_blocking=True)
    valid = torch.arange(frames, device=device)[:, None] < lengths
    best = log_probs.argmax(2, keepdim=True)
    followed = (log_probs >= options.label_min_log_prob).scatter_(2, best, True)  # labels that the search follows
    if options.lexicon:  # the only extension of a prefix that no word continues with the other labels
        followed[:, :, BLANK] = True
    silent = ~followed[:, :, BLANK + 1 :].any(2)  # only the blank remains
    starts = valid.clone()  # the first frames of packed ones
    starts[1:] &= ~(silent[1:] & silent[:-1])
    was_open = before > NONE
    starts[:1] &= ~(silent[:1] & was_open)
    packed = torch.zeros(frames + 2, batch, labels, device=device)
    packed[0].masked_fill_(was_open[:, None], NONE)
    opened = was_open.long()  # 1 where row 0 holds the open run
    rows = starts.long().cumsum(0) - 1 + opened  # of `packed`, of each frame
    rows = torch.where(valid, rows, frames + 1)  # padding goes to a row that is cut off
    values = log_probs.masked_fill(~followed, NONE)
    packed.scatter_add_(0, rows[..., None].expand_as(values), values)
    blanks = torch.zeros(frames + 2, batch, dtype=torch.float64, device=device)
    blanks[0] = torch.where(was_open, before, 0.0)
    packed[:, :, BLANK] = blanks.scatter_add_(0, rows, values[:, :, BLANK].double())
    counts = starts.sum(0) + opened
    is_open = torch.where(lengths > 0, silent.gather(0, (lengths - 1).clamp(min=0)[None])[0], was_open)
    last = blanks.gather(0, (counts - 1).clamp(min=0)[None])[0]
    return packed[:-1], counts - is_open.long(), torch.where(is_open, last, NONE)
