"""The losses of training: CTC per utterance, and CTC-CRF.

CTC is 0, not infinity, for infeasible utterances, whose frames are too few for any alignment. CTC-CRF, with
`train.objective=ctc_crf`, has a model of labels and a denominator over it.
"""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from ds2_ops.ctc import loss
from ds2_ops.ctc.denominator import Denominator
from torch import Tensor

from ds2.config.schema import TrainConfig
from ds2.data.manifest import Utterance
from ds2.decoding.alignment import no_skips, scores_before
from ds2.lm.label_graph import LabelScorer, label_graph, label_model
from ds2.lm.ngram import NGram
from ds2.text.alphabet import BLANK, Alphabet

log = logging.getLogger(__name__)


def feasible_rows(frames: Tensor, labels: Tensor, label_lengths: Tensor) -> Tensor:
    """Return which transcripts have enough frames: one a label, and one for a blank between equal neighbours.

    Args:
        frames: (B,) valid frames.
        labels: (B, L) integer labels, padded.
        label_lengths: (B,) valid labels of each row.

    Returns:
        (B,) bool (Graves et al. 2006, section 4.1).
    """
    pair_is_valid = torch.arange(labels.shape[1], device=labels.device)[1:] < label_lengths[:, None]
    repeats = ((labels[:, 1:] == labels[:, :-1]) & pair_is_valid).sum(dim=1)
    return frames >= label_lengths + repeats


def ctc_losses(
    logits: Tensor,
    frames: Tensor,
    labels: Tensor,
    label_lengths: Tensor,
    feasible: Tensor,
    *,
    delay_penalty: float = 0.0,
) -> Tensor:
    """Negative log-likelihood of each transcript, summed over all alignments (Graves et al. 2006, equation 8).

    With a delay penalty p an alignment counts exp(p d) times, where d is the sum over labels of (T - 1) / 2 less the
    label's first frame: alignments that begin their labels late count less (Yao et al. 2023, "Delay-penalized CTC
    implemented based on finite state transducer"). The loss is then no longer a log-likelihood and may be below 0.

    The gradient has the same bits on every run: on a GPU it comes from `ds2_ops`, or where those kernels cannot run
    from `reproducible_ctc`, since torch's adds with atomics.

    Args:
        logits: (T, B, V) of any float dtype; the log-softmax and the sums run in fp32.
        frames: (B,) int64, valid frames.
        labels: (B, L) int64, padded; 0 is the blank and must not occur in the valid part.
        label_lengths: (B,) int64, at most L where feasible.
        feasible: (B,) bool, see `feasible_rows`.
        delay_penalty: p, natural log a label and output frame.

    All tensors are on the device of the logits, and on a GPU never read back where its kernels run.

    Returns:
        losses (B,) fp32 in nats, 0 and without gradient where no alignment exists.
    """
    # An infeasible row is scored against the empty transcript: an infinite loss has a NaN gradient even at weight 0.
    possible = torch.where(feasible, label_lengths, 0)
    if not logits.is_cuda and delay_penalty == 0:
        log_probs = F.log_softmax(logits.float(), dim=-1)
        losses = F.ctc_loss(log_probs, labels, frames, possible, blank=BLANK, reduction="none")
    elif logits.is_cuda and loss.why_not(labels.shape[1], logits.shape[2], logits.device) is None:
        losses = loss.ctc_loss(logits, frames, labels, possible, delay_penalty=delay_penalty)
    else:
        losses = reproducible_ctc(logits, labels, frames.cpu(), possible.cpu(), delay_penalty)
    return torch.where(feasible, losses, 0.0)


def divergence(logits: Tensor) -> Tensor:
    """Return the divergence (B,) fp32 of two views: 1/2 sum over t of KL(b || a) + KL(a || b), in nats.

    Gradients flow into the second argument of each KL only, the first is detached (CR-CTC, Yao et al. 2025, (4)).

    Args:
        logits: (T, 2 B, V), all utterances in view a, then all in view b; equal past their lengths.
    """
    a, b = F.log_softmax(logits.float(), dim=-1).chunk(2, dim=1)
    both = F.kl_div(a, b.detach(), reduction="none", log_target=True)
    both = both + F.kl_div(b, a.detach(), reduction="none", log_target=True)
    return both.sum(dim=(0, 2)) / 2


def reproducible_ctc(
    logits: Tensor, labels: Tensor, frames: Tensor, label_lengths: Tensor, delay_penalty: float = 0.0
) -> Tensor:
    """The losses (B,) of feasible transcripts, on any device, with a gradient free of atomic additions.

    Arguments are those of `ctc_losses`, the lengths on the CPU.
    """
    losses: Tensor = _ReproducibleCtc.apply(  # type: ignore[no-untyped-call]
        logits, labels, frames, label_lengths, delay_penalty
    )
    return losses


class _ReproducibleCtc(torch.autograd.Function):
    """A forward recursion, and its mirror image for the backward variables (Graves et al. 2006, section 4.1).

    The recursion is torch's, or with a delay penalty `_log_alpha`, since torch's knows nothing of the labels before.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, frames: Tensor, label_lengths: Tensor, delay_penalty: float
    ) -> Tensor:
        log_probs = F.log_softmax(logits.detach().float(), dim=-1)
        targets = labels.to(logits.device, non_blocking=True)
        lengths = frames.tolist(), label_lengths.tolist()
        if delay_penalty:
            bonus = _earliness(log_probs, targets, frames, label_lengths, delay_penalty)
            states = _states(targets)
            losses, log_alpha = _log_alpha(_emissions(log_probs, states) + bonus, states, frames, label_lengths)
        else:
            bonus = None
            losses, log_alpha = torch._ctc_loss(log_probs, targets, *lengths, BLANK)
        ctx.save_for_backward(log_probs, targets, losses, log_alpha, bonus)
        ctx.frames, ctx.label_lengths, ctx.dtype = frames, label_lengths, logits.dtype
        return losses

    @staticmethod
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        log_probs, targets, losses, log_alpha, bonus = ctx.saved_tensors
        device = log_probs.device
        frames = ctx.frames.to(device, non_blocking=True)[:, None]
        lengths = ctx.label_lengths.to(device, non_blocking=True)[:, None]
        time = _mirrored(frames, log_probs.shape[0])
        position = _mirrored(2 * lengths + 1, log_alpha.shape[2])

        def mirrored_states(values: Tensor) -> Tensor:
            """Mirror (B, T, S) in frames and states."""
            values = values.gather(1, time[:, :, None].expand_as(values))
            return values.gather(2, position[:, None, :].expand_as(values))

        mirrored_targets = targets.gather(1, _mirrored(lengths, targets.shape[1]))
        states = _states(targets)[:, : log_alpha.shape[2]]
        emitted = _emissions(log_probs, states)
        if bonus is None:
            mirrored_probs = log_probs.gather(0, time.t()[:, :, None].expand_as(log_probs))
            _, mirrored_alpha = torch._ctc_loss(
                mirrored_probs, mirrored_targets, ctx.frames.tolist(), ctx.label_lengths.tolist(), BLANK
            )
        else:
            emitted = emitted + bonus
            mirrored = _states(mirrored_targets)
            _, mirrored_alpha = _log_alpha(mirrored_states(emitted), mirrored, ctx.frames, ctx.label_lengths)
        log_beta = mirrored_states(mirrored_alpha)
        # alpha and beta both contain the emission of their frame: subtract one
        log_occupancy = log_alpha + log_beta - emitted + losses[:, None, None]
        valid_time = torch.arange(log_probs.shape[0], device=device) < frames
        valid = valid_time[:, :, None] & (torch.arange(log_alpha.shape[2], device=device) <= 2 * lengths)[:, None, :]
        occupancy = torch.where(valid & (log_occupancy < torch.inf), log_occupancy, -torch.inf).exp()
        by_label = occupancy @ F.one_hot(states, log_probs.shape[2]).to(occupancy.dtype)
        grad = (log_probs.exp() - by_label.transpose(0, 1)) * grad_losses[None, :, None]
        grad = grad.masked_fill(~valid_time.t()[:, :, None], 0.0)
        return grad.to(ctx.dtype), None, None, None, None


def _states(targets: Tensor) -> Tensor:
    """Return the labels (B, 2 L + 1) of the states of padded targets (B, L): a blank before, between and after them."""
    states = targets.new_full((len(targets), 2 * targets.shape[1] + 1), BLANK)
    states[:, 1::2] = targets
    return states


def _emissions(log_probs: Tensor, states: Tensor) -> Tensor:
    """Return the log-probs (B, T, S) of states (B, S)."""
    return log_probs.transpose(0, 1).gather(2, states[:, None, :].expand(-1, len(log_probs), -1))


def _earliness(
    log_probs: Tensor, targets: Tensor, frames: Tensor, label_lengths: Tensor, delay_penalty: float
) -> Tensor:
    """Return the bonus (B, T, S) of each state in each frame, for padded targets (B, L); S = 2 L + 1.

    In each frame it counts the labels that have started, less a share that grows evenly from frame to frame and keeps
    the sums small. Along a path the bonuses sum to the penalty times the sum over labels of (T - 1) / 2 less the
    label's first frame.
    """
    device, dtype = log_probs.device, log_probs.dtype
    started = (torch.arange(2 * targets.shape[1] + 1, device=device) + 1) // 2
    passed = torch.arange(1, len(log_probs) + 1, device=device, dtype=dtype)
    of_frame = label_lengths.to(device, dtype)[:, None] * passed / frames.to(device, dtype)[:, None].clamp(min=1)
    return delay_penalty * (started.to(dtype) - of_frame[:, :, None])


def _log_alpha(emitted: Tensor, states: Tensor, frames: Tensor, label_lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses (B,) and the log-probs (B, T, S) of all ways to a state, its frame's emission included.

    Args:
        emitted: (B, T, S), added in each frame of a state.
        states: (B, S) labels.
        frames, label_lengths: (B,) on the CPU.
    """
    no_skip = no_skips(states)
    log_alpha = torch.full_like(emitted, -torch.inf)
    log_alpha[:, 0, :2] = emitted[:, 0, :2]
    for frame in range(1, emitted.shape[1]):
        before = scores_before(log_alpha[:, frame - 1], no_skip)
        log_alpha[:, frame] = before.logsumexp(0) + emitted[:, frame]
    rows = torch.arange(len(states), device=states.device)
    last = log_alpha[rows, (frames.to(states.device) - 1).clamp(min=0)]
    ends = 2 * label_lengths.to(states.device)[:, None]
    final = last.gather(1, torch.cat([ends, (ends - 1).clamp(min=0)], 1))
    final[:, 1].masked_fill_(ends[:, 0] == 0, -torch.inf)
    losses = -final.logsumexp(1)
    empty = torch.where(ends[:, 0] == 0, 0.0, torch.inf).to(losses.dtype)  # of an utterance without frames
    return torch.where(frames.to(states.device) > 0, losses, empty), log_alpha


def _mirrored(lengths: Tensor, extent: int) -> Tensor:
    """(B, extent) indices that reverse each row within its length (B, 1) and leave what follows in place."""
    index = torch.arange(extent, device=lengths.device)
    return torch.where(index < lengths, lengths - 1 - index, index)


@dataclass(frozen=True)
class Crf:
    """Parts of the loss of CTC-CRF, - log p(labels | audio) = CTC loss - log p(labels) + log denominator.

    The labels follow an n-gram model; the denominator sums over all label sequences (Xiang and Ou 2019, "CRF-based
    single-stage acoustic modeling with CTC topology", equations 3 and 4).
    """

    model: NGram  # of labels
    denominator: Denominator  # over the model
    label_log_probs: Tensor  # (U,) float64 of the transcript of each training utterance, in nats

    @classmethod
    def of(cls, train: TrainConfig, alphabet: Alphabet, utterances: Sequence[Utterance]) -> Self:
        """Build the model from `train.denominator_text`, or from the transcripts; a function of these alone.

        Raises:
            LanguageModelError: the text or the settings do not allow it; the message says what to change.
        """
        # Once each, not `data.repeats` times: n-grams that occur once say how to discount and what to prune.
        transcripts = [u.text for u in dict.fromkeys(utterances)]
        texts = [Path(path) for path in train.denominator_text]
        model = label_model(
            alphabet, train.denominator_order, train.denominator_prune, texts=texts, transcripts=transcripts
        )
        graph = label_graph(model, alphabet)
        log.info(
            "denominator of CTC-CRF: a %d-gram of labels with %d nodes and %d arcs",
            train.denominator_order, len(graph.labels), len(graph.weights),
        )  # fmt: skip
        scorer = LabelScorer(model, alphabet)
        scores = {text: scorer(alphabet.encode(text)) for text in set(transcripts)}
        log_probs = torch.tensor([scores[u.text] for u in utterances], dtype=torch.float64)
        return cls(model, Denominator(graph, len(alphabet)), log_probs)

    @property
    def digest(self) -> str:
        """A hash of the graph."""
        graph = self.denominator.graph
        digest = hashlib.sha256()
        for values in (graph.labels, graph.ends, graph.sources, graph.targets, graph.weights, graph.shares):
            digest.update(values.tobytes())
        return digest.hexdigest()[:16]

    def losses(self, ctc: Tensor, logits: Tensor, frames: Tensor, log_probs: Tensor, feasible: Tensor) -> Tensor:
        """The losses (B,) fp32 of CTC-CRF in nats, 0 and without gradient where no alignment exists.

        Args:
            ctc: (B,) the losses of CTC.
            logits: (T, B, V) of any float dtype.
            frames: (B,) int64.
            log_probs: (B,) float64, the entry of `label_log_probs` of each utterance.
            feasible: (B,) bool.
        """
        losses = ctc + self.denominator(logits, frames) - log_probs
        return torch.where(feasible, losses.float(), 0.0)
