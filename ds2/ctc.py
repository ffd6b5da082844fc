"""CTC loss per utterance, with the utterances that no alignment can produce named rather than turned into infinity."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLANK = 0


def min_frames(labels: Tensor, label_lengths: Tensor) -> Tensor:
    """The fewest frames that can carry each transcript: one a label, and one blank between equal neighbours.

    Args:
        labels: (B, L) integer labels, padded.
        label_lengths: (B,) valid labels of each row.

    Returns:
        (B,) int64 frames (Graves et al. 2006, section 4.1).
    """
    if labels.shape[1] == 0:
        return torch.zeros_like(label_lengths)
    pair_is_valid = torch.arange(1, labels.shape[1], device=labels.device) < label_lengths[:, None]
    repeats = ((labels[:, 1:] == labels[:, :-1]) & pair_is_valid).sum(dim=1)
    return label_lengths + repeats


def ctc_losses(logits: Tensor, logit_lengths: Tensor, labels: Tensor, label_lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood of each transcript, summed over all alignments.

    Args:
        logits: (T, B, V) of any float dtype; the log-softmax and the sums run in fp32.
        logit_lengths: (B,) int64 on the CPU, valid frames.
        labels: (B, L) int64 on the CPU, padded; 0 is the blank and must not occur in the valid part.
        label_lengths: (B,) int64 on the CPU.

    Returns:
        losses (B,) fp32 in nats, 0 and without gradient where no alignment exists; and the feasible rows (B,) bool on
        the CPU: False where the transcript needs more frames than there are.
    """
    feasible = logit_lengths >= min_frames(labels, label_lengths)
    log_probs = F.log_softmax(logits.float(), dim=-1)
    targets = labels.to(logits.device, non_blocking=True)
    # An infeasible row is scored against the empty transcript: an infinite loss has a NaN gradient even at weight 0.
    possible = torch.where(feasible, label_lengths, 0)
    losses = F.ctc_loss(log_probs, targets, logit_lengths, possible, blank=BLANK, reduction="none")
    if not bool(feasible.all()):
        losses = torch.where(feasible.to(losses.device), losses, torch.zeros_like(losses))
    return losses, feasible
