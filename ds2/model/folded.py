"""Layers for hearing only: weights of one type with the batch norm behind or before them folded in.

In evaluation y = (W x - mean) / sqrt(var + eps) * g + b is s W x + b - s mean, s = g / sqrt(var + eps).
"""

from __future__ import annotations

import torch
from ds2_ops.convolution import streams
from ds2_ops.convolution.carried import Given, joined
from ds2_ops.convolution.kernels import CHANNELS
from ds2_ops.convolution.streams import StreamConvolution
from ds2_ops.recurrent.layer import lstm_layer, recurrent_layer
from torch import Tensor, nn

from ds2.model.convolution import MaskedConv
from ds2.model.norm import SequenceBatchNorm
from ds2.model.recurrent import GatedRecurrentLayer, RecurrentLayer


def scale_and_shift(norm: SequenceBatchNorm) -> tuple[Tensor, Tensor]:
    """What a batch norm multiplies by and then adds in evaluation, float64 (C,) each."""
    scale = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
    return scale, norm.bias.double() - norm.running_mean.double() * scale


def after(weight: Tensor, bias: Tensor | None, norm: SequenceBatchNorm | None) -> tuple[Tensor, Tensor]:
    """Weight (C, ...) and bias (C,) that give what the norm makes of their product, float64."""
    wide = weight.double()
    shift = wide.new_zeros(len(wide)) if bias is None else bias.double()
    if norm is None:
        return wide, shift
    scale, offset = scale_and_shift(norm)
    return wide * scale.view(-1, *[1] * (wide.dim() - 1)), shift * scale + offset


def before(weight: Tensor, bias: Tensor, norm: SequenceBatchNorm | None) -> tuple[Tensor, Tensor]:
    """Weight (V, H) and bias (V,) of a linear layer that takes what the norm would have been given, float64."""
    weight, bias = weight.double(), bias.double()
    if norm is None:
        return weight, bias
    scale, shift = scale_and_shift(norm)
    return weight * scale, bias + weight @ shift


Left = tuple[Tensor | None, float]  # what a convolution leaves to be done: a bias, and where all is clipped


class FoldedConv:
    """A convolution with its norm in its weights.

    For few frames it is one product with the matrix of all that it does to a window of frames, zeros between: libraries
    give a small convolution to few multiprocessors, and one of a single channel to none of their matrix units.

    Args:
        conv: the layer.
        bins: F of its input.
        dtype: of the weights.
        dense_frames: output frames of all streams together up to which it is one product.
    """

    def __init__(self, conv: MaskedConv, bins: int, dtype: torch.dtype, dense_frames: int = 0) -> None:
        weight, bias = after(conv.weight, conv.bias, conv.norm)
        self.kernel, self.stride, self.clip = conv.kernel, conv.stride, conv.clip
        self.layout = torch.channels_last if weight.is_cuda else torch.contiguous_format
        self.weight = weight.to(dtype).contiguous(memory_format=self.layout)
        self.bias, self.dense_frames = bias.to(dtype), dense_frames
        self.left: Left = None, 0.0
        self.channels = weight.shape[1]
        self.bins = conv.output_bins(bins)
        if dense_frames:
            # Rows on 16-byte boundaries: libraries multiply others three times as slowly.
            window = conv.kernel[1] * weight.shape[1]
            self.more_bins = next(more for more in range(8) if (bins + more) * window % 8 == 0)
            self.matrix = _matrix(weight, bins + self.more_bins, self.bins, self.stride[0]).to(dtype)
            self.all_bias = bias.to(dtype).repeat_interleave(self.bins)

    def hear(self, given: Given, table: Tensor, places: Tensor, needed: int) -> Tensor:
        """Hear the next block of streams: see `ds2_ops.convolution.carried.joined`."""
        return self(joined(given.first(self.channels), table, places, needed))

    def __call__(self, x: Tensor) -> Tensor:
        """Map (B, F, T, C) to the frames (B, F', T', C') of which all of the kernel lies in T."""
        frames = (x.shape[2] - self.kernel[1]) // self.stride[1] + 1
        if x.shape[0] * frames <= self.dense_frames:
            if self.more_bins:
                x = nn.functional.pad(x, (0, 0, 0, 0, 0, self.more_bins))
            windows = x.unfold(2, self.kernel[1], self.stride[1]).permute(0, 2, 3, 1, 4)  # (B, T', C, F, k)
            z = torch.addmm(self.all_bias, windows.reshape(x.shape[0] * frames, -1), self.matrix)
            z = z.view(x.shape[0], frames, -1, self.bins).permute(0, 3, 1, 2)
        else:
            images = x.permute(0, 3, 1, 2).contiguous(memory_format=self.layout)
            z = nn.functional.conv2d(images, self.weight, self.bias, self.stride, (self.kernel[0] // 2, 0))
            z = z.permute(0, 2, 3, 1)
        return nn.functional.hardtanh_(z, 0.0, self.clip)


class StreamedConv:
    """A convolution with its norm in its weights, on kernels whose bits depend neither on a batch nor on a block.

    Args:
        conv: the layer.
        channels: of what it is given: 32, of which the layer's own come first, or the one of features.
        dtype: of the weights.
    """

    def __init__(self, conv: MaskedConv, channels: int, dtype: torch.dtype) -> None:
        weight, bias = after(conv.weight, conv.bias, conv.norm)
        self.channels, more = channels, CHANNELS - len(weight)  # more of its output are 0
        self.conv = StreamConvolution(_wide(weight, channels).to(dtype), conv.stride)
        self.left: Left = nn.functional.pad(bias, (0, more)).to(dtype), conv.clip

    @staticmethod
    def why_not(conv: MaskedConv, channels: int, dtype: torch.dtype) -> str | None:
        """Why it is not for this layer; None if it is."""
        if max(len(conv.weight), conv.weight.shape[1]) > CHANNELS:
            return f"it has more than {CHANNELS} channels"
        return streams.why_not(_wide(conv.weight, channels).to(dtype), conv.stride)

    def hear(self, given: Given, table: Tensor, places: Tensor, needed: int) -> Tensor:
        """See `FoldedConv`; bias and clip are left to whoever reads it, of 32 channels."""
        return self.conv(given, table, places, needed)


def _wide(weight: Tensor, channels: int) -> Tensor:
    """(C', C, F, T) with zeros for more channels, 32 and so many."""
    more = CHANNELS - weight.shape[0], channels - weight.shape[1]
    return nn.functional.pad(weight, (0, 0, 0, 0, 0, more[1], 0, more[0]))


def _matrix(weight: Tensor, bins: int, bins_out: int, stride: int) -> Tensor:
    """(C F k, C' F') what a convolution (C', C, kF, k) does to a window of k frames; zeros lie beyond the bins."""
    channels_out, channels, height, width = weight.shape
    reach = height // 2
    padded = weight.new_zeros(channels_out, bins_out, channels, bins + 2 * reach, width)
    for out in range(bins_out):
        padded[:, out, :, out * stride : out * stride + height] = weight
    return padded[:, :, :, reach : reach + bins].reshape(channels_out * bins_out, -1).t().contiguous()


Carry = tuple[Tensor, ...]  # of a recurrent layer, (B, H) each: h, and c of an LSTM
WAVE_SMS = 16  # multiprocessors of a layer that has others beside it


class FoldedRecurrence:
    """A recurrent layer's projection with its norm in its weights, and its recurrent matrix."""

    def __init__(self, layer: RecurrentLayer, dtype: torch.dtype) -> None:
        weight, bias = after(layer.weight_ih, layer.bias, layer.norm)
        self.weight, self.bias, self.weight_hh = weight.to(dtype), bias.to(dtype), layer.weight_hh.to(dtype)
        self.nonlinearity, self.clip, self.backend = layer.nonlinearity, layer.clip, layer.backend

    def __call__(
        self, x: Tensor, carry: Carry, lengths: Tensor | None, begin: Tensor | None, *, aside: torch.cuda.Stream | None
    ) -> tuple[Tensor, Carry]:
        """Run frames (T, B, D) of streams.

        Args:
            x: the frames.
            carry: what the layer carries, zeros before a stream's first frame.
            lengths: (B,) int32 frames that are a stream's; None: all.
            begin: (B,) int32 a stream's first frame, before which it carries zeros on; None: 0.
            aside: of a layer that has others beside it, a stream for its projection, on which x is there.

        Returns:
            (T, B, H), and what the layer carries behind them.
        """
        y, state = recurrent_layer(
            x,
            self.weight,
            self.bias,
            self.weight_hh,
            carry[0],
            lengths,
            begin,
            nonlinearity=self.nonlinearity,
            clip=self.clip,
            backend=self.backend,
            max_sms=None if aside is None else WAVE_SMS,
            aside=aside,
        )
        return y, (state,)


class FoldedLstm:
    """An LSTM layer's projection with the norm of its input in its weights, and its recurrent matrices."""

    def __init__(self, layer: GatedRecurrentLayer, dtype: torch.dtype) -> None:
        cell = layer.cell
        weight, bias = before(cell.weight_ih_l0, cell.bias_of_input(), layer.norm)
        self.weight, self.bias, self.weight_hh = weight.to(dtype), bias.to(dtype), cell.weight_hh_l0.to(dtype)
        self.backend = layer.backend

    def __call__(
        self, x: Tensor, carry: Carry, lengths: Tensor | None, begin: Tensor | None, *, aside: torch.cuda.Stream | None
    ) -> tuple[Tensor, Carry]:
        """See `FoldedRecurrence`."""
        given = (x, self.weight, self.bias, self.weight_hh, *carry, lengths, begin)
        max_sms = None if aside is None else WAVE_SMS
        y, *left = lstm_layer(*given, backend=self.backend, max_sms=max_sms, aside=aside)
        return y, tuple(left)
