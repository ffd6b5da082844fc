"""The frames that a search looks at: likely labels only, blank frames left out, packed for a batch, chunk by chunk."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ds2.config.schema import DecodeConfig
from ds2.text.alphabet import BLANK

NONE = -math.inf  # the log-prob of what is not there


@dataclass(frozen=True)
class OpenRun:
    """The run of blank-only frames that utterances are in, which their next frames may go on."""

    log_probs: Tensor  # (B, V) float32, summed over the run; 0 where there is none
    there: Tensor  # (B,) bool

    @classmethod
    def none(cls, batch: int, labels: int, device: torch.device) -> OpenRun:
        """Utterances that have heard nothing."""
        return cls(torch.zeros(batch, labels, device=device), torch.zeros(batch, dtype=torch.bool, device=device))

    def emptied(self) -> OpenRun:
        """The same utterances after their runs were searched."""
        return OpenRun(torch.zeros_like(self.log_probs), torch.zeros_like(self.there))


def pack(log_probs: Tensor, lengths: Tensor, options: DecodeConfig) -> tuple[Tensor, Tensor]:
    """Drop labels below `label_min_log_prob` and join runs of frames in which only the blank is left.

    After the first frame of such a run every prefix ends in a blank, so the others change no rank: the result is that
    of all frames, exactly.

    Args:
        log_probs: (T, B, V) float32.
        lengths: (B,) CPU int64.
        options: whose `label_min_log_prob` counts.

    Returns:
        (T + 1, B, V) packed frames, -inf where a label is not followed, and (B,) int64 how many each utterance has.
    """
    packed, counts, _ = _joined(log_probs, lengths, options, None)
    return packed, counts


def pack_next(
    log_probs: Tensor, lengths: Tensor, options: DecodeConfig, before: OpenRun
) -> tuple[Tensor, Tensor, OpenRun]:
    """`pack` the next frames of utterances: together the chunks' packed frames are the whole's, to the bit.

    Args:
        log_probs, lengths, options: as `pack`.
        before: the run that the frames before left open.

    Returns:
        (T + 1, B, V) packed frames, (B,) int64 how many of each utterance are complete, and the run that is still open.
    """
    if not len(log_probs):
        return log_probs.new_zeros(1, *log_probs.shape[1:]), torch.zeros_like(before.there, dtype=torch.int64), before
    packed, counts, silent = _joined(log_probs, lengths, options, before)
    ends = (lengths.to(log_probs.device) - 1).clamp(min=0)
    there = torch.where(lengths.to(log_probs.device) > 0, silent.gather(0, ends[None])[0], before.there)
    last = (counts - 1).clamp(min=0)
    sums = packed.gather(0, last[None, :, None].expand(1, -1, packed.shape[2]))[0]
    return packed, counts - there.long(), OpenRun(torch.where(there[:, None], sums, 0.0), there)


def _joined(
    log_probs: Tensor, lengths: Tensor, options: DecodeConfig, before: OpenRun | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Packed frames, the open run's first where there is one, their counts, and (T, B) bool which frames are silent."""
    frames, batch, labels = log_probs.shape
    device = log_probs.device
    valid = torch.arange(frames, device=device)[:, None] < lengths.to(device, non_blocking=True)
    best = log_probs.argmax(2, keepdim=True)
    followed = (log_probs >= options.label_min_log_prob).scatter_(2, best, True)
    if options.lexicon:
        followed[:, :, BLANK] = True  # a way on for prefixes that no word goes on from by the labels followed
    silent = ~followed[:, :, BLANK + 1 :].any(2)
    kept = valid.clone()
    kept[1:] &= ~(silent[1:] & silent[:-1])
    packed = torch.zeros(frames + 2, batch, labels, device=device)
    opened = 0 if before is None else before.there.long()
    if before is not None:
        kept[:1] &= ~(silent[:1] & before.there)
        packed[0] = before.log_probs
    place = kept.long().cumsum(0) - 1 + opened
    place = torch.where(valid, place, frames + 1)  # frames past the end land on a row that is cut off
    packed.scatter_add_(0, place[..., None].expand_as(log_probs), log_probs.masked_fill(~followed, NONE))
    return packed[:-1], kept.sum(0) + opened, silent
