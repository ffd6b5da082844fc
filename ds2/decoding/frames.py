"""The frames that a search looks at: likely labels only, blank frames left out, packed for a batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ds2.config.schema import DecodeConfig
from ds2.text.alphabet import BLANK

NONE = -math.inf  # the log-prob of what is not there


@dataclass(frozen=True)
class Frames:
    """The frames of a batch that a search has to look at, packed; the rest only adds to every score."""

    log_probs: Tensor  # (T'', B, V) float32; -inf: not followed; past an utterance's end only the blank, 0
    prune: Tensor  # (T'', B) float64: what `decode.prune` is there; infinite past the end


def pack_frames(log_probs: Tensor, lengths: Tensor, options: DecodeConfig) -> Frames:
    """Drop labels below `label_min_log_prob` and join runs of frames in which only the blank is left.

    After the first frame of such a run every prefix ends in a blank, so the others change no rank: the result is that
    of all frames, exactly.

    Args:
        log_probs: (T, B, V) float32.
        lengths: (B,) CPU int64.
    """
    packed, counts = pack(log_probs, lengths, options)
    longest = int(counts.max()) if len(log_probs) else 0
    live = torch.arange(longest, device=log_probs.device)[:, None] < counts
    packed = packed[:longest]
    packed[:, :, BLANK + 1 :].masked_fill_(~live[..., None], NONE)
    prune = torch.where(live, options.prune, math.inf)
    return Frames(packed, prune.double())


def pack(log_probs: Tensor, lengths: Tensor, options: DecodeConfig) -> tuple[Tensor, Tensor]:
    """Return (T + 1, B, V) packed frames and (B,) int64 how many each utterance has, past which they are 0."""
    frames, batch, _ = log_probs.shape
    device = log_probs.device
    valid = torch.arange(frames, device=device)[:, None] < lengths.to(device, non_blocking=True)
    best = log_probs.argmax(2, keepdim=True)
    followed = (log_probs >= options.label_min_log_prob).scatter_(2, best, True)
    if options.lexicon:
        followed[:, :, BLANK] = True  # a way on for prefixes that no word goes on from by the labels followed
    silent = ~followed[:, :, BLANK + 1 :].any(2)
    kept = valid.clone()
    kept[1:] &= ~(silent[1:] & silent[:-1])
    place = kept.long().cumsum(0) - 1
    place = torch.where(valid, place, frames)  # frames past the end land on a row that is cut off
    packed = torch.zeros(frames + 1, batch, log_probs.shape[2], device=device)
    packed.scatter_add_(0, place[..., None].expand_as(log_probs), log_probs.masked_fill(~followed, NONE))
    return packed, kept.sum(0)
