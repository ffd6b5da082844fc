"""Packed frames for a beam search: only likely labels, and runs of blank frames joined, for batches and chunks."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ds2.config.schema import DecodeConfig
from ds2.text.alphabet import BLANK

NONE = -math.inf  # log-prob of a label or prefix that does not exist


@dataclass(frozen=True)
class OpenRun:
    """The run of blank frames at the end of each utterance so far, which its next frames may extend."""

    log_probs: Tensor  # (B, V) float32, summed over the run; 0 without one
    exists: Tensor  # (B,) bool

    @classmethod
    def none(cls, batch: int, labels: int, device: torch.device) -> "OpenRun":
        """Return what utterances without open runs have."""
        return cls(torch.zeros(batch, labels, device=device), torch.zeros(batch, dtype=torch.bool, device=device))


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
    _, batch, labels = log_probs.shape
    packed, complete, run = pack_next(log_probs, lengths, options, OpenRun.none(batch, labels, log_probs.device))
    return packed, complete + run.exists


def pack_next(
    log_probs: Tensor, lengths: Tensor, options: DecodeConfig, before: OpenRun
) -> tuple[Tensor, Tensor, OpenRun]:
    """`pack` the next chunk of utterances; the packed frames of all chunks equal those of the whole, bit for bit.

    Args:
        log_probs, lengths, options: as `pack`.
        before: the runs that were open after the previous chunk.

    Returns:
        (T + 1, B, V) packed frames, (B,) int64 the number of complete ones of each utterance, and the open runs.
    """
    if not len(log_probs):
        return log_probs.new_zeros(1, *log_probs.shape[1:]), torch.zeros_like(before.exists, dtype=torch.int64), before
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
    starts[:1] &= ~(silent[:1] & before.exists)
    packed = torch.zeros(frames + 2, batch, labels, device=device)
    packed[0] = before.log_probs
    opened = before.exists.long()  # 1 where row 0 holds the open run
    rows = starts.long().cumsum(0) - 1 + opened  # of `packed`, of each frame
    rows = torch.where(valid, rows, frames + 1)  # padding goes to a row that is cut off
    packed.scatter_add_(0, rows[..., None].expand_as(log_probs), log_probs.masked_fill(~followed, NONE))
    packed, counts = packed[:-1], starts.sum(0) + opened
    is_open = torch.where(lengths > 0, silent.gather(0, (lengths - 1).clamp(min=0)[None])[0], before.exists)
    last = (counts - 1).clamp(min=0)
    sums = packed.gather(0, last[None, :, None].expand(1, -1, labels))[0]
    return packed, counts - is_open.long(), OpenRun(torch.where(is_open[:, None], sums, 0.0), is_open)
