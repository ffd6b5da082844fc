"""Norms: sequence-wise batch norm, over the valid frames of batch and time, and RMS norm, of each frame by itself.

Shape letters: T frames, B batch, C channels, F bins, H features; N positions, all axes but the channels taken together.
"""

from typing import Any

import torch
from ds2_ops.batch_norm.op import Reduce, RunningStatistics, batch_norm, why_not
from torch import Tensor, nn
from torch.nn import functional

from ds2.config.schema import ModelConfig
from ds2.model.pass_context import OWN_PARAMETERS, PassContext
from ds2.model.ragged import Count


class SequenceBatchNorm(nn.Module):
    """Normalise each channel over all valid positions of a batch (Deep Speech 2, section 3.2).

    In training, y = (x - mean) / sqrt(var + eps) * weight + bias with the batch's own mean and variance (the mean
    square deviation, not the unbiased estimate). Positions at padding must hold exactly 0: sums over everything are
    then sums over the valid positions, and only the count has to be known. What comes out at padding, and the gradient
    that goes back there, is finite and means nothing: the caller's next layer overwrites it.

    In evaluation, running averages of the same two: batch n weighs in with max(momentum, 1 / n), the first one fully,
    so the initial values leave no bias.

    Args:
        momentum: weight of a batch in the running averages.

    Attributes:
        reduce: sums over all ranks, or None; with it the statistics are those of all ranks. It is called equally often
            on the kernels of `ds2_ops` and on torch's.
        kernels: whether to run on the kernels of `ds2_ops` where they can; equal on all ranks, since the two kinds of
            kernels round running averages differently.
    """

    running_mean: Tensor
    running_var: Tensor

    eps = 1e-5  # added to the variance

    def __init__(self, channels: int, momentum: float = 0.1) -> None:
        super().__init__()
        self.momentum = momentum
        self.reduce: Reduce | None = None
        self.kernels = True
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.batches = 0  # in the running averages; on the host, where the weight of the next one is chosen

    @property
    def steady(self) -> bool:
        """Whether the next batch enters the running averages with the momentum, as all later ones will."""
        return self.momentum >= 1.0 / (self.batches + 1)

    def advance(self) -> None:
        """Count a batch that enters the running averages."""
        self.batches += 1

    def _next_share(self) -> float:
        """Count a batch; return its weight in the running averages."""
        self.advance()
        return max(self.momentum, 1.0 / self.batches)

    def forward(self, x: Tensor, count: Count | None = None, context: PassContext = OWN_PARAMETERS) -> Tensor:
        """Normalise; return the shape and dtype of ``x``.

        Args:
            x: (T, B, H) or (B, C, F, T), any float dtype, 0 at padding.
            count: valid positions of the N; not needed in evaluation.
        """
        flat = x if x.dim() == 4 else x.flatten(0, -2)
        weight, bias = context.weight(self.weight), context.weight(self.bias)
        y: Tensor
        if not self.training:
            y = _apply(flat, weight, bias, self.running_mean, self.running_var, self.eps)
            if y.requires_grad and not x.is_cuda:
                y.register_hook(lambda grad: _in_format_of(flat, grad))  # type: ignore[no-untyped-call]
            return y.view_as(x)
        if count is None:
            raise ValueError("batch norm in training needs the count of valid positions; in evaluation call .eval()")
        if x.dim() < 4 and self.fused(x):
            return self._launched(x.contiguous(), count, context)
        y, mean, var = _Normalise.apply(  # type: ignore[no-untyped-call]
            flat, weight, bias, count, self.eps, self.reduce
        )
        torch._foreach_lerp_([self.running_mean, self.running_var], [mean, var], self._next_share())
        return y.view_as(x)

    def fused(self, x: Tensor) -> bool:
        """Whether training on x (..., C) runs on the kernels of `ds2_ops`; else on torch's, and always so on a CPU."""
        possible = self.training and self.kernels and x.is_cuda
        return possible and why_not(x.dtype, len(self.weight), x.device) is None

    def clipped(self, x: Tensor, lengths: Tensor, count: Count, clip: float, context: PassContext) -> Tensor:
        """Normalise, then clip, in the same launches; where `fused` says so.

        Args:
            x: (B, C, F, T), whatever lies past each length.
            lengths: (B,) int32, on the device.
            count: valid positions.

        Returns:
            (B, C, F, T), 0 past each length, its memory in the order (B, F, T, C).
        """
        rows = x.permute(0, 2, 3, 1).contiguous()
        return self._launched(rows, count, context, lengths=lengths, clip=clip).permute(0, 3, 1, 2)

    def _launched(self, rows: Tensor, count: Count, context: PassContext, **options: Any) -> Tensor:
        """Run the kernels of `ds2_ops` on rows (..., C)."""
        running = RunningStatistics(self.running_mean, self.running_var, self._next_share())
        parts = (rows, context.weight(self.weight), context.weight(self.bias), count.over_ranks(self.reduce))
        return batch_norm(*parts, eps=self.eps, running=running, reduce=self.reduce, **options)

    def scale_and_shift(self) -> tuple[Tensor, Tensor]:
        """s and t of y = s x + t in evaluation, float64 (C,) each: s = weight / sqrt(var + eps), t = bias - s mean."""
        scale = self.weight.double() / (self.running_var.double() + self.eps).sqrt()
        return scale, self.bias.double() - self.running_mean.double() * scale

    def forget_broken_averages(self) -> None:
        """Start the running averages anew where a batch that was not finite got into them; reads them back."""
        if not bool(torch.isfinite(self.running_mean + self.running_var).all()):
            self.running_mean.zero_()
            self.running_var.fill_(1.0)
            self.batches = 0

    def get_extra_state(self) -> Tensor:
        """The number of batches in the running averages, () int64, for the state dict."""
        return torch.full((), self.batches)  # a third of the time of torch.tensor, in each of 50 layers

    def set_extra_state(self, state: Tensor) -> None:
        """Take up what ``get_extra_state`` gave."""
        self.batches = int(state)


class RmsNorm(nn.Module):
    """Divide each frame by its root mean square: y = x / sqrt(mean(x^2) + eps) (Zhang and Sennrich 2019).

    No frame needs another one, so a layer may begin before the layer below has ended, and training and evaluation
    compute the same. Frames of zeros stay zeros. It has no weight: the product after it has one for each channel.
    """

    eps = 1e-5  # added to the mean square

    def forward(self, x: Tensor, count: Count | None = None, context: PassContext = OWN_PARAMETERS) -> Tensor:
        """Normalise (..., C), any float dtype, computed in float32 at least; `count` and `context` are not used."""
        return rms_norm(x, self.eps)


Norm = SequenceBatchNorm | RmsNorm


def make_norm(channels: int, config: ModelConfig) -> Norm | None:
    """Make the norm that a config names for the inputs of recurrent layers and classifiers; None: they have none."""
    if config.norm == "rms":
        return RmsNorm()
    return SequenceBatchNorm(channels, config.batch_norm_momentum) if config.batch_norm else None


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last axis, in the dtype of x."""
    with torch.autocast(x.device.type, enabled=False):
        return functional.rms_norm(x, x.shape[-1:], None, eps)


def rms_eps(norm: Norm | None) -> float | None:
    """The eps of a norm that divides each frame by its root mean square; None: it does not."""
    return norm.eps if isinstance(norm, RmsNorm) else None


def fold_norm_after(weight: Tensor, bias: Tensor | None, norm: SequenceBatchNorm | None) -> tuple[Tensor, Tensor]:
    """Weight (C, ...) and bias (C,) of a product and the norm after it, float64: s (W x) + t = (s W) x + t."""
    weight = weight.double()
    shift = weight.new_zeros(len(weight)) if bias is None else bias.double()
    if norm is None:
        return weight, shift
    scale, offset = norm.scale_and_shift()
    return weight * scale.view(-1, *[1] * (weight.dim() - 1)), shift * scale + offset


def fold_norm_before(weight: Tensor, bias: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor]:
    """Weight (V, H) and bias (V,) of a product and the norm before it, float64: W (s x + t) = (W s) x + W t.

    The division of an RMS norm is not in them: see `rms_eps`.
    """
    weight, bias = weight.double(), bias.double()
    if not isinstance(norm, SequenceBatchNorm):
        return weight, bias
    scale, shift = norm.scale_and_shift()
    return weight * scale, bias + weight @ shift


class _Normalise(torch.autograd.Function):
    """Reduce, then transform, one kernel over the data for each, both ways. Keeps its input and vectors only."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, count: Count, eps: float, reduce: Reduce | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        mean, var = torch.batch_norm_update_stats(_wide_on_cpu(x), None, None, 0.0)
        # from all positions to the valid ones: the others hold 0 and add nothing to a sum or a sum of squares
        total = count.over_ranks(reduce)
        if reduce is None:
            ratio, complement = count.ratio(mean.dtype)
            mean, var = torch._foreach_mul([mean, torch.addcmul(var, mean * complement, mean)], ratio)
        else:  # in float64: the difference of large sums is the variance
            own = torch.stack([mean, torch.addcmul(var, mean, mean)])[None].double() * count.positions
            mean, squares = reduce(own, None)[0] / total
            mean, var = mean.to(weight.dtype), torch.addcmul(squares, mean, mean, value=-1.0).to(weight.dtype)
        inverse = torch.rsqrt(var.clamp_min_(0.0) + eps)
        ctx.save_for_backward(x, weight, mean, inverse, total)
        ctx.eps, ctx.reduce = eps, reduce
        ctx.mark_non_differentiable(mean, var)
        if x.is_cuda:
            return torch.batch_norm_elemt(x, weight, bias, mean, inverse, eps), mean, var
        return _apply(x, weight, bias, mean, var, eps), mean, var

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse, count = ctx.saved_tensors
        grad_y = _in_format_of(x, grad_y)
        if x.is_cuda:
            total, total_x, grad_weight, grad_bias = torch.batch_norm_backward_reduce(
                grad_y, x, mean, inverse, weight, True, True, True
            )
        else:
            grad_y, x = _wide_on_cpu(grad_y), _wide_on_cpu(x)
            var = inverse.square().reciprocal() - ctx.eps
            _, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
                grad_y, x, weight, mean, var, None, None, False, ctx.eps, [False, True, True]
            )
            total, total_x = grad_bias, grad_weight / inverse
        if ctx.reduce is not None:
            total, total_x = ctx.reduce(torch.stack([total, total_x])[None].double(), None)[0].to(total.dtype)
        # grad_x = weight * inverse * (grad_y - mean(grad_y) - x_hat * mean(grad_y * x_hat)), means over valid positions
        if x.is_cuda:
            grad_x = torch.batch_norm_backward_elemt(grad_y, x, mean, inverse, weight, total, total_x, count)
        else:
            scale = weight * inverse
            slope = -scale * inverse.square() * total_x / count
            shift = -scale * total / count - slope * mean
            shift, slope, scale = (
                values_in_layout(v.view(1, -1, *[1] * (x.dim() - 2)), x) for v in (shift, slope, scale)
            )
            grad_x = torch.addcmul(shift, x, slope).addcmul_(grad_y, scale)
        return grad_x.to(ctx.saved_tensors[0].dtype), grad_weight, grad_bias, None, None, None


def _in_format_of(x: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient in the memory format of x: torch's for a CPU is wrong where one alone has channels last."""
    channels_last = x.dim() == 4 and x.stride(1) == 1
    return grad.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def _apply(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    return torch.batch_norm(_wide_on_cpu(x), weight, bias, mean, var, False, 0.0, eps, False).to(x.dtype)


def values_in_layout(values: Tensor, x: Tensor) -> Tensor:
    """Repeat values over frames and channels where the channels are last in memory of x (B, C, F, T), on a CPU.

    Else torch goes through x channel by channel, which are few, instead of row by row.

    Args:
        values: (1, C, 1, 1) or (B, 1, 1, T); those of another x are returned as they are.
        x: what they will be multiplied with.
    """
    if x.is_cuda or x.dim() != 4 or x.stride(1) != 1:
        return values
    return values.expand(-1, x.shape[1], -1, x.shape[3]).contiguous(memory_format=torch.channels_last)


def _wide_on_cpu(x: Tensor) -> Tensor:
    """bf16 as float32 on a CPU, whose kernels would round the statistics to bf16; the GPU's keep them in float32."""
    return x if x.is_cuda or x.dtype == torch.float64 else x.float()
