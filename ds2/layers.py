"""The layers of the acoustic model: masked convolution, sequence-wise batch norm, recurrent layer, row convolution.

Every layer has one forward for whole utterances and for streams, so that both run the same arithmetic.
Shape letters: T frames, B batch, C channels, F bins, H hidden, D width of a layer's input.

Invariant: between layers, frames past an utterance's length are exactly 0, and no layer reads a gradient there.
"""

from dataclasses import dataclass

import torch
from ds2_ops import lookahead, lookahead_stream, recurrence
from torch import Tensor, nn
from torch.nn import functional

from ds2.config.schema import ConvConfig, ModelConfig
from ds2.norm import SequenceBatchNorm

State = tuple[Tensor, ...] | None
_RECURRENT_GAIN = 0.5


@dataclass(frozen=True)
class Ragged:
    """How far each utterance of a padded batch reaches, on the CPU and on the device, made once a batch.

    Attributes:
        lengths_cpu: (B,) int64 on the CPU, valid frames.
        lengths: (B,) int32 on the model's device.
        count: valid frames of the batch.
        valid: (B, T) bool on the device, True where t < length.
    """

    lengths_cpu: Tensor
    lengths: Tensor
    count: int
    valid: Tensor

    @classmethod
    def of(cls, lengths_cpu: Tensor, frames: int, device: torch.device) -> "Ragged":
        """Make one from (B,) lengths on the CPU, for batches padded to ``frames``."""
        lengths = lengths_cpu.to(device, torch.int32, non_blocking=True)
        valid = torch.arange(frames, device=device, dtype=torch.int32) < lengths[:, None]
        return cls(lengths_cpu, lengths, int(lengths_cpu.sum()), valid)

    @property
    def frames(self) -> int:
        """T, the padded number of frames."""
        return self.valid.shape[1]


class MaskedConv(nn.Module):
    """2-D convolution over frequency and time, batch norm and clipped ReLU, blind to padding (paper, Figure 7).

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

    @property
    def lookahead_frames(self) -> int:
        """Future input frames that an output frame sees."""
        return (self.kernel[1] - 1) // 2

    def output_bins(self, bins: int) -> int:
        """F of the output."""
        return -(-bins // self.stride[0])

    def output_lengths(self, lengths: Tensor) -> Tensor:
        """Frames out for frames in."""
        return (lengths + self.stride[1] - 1) // self.stride[1]

    def forward(self, x: Tensor, ragged: Ragged) -> tuple[Tensor, Ragged]:
        """Convolve whole utterances.

        Args:
            x: (B, C, F, T), 0 past each length.
            ragged: lengths of ``x``.

        Returns:
            (B, C', F', T') and its lengths; 0 past each of them.
        """
        z = self._convolve(x, self.kernel[1] // 2)
        after = Ragged.of(self.output_lengths(ragged.lengths_cpu), z.shape[3], z.device)
        valid = after.valid[:, None, None, :].to(z.dtype)
        if self.norm is not None:  # a convolution's edge spills past the end: out of the statistics with it
            z = self.norm(z.mul_(valid), after.count * z.shape[2])
        return functional.hardtanh(z, 0.0, self.clip).mul_(valid), after

    def stream(self, x: Tensor, tail: Tensor | None, *, final: bool) -> tuple[Tensor, Tensor]:
        """Convolve the next chunk of streams.

        Args:
            x: (B, C, F, T), the next chunk; T may be 0.
            tail: what the previous call returned, None at the start.
            final: True for the last chunk, which also gives what was held back.

        Returns:
            (B, C', F', T') frames whose future is known by now, and the tail for the next call.
        """
        kernel, stride, reach = self.kernel[1], self.stride[1], self.lookahead_frames
        held = torch.cat([x.new_zeros(*x.shape[:3], reach) if tail is None else tail, x], 3)
        if final:
            held = functional.pad(held, (0, reach))
        ready = max((held.shape[3] - kernel) // stride + 1, 0)
        if not ready:
            return x.new_zeros(x.shape[0], self.weight.shape[0], self.output_bins(x.shape[2]), 0), held
        z = self._convolve(held, 0)
        if self.norm is not None:
            z = self.norm(z)
        return functional.hardtanh(z, 0.0, self.clip), held[..., ready * stride :]

    def _convolve(self, x: Tensor, time_padding: int) -> Tensor:
        weight: Tensor = self.weight
        if x.is_cuda:  # else cuDNN picks a gradient kernel that takes 28 ms at B 4 on an H200; so all of it takes 3
            x = x.contiguous(memory_format=torch.channels_last)
            weight = weight.contiguous(memory_format=torch.channels_last)
        return functional.conv2d(x, weight, self.bias, self.stride, (self.kernel[0] // 2, time_padding))


class RecurrentLayer(nn.Module):
    """Simple recurrent layer h_t = f(BN(W x_t) + U h_(t-1)) (paper, section 5.2; Deep Speech 2, section 3.2).

    Bidirectional layers share W and its batch norm, have a U each, and sum both directions, as Deep Speech 2 does.

    U starts as the identity times 0.5: each unit begins as a leaky sum of its own input, so the gradient reaches a few
    frames back, and with the unit variance that batch norm gives at any depth the state stays far below the clip.
    Tried on AN4 for 17 s each (8 x 512, one H200, one seed), greedy WER on its test part: identity * 0.5 19 %,
    uniform as torch.nn 29 %, orthogonal 32 %, orthogonal * 0.5 54 %; identity * 0.3 39 % and * 0.5 17 % in 15 s, while
    * 0.7 and * 0.9 had not begun to learn.

    Args:
        width_in: D.
        config: hidden, nonlinearity, clip, batch norm, bidirectional, dropout, backend.
    """

    def __init__(self, width_in: int, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.hidden
        self.nonlinearity, self.clip, self.backend = config.nonlinearity, config.clip, config.backend
        self.dropout = config.dropout
        self.weight_ih = nn.Parameter(torch.empty(hidden, width_in))
        nn.init.kaiming_normal_(self.weight_ih, nonlinearity="relu")
        self.norm = SequenceBatchNorm(hidden, config.batch_norm_momentum) if config.batch_norm else None
        self.bias = None if config.batch_norm else nn.Parameter(torch.zeros(hidden))
        self.weight_hh = nn.Parameter(_RECURRENT_GAIN * torch.eye(hidden))
        self.weight_hh_reverse = nn.Parameter(_RECURRENT_GAIN * torch.eye(hidden)) if config.bidirectional else None

    def forward(self, x: Tensor, ragged: Ragged, state: State = None) -> tuple[Tensor, State]:
        """Run the layer over whole utterances, or over the next chunk of streams.

        Args:
            x: (T, B, D), 0 past each length.
            ragged: lengths of ``x``.
            state: one (B, H) tensor, h before frame 0; zeros when None.

        Returns:
            (T, B, H), 0 past each length, and the state after each utterance's last frame.
        """
        x = functional.dropout(x, self.dropout, self.training)
        z = functional.linear(x, self.weight_ih, self.bias)
        if self.norm is not None:
            z = self.norm(z, ragged.count)
        y, h_n = self._recur(z, self.weight_hh, None if state is None else state[0], ragged)
        if self.weight_hh_reverse is not None:
            flipped, _ = self._recur(reverse(z, ragged), self.weight_hh_reverse, None, ragged)
            y = y + reverse(flipped, ragged)
        return y, (h_n,)

    def _recur(self, z: Tensor, weight_hh: Tensor, h0: Tensor | None, ragged: Ragged) -> tuple[Tensor, Tensor]:
        return recurrence(
            z, weight_hh, h0, ragged.lengths, nonlinearity=self.nonlinearity, clip=self.clip, backend=self.backend
        )


class TorchRecurrentLayer(nn.Module):
    """LSTM or GRU layer through torch's fused kernels, which hold the input projection.

    Batch norm therefore acts on the layer's input instead of on its projection: an identity projection behind a
    normalised one would cost a product as large as the recurrence. Directions are summed, as in
    :class:`RecurrentLayer`. Arguments, shapes and returns are those of :class:`RecurrentLayer`, the state of an LSTM
    being (h, c).
    """

    def __init__(self, width_in: int, config: ModelConfig) -> None:
        super().__init__()
        make = {"lstm": nn.LSTM, "gru": nn.GRU}[config.cell]
        self.dropout = config.dropout
        self.norm = SequenceBatchNorm(width_in, config.batch_norm_momentum) if config.batch_norm else None
        self.cell = make(width_in, config.hidden)
        self.cell_reverse = make(width_in, config.hidden) if config.bidirectional else None

    def forward(self, x: Tensor, ragged: Ragged, state: State = None) -> tuple[Tensor, State]:
        """See :meth:`RecurrentLayer.forward`."""
        if self.norm is not None:
            x = self.norm(x, ragged.count)
        x = functional.dropout(x, self.dropout, self.training)
        carried = None if state is None else tuple(s[None] for s in state)
        y, last = self.cell(x, carried[0] if carried is not None and len(carried) == 1 else carried)
        if self.cell_reverse is not None:
            flipped, _ = self.cell_reverse(reverse(x, ragged))
            y = y + reverse(flipped, ragged)
        # torch runs on into the padding: frames before it never see that, and its output ends here
        y = torch.where(ragged.valid.t()[:, :, None], y, 0.0)
        return y, tuple(s[0] for s in (last if isinstance(last, tuple) else (last,)))


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

    def forward(self, x: Tensor, ragged: Ragged) -> Tensor:
        """Map (T, B, H) to (T, B, H), 0 past each length."""
        return lookahead(x, self.weight, ragged.lengths)

    def stream(self, x: Tensor, tail: Tensor | None, *, final: bool) -> tuple[Tensor, Tensor]:
        """Map the next (T, B, H) chunk to the frames whose future is known by now; also give the tail to carry."""
        return lookahead_stream(x, self.weight, tail, final=final)


def make_recurrent_layer(width_in: int, config: ModelConfig) -> nn.Module:
    """Make the recurrent layer that ``config.cell`` names."""
    return RecurrentLayer(width_in, config) if config.cell == "rnn" else TorchRecurrentLayer(width_in, config)


def reverse(x: Tensor, ragged: Ragged) -> Tensor:
    """Reverse each utterance of (T, B, D) in time within its own length; padding stays where it is."""
    time = torch.arange(x.shape[0], device=x.device, dtype=torch.int64)[:, None]
    index = torch.where(ragged.valid.t(), ragged.lengths - 1 - time, time)
    return x[index, torch.arange(x.shape[1], device=x.device)]
