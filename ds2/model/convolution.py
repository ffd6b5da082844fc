"""Convolutions over whole utterances: the front end's, and along time alone."""

import torch
from ds2_ops import lookahead
from ds2_ops.convolution import convolve, why_not
from torch import Tensor, nn
from torch.nn import functional

from ds2.config.schema import ConvConfig, ModelConfig
from ds2.model.folded import ConvWeights, TimeWindow
from ds2.model.norm import Ragged, SequenceBatchNorm, fold_norm_after
from ds2.model.pass_context import OWN_PARAMETERS, PassContext
from ds2.model.structure import frames_after


class MaskedConv(nn.Module):
    """2-D convolution over frequency and time, batch norm and clipped ReLU, which ignore padding (paper, Figure 7).

    Kernels are odd and zeros are added on both sides, (k - 1) / 2 each, so ceil(T / stride) frames come out and output
    frame t is centred on input frame t * stride: it sees (k - 1) / 2 input frames to either side.

    Args:
        channels_in: C of the input.
        conv: kernel and stride as [frequency, time], output channels.
        config: clip and batch norm.
    """

    def __init__(self, channels_in: int, conv: ConvConfig, config: ModelConfig) -> None:
        super().__init__()
        self.kernel, self.stride, self.clip = tuple(conv.kernel), tuple(conv.stride), config.clip
        self.weight = nn.Parameter(torch.empty(conv.channels, channels_in, *self.kernel))
        nn.init.kaiming_normal_(self.weight, nonlinearity="relu")
        self.norm = SequenceBatchNorm(conv.channels, config.batch_norm_momentum, axis=1) if config.batch_norm else None
        self.bias = None if config.batch_norm else nn.Parameter(torch.zeros(conv.channels))

    def output_bins(self, bins: int) -> int:
        """F of the output."""
        return -(-bins // self.stride[0])

    def forward(self, x: Tensor, ragged: Ragged, context: PassContext = OWN_PARAMETERS) -> tuple[Tensor, Ragged]:
        """Convolve whole utterances.

        Args:
            x: (B, C, F, T), 0 past each length.
            ragged: lengths of ``x``.
            context: of the pass.

        Returns:
            (B, C', F', T') and its lengths; 0 past each of them.
        """
        z = self._convolve(x, context)
        lengths = frames_after(ragged.lengths, self.stride[1])
        after = Ragged.of(lengths, z.shape[3], z.device, ragged.keys, ragged.share)
        if self.norm is not None and self.norm.fused(z):
            return self.norm.clipped(z, after.lengths, after.count.times(z.shape[2]), self.clip, context), after
        valid = after.valid[:, None, None, :].to(z.dtype)
        if self.norm is not None:  # a convolution's edge spills past the end: out of the statistics with it
            z = self.norm(z.mul_(valid), after.count.times(z.shape[2]), context)
        return functional.hardtanh(z, 0.0, self.clip).mul_(valid), after

    def folded(self, bins: int, delay_in: int) -> ConvWeights:
        """Describe the layer in evaluation for so many bins, whose input is late by so many frames."""
        weight, bias = fold_norm_after(self.weight, self.bias, self.norm)
        window = TimeWindow(self.kernel[1], (self.kernel[1] - 1) // 2, self.stride[1], delay_in)
        return ConvWeights(weight, bias, (self.stride[0], self.stride[1]), self.clip, bins, window)

    def _convolve(self, x: Tensor, context: PassContext) -> Tensor:
        weight = context.weight(self.weight)
        bias = None if self.bias is None else context.weight(self.bias)
        if bias is None and why_not(x, weight, self.stride) is None:
            return convolve(x, weight, self.stride)
        if x.is_cuda:  # else cuDNN picks a gradient kernel that takes 28 ms at B 4 on an H200; so all of it takes 3
            x = x.contiguous(memory_format=torch.channels_last)
            weight = weight.contiguous(memory_format=torch.channels_last)
        return functional.conv2d(x, weight, bias, self.stride, (self.kernel[0] // 2, self.kernel[1] // 2))


class RowConvolution(nn.Module):
    """Each feature sees itself and ``context`` future frames (Deep Speech 2, section 3.7; paper, section 5.2).

    It starts as the identity, w_0 = 1 and the rest 0: a stack of any depth starts as if it had none, and the other
    taps have a gradient from the first step on, since each feature has its own.

    Args:
        hidden: H.
        context: tau, future frames seen.
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
