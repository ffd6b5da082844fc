"""Convolutions over whole utterances: the front end's, and along time alone."""

from dataclasses import dataclass
from typing import Any

import torch
from ds2_ops import lookahead
from ds2_ops.convolution import convolve, why_not
from torch import Tensor, nn
from torch.nn import functional

from ds2.config.schema import ConvConfig, ModelConfig
from ds2.model.norm import SequenceBatchNorm, fold_norm_after, values_in_layout
from ds2.model.pass_context import OWN_PARAMETERS, PassContext
from ds2.model.ragged import Count, Ragged
from ds2.model.structure import TimeWindow, frames_ahead, output_size


@dataclass(frozen=True)
class ConvWeights:
    """A convolution over bins and frames, then clip to 0 .. `clip`."""

    weight: Tensor  # (C', C, kernel in frequency, kernel in time)
    bias: Tensor  # (C',)
    stride: tuple[int, int]
    clip: float
    bins: int  # F of the input
    window: TimeWindow

    @property
    def bins_out(self) -> int:
        """F of the output."""
        return output_size(self.bins, self.stride[0])


class MaskedConv(nn.Module):
    """2-D convolution over frequency and time, batch norm and clipped ReLU, which ignore padding (paper, Figure 7).

    Kernels are odd and zeros are added on both sides, (k - 1) / 2 each, so ceil(T / stride) frames come out and output
    frame t is centred on input frame t * stride: it sees (k - 1) / 2 input frames to either side. A causal convolution
    has all its zeros before the first frame: output frame t sees input frame t * stride and k - 1 before it.
    """

    def __init__(self, channels_in: int, conv: ConvConfig, config: ModelConfig) -> None:
        super().__init__()
        self.kernel, self.clip = tuple(conv.kernel), config.clip
        self.stride = conv.stride[0], conv.stride[1]
        self.past = conv.kernel[1] - 1 - frames_ahead(conv)  # input frames
        self.weight = nn.Parameter(torch.empty(conv.channels, channels_in, *self.kernel))
        nn.init.kaiming_normal_(self.weight, nonlinearity="relu")
        self.norm = SequenceBatchNorm(conv.channels, config.batch_norm_momentum) if config.batch_norm else None
        self.bias = None if config.batch_norm else nn.Parameter(torch.zeros(conv.channels))

    def forward(self, x: Tensor, ragged: Ragged, context: PassContext = OWN_PARAMETERS) -> tuple[Tensor, Ragged]:
        """Convolve utterances (B, C, F, T); return (B, C', F', T') and their lengths. Both are 0 past each length."""
        frames = output_size(x.shape[3], self.stride[1])
        if late := self.past - self.kernel[1] // 2:  # zeros before x move the centred windows of `_convolve`
            x = functional.pad(x, (late, -late % (2 * self.stride[1])))  # on a CPU, pairs of frames stay pairs
        z = self._convolve(x, context)[..., :frames]
        lengths = output_size(ragged.lengths, self.stride[1])
        after = Ragged.of(lengths, frames, z.device, ragged.keys)
        count = Count(after.lengths, after.valid.numel(), bins=z.shape[2])
        if self.norm is not None and self.norm.fused(z):
            return self.norm.clipped(z, after.lengths, count, self.clip, context), after
        valid = values_in_layout(after.valid[:, None, None, :].to(z.dtype), z)
        if self.norm is not None:  # a convolution's edge spills past the end: out of the statistics with it
            z = self.norm(z * valid, count, context)
        return functional.hardtanh(z, 0.0, self.clip).mul_(valid), after

    def folded(self, bins: int, delay_in: int) -> ConvWeights:
        """Describe the layer in evaluation for so many bins, whose input is late by so many frames."""
        weight, bias = fold_norm_after(self.weight, self.bias, self.norm)
        window = TimeWindow(self.kernel[1], self.past, self.stride[1], delay_in)
        return ConvWeights(weight, bias, self.stride, self.clip, bins, window)

    def _convolve(self, x: Tensor, context: PassContext) -> Tensor:
        weight = context.weight(self.weight)
        bias = None if self.bias is None else context.weight(self.bias)
        if bias is None and why_not(x, weight, self.stride) is None:
            return convolve(x, weight, self.stride)
        high, wide = _padding(weight)
        if not x.is_cuda and x.shape[3] <= 2 * self.stride[1]:  # oneDNN may leave a single output frame unwritten
            x = functional.pad(x, (0, 2 * self.stride[1]))  # the caller drops the frames of these zeros
        if x.is_cuda:  # else cuDNN picks a gradient kernel that takes 28 ms at B 4 on an H200; so all of it takes 3
            x = x.contiguous(memory_format=torch.channels_last)
            weight = weight.contiguous(memory_format=torch.channels_last)
        elif x.shape[2] <= self.kernel[0]:  # oneDNN computes wrong gradients of such a kernel, and writes beyond them
            x, high = functional.pad(x, (0, 0, high, high)), 0
        elif bias is None and few_channels(x, weight):
            z: Tensor = FewChannels.apply(x, weight, self.stride)  # type: ignore[no-untyped-call]
            return z
        return functional.conv2d(x, weight, bias, self.stride, (high, wide))


_FEW = 8  # channels that fill half a vector register of 16 float32


def few_channels(x: Tensor, weight: Tensor) -> bool:
    """Whether a convolution of x (B, C, F, T) by weight (C', C, K, J) runs faster with pairs of frames as channels."""
    narrow = len(weight) <= _FEW or 1 < weight.shape[1] <= _FEW
    return narrow and x.device.type == "cpu" and x.dtype == weight.dtype and not torch.is_autocast_enabled("cpu")


class FewChannels(torch.autograd.Function):
    """Convolution on a CPU whose kernels would leave half of each vector register empty: they compute 16 channels.

    With channels last in memory, C channels of two neighbouring frames are 2 C channels of one: the same numbers, seen
    with another shape. Where there are at most 8 channels, the kernels compute both frames at once. Results differ from
    those of `functional.conv2d` by rounding alone; what they save: docs/log/2026-11-27/demo.md.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: tuple[int, int]) -> Tensor:
        x, ctx.stride = _channels_last(x), stride
        ctx.save_for_backward(x, weight)
        if not _pairs_out(x, weight, stride):
            return functional.conv2d(x, _channels_last(weight), None, stride, _padding(weight))
        both = _weight_of_two_outputs(weight, stride)
        z = functional.conv2d(x, both, None, (stride[0], 2 * stride[1]), _padding(weight))
        return _split_pairs(_channels_last(z))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad, stride, padding = _channels_last(grad), ctx.stride, _padding(weight)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = _grad_x(grad, x, weight, stride)
        if ctx.needs_input_grad[1] and _pairs_out(x, weight, stride):
            both = _weight_of_two_outputs(weight, stride)
            options = ((stride[0], 2 * stride[1]), padding)
            first, second = _backward(_join_pairs(grad), x, both, *options, of_weight=True).chunk(2)
            grad_weight = first[..., : weight.shape[3]] + second[..., stride[1] :]
        elif ctx.needs_input_grad[1]:
            grad_weight = _backward(grad, x, _channels_last(weight), stride, padding, of_weight=True)
        return grad_x, grad_weight, None


def _grad_x(grad: Tensor, x: Tensor, weight: Tensor, stride: tuple[int, int]) -> Tensor:
    """Return the gradient of x (B, C, F, T); pairs of its frames are channels where C is small and T even."""
    frames = x.shape[3]
    if not 1 < x.shape[1] <= _FEW or frames % 2 or stride[1] % 2:
        return _backward(grad, x, _channels_last(weight), stride, _padding(weight), of_weight=False)
    bins, reach = _padding(weight)
    # Frame u = 2 b + r meets the output frame t at tap k = u - stride t + reach. With k + shift = 2 j + r, the tap j of
    # the pairs is b - stride / 2 t + before, and their kernel is `weight` read in pairs.
    before, after = (reach + 1) // 2, reach // 2
    shift, taps = 2 * before - reach, before + after + 1
    filled = functional.pad(weight, (shift, 2 * taps - weight.shape[3] - shift))
    pairs = filled.view(*filled.shape[:3], taps, 2).permute(0, 4, 1, 2, 3).flatten(1, 2)
    outputs = (frames // 2 + 2 * before - taps) // (stride[1] // 2) + 1  # padding is equal on both sides
    grad = functional.pad(grad, (0, outputs - grad.shape[3]))
    options = ((stride[0], stride[1] // 2), (bins, before))
    return _split_pairs(_backward(grad, _join_pairs(x), _channels_last(pairs), *options, of_weight=False))


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int], *, of_weight: bool
) -> Tensor:
    """Return the gradient of a convolution's weight, or of its input x, channels last."""
    mask = [not of_weight, of_weight, False]
    grads = torch.ops.aten.convolution_backward(grad, x, weight, None, stride, padding, (1, 1), False, (0, 0), 1, mask)
    return grads[1] if of_weight else _channels_last(grads[0])


def _pairs_out(x: Tensor, weight: Tensor, stride: tuple[int, int]) -> bool:
    """Whether pairs of output frames are computed as channels of one."""
    return len(weight) <= _FEW and output_size(x.shape[3], stride[1]) % 2 == 0


def _weight_of_two_outputs(weight: Tensor, stride: tuple[int, int]) -> Tensor:
    """Return the weight (2 C', C, K, J + stride) that computes an output frame, then the next one."""
    first, second = functional.pad(weight, (0, stride[1])), functional.pad(weight, (stride[1], 0))
    return _channels_last(torch.cat([first, second]))


def _padding(weight: Tensor) -> tuple[int, int]:
    return weight.shape[2] // 2, weight.shape[3] // 2


def _join_pairs(x: Tensor) -> Tensor:
    """See (B, C, F, 2 P), channels last, as (B, 2 C, F, P)."""
    batch, channels, bins, frames = x.shape
    return x.permute(0, 2, 3, 1).view(batch, bins, frames // 2, 2 * channels).permute(0, 3, 1, 2)


def _split_pairs(x: Tensor) -> Tensor:
    """See (B, 2 C, F, P), channels last, as (B, C, F, 2 P)."""
    batch, channels, bins, pairs = x.shape
    return x.permute(0, 2, 3, 1).view(batch, bins, 2 * pairs, channels // 2).permute(0, 3, 1, 2)


def _channels_last(x: Tensor) -> Tensor:
    """Return (B, C, F, T) with the channels last in memory, also of a single one, which torch sees in either layout."""
    if x.shape[1] == 1:
        return x.squeeze(1).contiguous()[..., None].permute(0, 3, 1, 2)
    return x.contiguous(memory_format=torch.channels_last)


class RowConvolution(nn.Module):
    """Each feature sees itself and ``context`` (tau) future frames (Deep Speech 2, section 3.7; paper, section 5.2).

    It starts as the identity, w_0 = 1 and the rest 0: a stack of any depth starts as if it had none, and the other
    taps have a gradient from the first step on, since each feature has its own.
    """

    def __init__(self, hidden: int, context: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden, context + 1))
        with torch.no_grad():
            self.weight[:, 0] = 1.0

    def forward(self, x: Tensor, ragged: Ragged, context: PassContext = OWN_PARAMETERS) -> Tensor:
        """Map (T, B, H) to (T, B, H), 0 past each length."""
        sink = context.sink(self.weight)
        return lookahead(x, context.weight(self.weight), ragged.lengths, sink=None if sink is None else sink.add)

    def folded(self) -> Tensor:
        """The taps (tau + 1, H)."""
        return self.weight.detach().t()
