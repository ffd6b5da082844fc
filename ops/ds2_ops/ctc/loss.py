"""CTC loss and its gradient on the GPU: log-softmax and two launches. Lengths are never read back.

Shape letters: T frames, B utterances, V labels (0 is the blank), L labels of the longest target.
"""

from typing import Any

import torch
from torch import Tensor

from ds2_ops.checks import check_read, check_shape, why_no_plan
from ds2_ops.ctc.paths import plan, slopes
from ds2_ops.jit import runtime
from ds2_ops.jit.launch import Launch, device_index, run


def why_not(longest: int, vocabulary: int, device: torch.device) -> str | None:
    """Say why the kernels cannot score targets of up to `longest` of `vocabulary` labels; None if they can."""
    return why_no_plan(device, lambda smem_bytes: plan(longest, vocabulary, smem_bytes))


def ctc_loss(logits: Tensor, frames: Tensor, labels: Tensor, sizes: Tensor, *, delay_penalty: float = 0.0) -> Tensor:
    """Negative log-likelihood of each target, summed over all alignments (Graves et al. 2006, equation 8).

    With a delay penalty p an alignment counts exp(p d) times, d the sum over labels of (frames - 1) / 2 less the
    label's first frame (Yao et al. 2023, "Delay-penalized CTC implemented based on finite state transducer").

    On torch's current stream, without host synchronisation; can be captured in a CUDA graph. Differentiable in
    ``logits``. Every run gives the same bits.

    Args:
        logits: (T, B, V) of any float dtype on the GPU; log-softmax and sums are float32.
        frames: (B,) int64 on the GPU, 0 to T. Values on the GPU are not checked.
        labels: (B, L) int64 on the GPU, 1 to V - 1 in the first ``sizes`` columns.
        sizes: (B,) int64 on the GPU, labels of each target, 0 to L.
        delay_penalty: p, natural log a label and frame.

    Returns:
        (B,) float32 in nats; infinite where no alignment exists; the gradient is then not defined.

    Raises:
        ValueError: as ``plan``, or a shape or device that is not allowed.
        TypeError: a dtype that is not allowed.
        RuntimeError: the driver's or compiler's error, with shape and GPU.
    """
    batch = logits.shape[1]
    check_shape("labels", labels, (batch, labels.shape[-1]), "(B, L)")
    for name, lengths in (("frames", frames), ("sizes", sizes)):
        check_shape(name, lengths, (batch,), "(B,)")
    for name, tensor in (("frames", frames), ("labels", labels), ("sizes", sizes)):
        check_read(name, tensor, torch.int64, logits)
    losses: Tensor = _CtcLoss.apply(logits, frames, labels, sizes, delay_penalty)  # type: ignore[no-untyped-call]
    return losses


class _CtcLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, frames: Tensor, labels: Tensor, sizes: Tensor, delay_penalty: float
    ) -> Tensor:
        log_probs = logits.detach().float().log_softmax(-1).contiguous()
        targets = [t.contiguous() for t in (frames, labels, sizes)]
        length, batch, vocabulary = log_probs.shape
        longest, device = labels.shape[1], log_probs.device
        alpha, beta = torch.empty(2, batch, length, 2 * longest + 1, dtype=torch.float32, device=device)
        losses = torch.empty(batch, dtype=torch.float32, device=device)
        launch = plan(longest, vocabulary, runtime.smem_bytes_per_block(device_index(device)), batch)
        _run(launch, [log_probs, *targets, alpha, beta, losses], log_probs, longest, delay_penalty)
        ctx.save_for_backward(log_probs, *targets, alpha, beta, losses)
        ctx.dtype, ctx.delay_penalty = logits.dtype, delay_penalty
        return losses

    @staticmethod
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        log_probs, longest = ctx.saved_tensors[0], ctx.saved_tensors[2].shape[1]
        grad = torch.empty_like(log_probs)
        length, utterances, _ = log_probs.shape
        launch = slopes(length, utterances, longest)
        tensors = [*ctx.saved_tensors, grad_losses.float().contiguous(), grad]
        _run(launch, tensors, log_probs, longest, ctx.delay_penalty)
        return grad.to(ctx.dtype), None, None, None, None


def _run(launch: Launch, tensors: list[Tensor], log_probs: Tensor, longest: int, delay_penalty: float) -> None:
    shape, device = tuple(log_probs.shape), log_probs.device
    sizes = [*shape, longest, delay_penalty]
    run(launch, [*tensors, *sizes], lambda: f"CTC loss, (T, B, V) = {shape}, {longest} labels", device)
