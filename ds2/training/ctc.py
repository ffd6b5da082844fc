"""CTC loss per utterance: 0, not infinity, for infeasible ones, whose frames are too few for any alignment."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from ds2_ops.ctc import loss
from torch import Tensor

from ds2.text.alphabet import BLANK


def min_frames(labels: Tensor, label_lengths: Tensor) -> Tensor:
    """Return the fewest frames of each transcript: one a label, and one blank between equal neighbours.

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


def feasible_rows(frames: Tensor, labels: Tensor, label_lengths: Tensor) -> Tensor:
    """Return (B,) bool: which transcripts have enough frames (B,); other arguments as `min_frames`."""
    return frames >= min_frames(labels, label_lengths)


def ctc_losses(logits: Tensor, frames: Tensor, labels: Tensor, label_lengths: Tensor, feasible: Tensor) -> Tensor:
    """Negative log-likelihood of each transcript, summed over all alignments (Graves et al. 2006, equation 8).

    The gradient has the same bits on every run: on a GPU it comes from `ds2_ops`, or where those kernels cannot run
    from `reproducible_ctc`, since torch's adds with atomics.

    Args:
        logits: (T, B, V) of any float dtype; the log-softmax and the sums run in fp32.
        frames: (B,) int64, valid frames.
        labels: (B, L) int64, padded; 0 is the blank and must not occur in the valid part.
        label_lengths: (B,) int64, at most L where feasible.
        feasible: (B,) bool, see `feasible_rows`. All are on the device of the logits, and on a GPU never read back.

    Returns:
        losses (B,) fp32 in nats, 0 and without gradient where no alignment exists.
    """
    # An infeasible row is scored against the empty transcript: an infinite loss has a NaN gradient even at weight 0.
    possible = torch.where(feasible, label_lengths, 0)
    if not logits.is_cuda:
        log_probs = F.log_softmax(logits.float(), dim=-1)
        losses = F.ctc_loss(log_probs, labels, frames, possible, blank=BLANK, reduction="none")
    elif loss.why_not(labels.shape[1], logits.shape[2], logits.device) is None:
        losses = loss.ctc_loss(logits, frames, labels, possible)
    else:
        losses = reproducible_ctc(logits, labels, frames.cpu(), possible.cpu())
    return torch.where(feasible, losses, 0.0)


def divergence(logits: Tensor) -> Tensor:
    """Return the divergence of two views: 1/2 sum over t of KL(b || a) + KL(a || b), in nats.

    Gradients flow into the second argument of each KL only, the first is detached (CR-CTC, Yao et al. 2025, (4)).

    Args:
        logits: (T, 2 B, V), all utterances in view a, then all in view b; equal past their lengths.

    Returns:
        (B,) fp32.
    """
    a, b = F.log_softmax(logits.float(), dim=-1).chunk(2, dim=1)
    both = F.kl_div(a, b.detach(), reduction="none", log_target=True)
    both = both + F.kl_div(b, a.detach(), reduction="none", log_target=True)
    return both.sum(dim=(0, 2)) / 2


def reproducible_ctc(logits: Tensor, labels: Tensor, frames: Tensor, label_lengths: Tensor) -> Tensor:
    """The losses (B,) of feasible transcripts, on any device, with a gradient free of atomic additions.

    Arguments are those of `ctc_losses`, the lengths on the CPU.
    """
    losses: Tensor = _CtcLoss.apply(logits, labels, frames, label_lengths)  # type: ignore[no-untyped-call]
    return losses


class _CtcLoss(torch.autograd.Function):
    """Torch's forward recursion, and its mirror image for the backward variables (Graves et al. 2006, section 4.1)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, frames: Tensor, label_lengths: Tensor) -> Tensor:
        log_probs = F.log_softmax(logits.detach().float(), dim=-1)
        targets = labels.to(logits.device, non_blocking=True)
        losses, log_alpha = torch._ctc_loss(log_probs, targets, frames.tolist(), label_lengths.tolist(), BLANK)
        ctx.save_for_backward(log_probs, targets, losses, log_alpha)
        ctx.frames, ctx.label_lengths, ctx.dtype = frames, label_lengths, logits.dtype
        return losses

    @staticmethod
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        log_probs, targets, losses, log_alpha = ctx.saved_tensors
        device = log_probs.device
        frames = ctx.frames.to(device, non_blocking=True)[:, None]
        lengths = ctx.label_lengths.to(device, non_blocking=True)[:, None]
        time = _mirrored(frames, log_probs.shape[0])
        position = _mirrored(2 * lengths + 1, log_alpha.shape[2])
        mirrored_probs = log_probs.gather(0, time.t()[:, :, None].expand_as(log_probs))
        mirrored_targets = targets.gather(1, _mirrored(lengths, targets.shape[1]))
        _, mirrored_alpha = torch._ctc_loss(
            mirrored_probs, mirrored_targets, ctx.frames.tolist(), ctx.label_lengths.tolist(), BLANK
        )
        log_beta = mirrored_alpha.gather(1, time[:, :, None].expand_as(log_alpha))
        log_beta = log_beta.gather(2, position[:, None, :].expand_as(log_alpha))
        extended = targets.new_full(log_alpha[:, 0].shape, BLANK)  # a blank before, between and after the labels
        extended[:, 1::2] = targets[:, : extended.shape[1] // 2]
        emitted = log_probs.transpose(0, 1).gather(2, extended[:, None, :].expand_as(log_alpha))
        # alpha and beta both contain the emission of their frame: subtract one
        log_occupancy = log_alpha + log_beta - emitted + losses[:, None, None]
        valid_time = torch.arange(log_probs.shape[0], device=device) < frames
        valid = valid_time[:, :, None] & (torch.arange(log_alpha.shape[2], device=device) <= 2 * lengths)[:, None, :]
        occupancy = torch.where(valid & (log_occupancy < torch.inf), log_occupancy, -torch.inf).exp()
        by_label = occupancy @ F.one_hot(extended, log_probs.shape[2]).to(occupancy.dtype)
        grad = (log_probs.exp() - by_label.transpose(0, 1)) * grad_losses[None, :, None]
        grad = grad.masked_fill(~valid_time.t()[:, :, None], 0.0)
        return grad.to(ctx.dtype), None, None, None


def _mirrored(lengths: Tensor, extent: int) -> Tensor:
    """(B, extent) indices that reverse each row within its length (B, 1) and leave what follows in place."""
    index = torch.arange(extent, device=lengths.device)
    return torch.where(index < lengths, lengths - 1 - index, index)
