"""The network on blocks of many streams: every block of a length runs the same kernels, from first block to last.

A stream starts with zeros where it has no past, and every block gives as many frames as any other. Frames before the
stream's start and past its end are masked. So one CUDA graph of a batch size serves all streams at all times; what the
streams carry lies in tables that the kernels read and write.

Block k of a layer with T frames a block and a delay of d gives its frames k T - d .. (k + 1) T - d - 1.
Shapes: N slots, B streams in a batch, C channels, F bins, D width of a layer's input, L layers, H hidden, T frames,
R rows that a stream carries.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from ds2_ops import recurrence
from ds2_ops.classifier import classify
from ds2_ops.convolution import CHANNELS, ConvInput, StreamConvolution, flatten, join, why_not_on_streams
from ds2_ops.jit.launch import device_index
from ds2_ops.recurrent.backends.choose import why_not_unasked
from ds2_ops.recurrent.calibrate import device_facts
from ds2_ops.recurrent.cells import CELLS, PLAIN
from ds2_ops.recurrent.layer import project, recurrent_layer, why_not_concurrent
from ds2_ops.row_convolution import lookahead_chain
from torch import Tensor, nn

from ds2.config.schema import ConfigError
from ds2.model.acoustic import AcousticModel
from ds2.model.convolution import ConvWeights
from ds2.model.norm import rms_norm
from ds2.model.recurrent import Carry, ModuleWeights, RecurrentWeights
from ds2.model.structure import TimeWindow, operator_cell, output_size
from ds2.model.wavefront import LAYER_SMS, LayerStreams, Stage, run_stages

UNBOUNDED = 2**62  # feature frames of a stream whose end is not known yet
MAX_PARALLEL_STREAMS = 16  # that a cluster runs at once
Edges = tuple[Tensor, Tensor]  # first frames and lengths of streams in a piece, (B,) int32 each; in P pieces (P, B)
_LAYER_CELLS = (*PLAIN, "lstm")  # that `recurrent_layer` runs, whose projection and recurrence overlap


@dataclass
class StreamState:
    """The state that streams carry from block to block."""

    conv_tails: list[Tensor]  # (N, F, R, C) of each convolution
    hidden: Tensor  # (L, N, H) h of the recurrent layers
    cells: Tensor  # (L, N, H) c of layers whose cell has one, float32 at least; L = 0 without any
    rows: Tensor  # (R, N, H) tails of row convolutions and waiting frames of the skips, module by module

    @property
    def capacity(self) -> int:
        """N."""
        return self.hidden.shape[1]

    def tables(self) -> tuple[Tensor, ...]:
        """The tables (., N, H) of the recurrent modules."""
        return self.hidden, self.cells, self.rows

    def by_slot(self) -> list[Tensor]:
        """Everything as views (N, ...)."""
        return [*self.conv_tails, *(table.transpose(0, 1) for table in self.tables())]


class BlockNetwork:
    """A model that runs on blocks of `block_frames` feature frames.

    Args:
        model: unidirectional, in evaluation mode; what it learns later is not seen.
        block_frames: a multiple of the model's stride in time.
        dtype: of weights and activations; the classifier's are float32 at least.
        piece_frames: feature frames of a piece, a multiple of the stride: recurrent layers run a block piece by piece,
            on a GPU those of few streams side by side (`ds2.model.wavefront`). None: the whole block at once.

    Raises:
        ConfigError: a bidirectional model.
        ValueError: blocks that are no multiple of the stride.
    """

    @torch.no_grad()
    def __init__(
        self, model: AcousticModel, block_frames: int, dtype: torch.dtype, piece_frames: int | None = None
    ) -> None:
        if model.config.bidirectional:
            raise ConfigError(
                "model.bidirectional=true cannot stream: its backward layers start at an utterance's end; "
                "use a model trained with model.bidirectional=false, or transcribe whole files"
            )
        if block_frames < 1 or block_frames % model.time_stride:
            raise ValueError(f"block_frames={block_frames} is no multiple of the model's stride, {model.time_stride}")
        weights, backend = model.folded(), model.config.backend
        self.device = model.classifier.weight.device
        self.block_frames, self.frames = block_frames, block_frames // model.time_stride
        self.piece = (piece_frames or block_frames) // model.time_stride
        self.dtype, self._wide = dtype, torch.promote_types(dtype, torch.float32)
        self.hidden, self.delay = model.config.hidden, weights.delay
        self.parallel_layers = parallel_layers(model, dtype)
        self._layer_streams = list[LayerStreams]()
        self.convs = _conv_levels(weights.convs, block_frames, dtype)
        self._channels = len(weights.convs[-1].weight) if weights.convs else 1  # of `convs`, without added zeros
        self.modules = [BlockModule(module, dtype, backend) for module in weights.modules]
        starts = torch.arange(0, self.frames, self.piece, device=self.device)
        delays = torch.tensor([module.delay_in for module in weights.modules], device=self.device)
        self._first = (starts - delays[:, None])[..., None]  # (M, P, 1): first frame of each module and piece
        self._lengths = (self.frames - starts).clamp_max(self.piece)[:, None]  # (P, 1)
        self._rms_eps = weights.rms_eps
        self._classifier = weights.classifier.to(self._wide), weights.bias.to(self._wide)

    def new_state(self, slots: int) -> StreamState:
        """Tables for so many streams; what is in a slot does not matter before a stream's first block."""
        tails = [torch.zeros(slots, *level.tail_shape, dtype=self.dtype, device=self.device) for level in self.convs]
        layers = [layer for module in self.modules for layer in module.layers]
        counts = (
            (len(layers), self.dtype),
            (sum(layer.has_c for layer in layers), self._wide),
            (sum(module.cached for module in self.modules), self.dtype),
        )
        tables = (torch.zeros(count, slots, self.hidden, dtype=dtype, device=self.device) for count, dtype in counts)
        return StreamState(tails, *tables)

    def output_frames(self, frames: int) -> int:
        """Output frames of a stream of so many feature frames."""
        return output_size(frames, self.block_frames // self.frames)

    def valid_span(self, block: int, ends: int) -> tuple[int, int]:
        """The first and one past the last frame of a block's output that belong to the stream."""
        begin = block * self.frames - self.delay  # of the block, in frames of the stream
        return min(self.frames, max(0, -begin)), max(0, min(self.frames, self.output_frames(ends) - begin))

    def has_edges(self, block: int, ends: int) -> bool:
        """Whether a block is a stream's first one, or may have frames before the stream's start or past its end."""
        return block == 0 or block * self.frames < self.delay or ends < UNBOUNDED

    @torch.no_grad()
    def run(
        self, features: Tensor, state: StreamState, slots: Tensor, blocks: Tensor, ends: Tensor, *, edges: bool
    ) -> Tensor:
        """Run the next block of a batch of streams; their slots of the state are updated.

        Args:
            features: (B, F, T), 0 past a stream's end.
            slots: (B,) int64, all different.
            blocks: (B,) int64 blocks that each stream has had.
            ends: (B,) int64 feature frames of each stream, UNBOUNDED while that is not known.
            edges: whether `has_edges` is true of any of these streams; else nothing is masked.

        Returns:
            Logits (T', B, V), of which `valid_span` says what belongs to a stream.
        """
        span = (blocks, ends, 0) if edges else ()
        x = ConvInput(features[..., None], self.dtype, None, 0.0, *span)
        for level, tail in zip(self.convs, state.conv_tails, strict=True):
            y = level.conv.step(x, tail, slots, level.needed)
            if edges:
                ends = output_size(ends, level.window.stride)
                span = blocks, ends, level.window.delay
            x = ConvInput(y, self.dtype, *level.conv.pending, *span)
        if edges:
            for table in state.tables():
                table.index_copy_(1, slots, torch.where((blocks > 0)[:, None], table.index_select(1, slots), 0.0))
        frames = flatten(x.first(self._channels))
        y = self.run_layers(frames, state, slots, blocks, ends, edges=edges)
        if self._rms_eps is not None:
            y = rms_norm(y, self._rms_eps)
        return classify(y, *self._classifier)

    @torch.no_grad()
    def run_layers(
        self, x: Tensor, state: StreamState, slots: Tensor, blocks: Tensor, ends: Tensor, *, edges: bool
    ) -> Tensor:
        """Run all recurrent modules on a block (T, B, D), piece by piece; return (T, B, H).

        Args:
            state, slots, blocks, ends, edges: as of `run`, `ends` in output frames.
        """
        pieces = torch.split(x, self.piece)
        parallel = self._streams_for(x.shape[1]) if len(pieces) > 1 else []
        module_edges: Sequence[Edges | None] = [None] * len(self.modules)
        if edges:  # a layer's state stays 0 until the stream begins, and frames past the end do not change it
            first = blocks * self.frames + self._first  # (M, P, B)
            begins = (-first).clamp_min(0).int()
            lengths = torch.minimum((ends - first).clamp_min(0), self._lengths).int()
            module_edges = list(zip(begins, lengths, strict=True))
        hidden, cells = (iter(table.index_select(1, slots)) for table in (state.hidden, state.cells))
        rows = iter(torch.split(state.rows, [module.cached for module in self.modules]))
        stages, runs = list[Stage](), list[ModuleRun]()
        for module, own_edges in zip(self.modules, module_edges, strict=True):
            carries = [(next(hidden), *itertools.islice(cells, layer.has_c)) for layer in module.layers]
            runs.append(ModuleRun(module, carries, next(rows), slots, own_edges))
            stages += [functools.partial(runs[-1].layer, layer) for layer in range(len(module.layers))]
        outputs = run_stages(stages, pieces, parallel)
        carries = [carry for run in runs for carry in run.carries]
        for number, table in enumerate((state.hidden, state.cells)):
            if len(table):
                table.index_copy_(1, slots, torch.stack([carry[number] for carry in carries]))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _streams_for(self, batch: int) -> list[LayerStreams]:
        """CUDA streams for a batch whose layers take so few multiprocessors that several fit side by side."""
        if batch > MAX_PARALLEL_STREAMS:
            return []
        while len(self._layer_streams) < self.parallel_layers:
            self._layer_streams.append(LayerStreams(self.device))
        return self._layer_streams[: self.parallel_layers]


def parallel_layers(model: AcousticModel, dtype: torch.dtype) -> int:
    """How many layers of a model its GPU runs side by side: one on each cluster of `LAYER_SMS` multiprocessors.

    0: layers run one after the other, each on the whole device.
    """
    config, device = model.config, model.classifier.weight.device
    if device.type != "cuda" or config.bidirectional or config.backend not in ("auto", "persistent"):
        return 0
    cell = operator_cell(config)
    if cell not in _LAYER_CELLS:
        return 0
    size = (config.hidden, dtype, device, cell, LAYER_SMS)
    if config.backend == "auto" and why_not_unasked(dtype, torch.get_float32_matmul_precision()):
        return 0
    if any(why_not_concurrent(batch, *size) for batch in (1, MAX_PARALLEL_STREAMS)):
        return 0
    return device_facts(device_index(device)).active_clusters.get(LAYER_SMS) or 1


@dataclass(frozen=True)
class ConvLevel:
    """A convolution as blocks run it."""

    conv: "LibraryConv | KernelConv"
    window: TimeWindow
    tail_shape: tuple[int, int, int]  # (F, R, C) that a stream carries
    needed: int  # input frames, the cached and the new ones together


def _conv_levels(layers: Sequence[ConvWeights], block_frames: int, dtype: torch.dtype) -> list[ConvLevel]:
    levels, frames = list[ConvLevel](), block_frames
    channels = 1  # of a layer's output, with the zeros that a kernel adds
    for layer in layers:
        conv: LibraryConv | KernelConv
        if KernelConv.why_not(layer, channels, dtype) is None:
            conv = KernelConv(layer, channels, dtype)
            channels = CHANNELS
        else:
            # Output frames up to which a GPU convolves faster by one product.
            dense_frames = 0 if not layer.weight.is_cuda else 1 << 30 if channels == 1 else 80
            conv = LibraryConv(layer, dtype, dense_frames)
            channels = len(layer.weight)
        window = layer.window
        frames //= window.stride
        tail_shape = (layer.bins, window.cached, conv.channels)
        needed = (frames - 1) * window.stride + window.length
        levels.append(ConvLevel(conv, window, tail_shape, needed))
    return levels


Pending = tuple[Tensor | None, float]  # bias and clip that are still to be applied to a convolution's output


class LibraryConv:
    """A convolution by torch's libraries.

    For up to `dense_frames` output frames of all streams together it is one product of a window of frames with a matrix
    that has zeros where a bin does not meet a tap: libraries run a small convolution on few multiprocessors, and one of
    a single channel on no matrix unit.
    """

    pending: Pending = None, 0.0

    def __init__(self, layer: ConvWeights, dtype: torch.dtype, dense_frames: int = 0) -> None:
        weight = layer.weight
        self.kernel, self.stride, self.clip = weight.shape[2:], layer.stride, layer.clip
        self.layout = torch.channels_last if weight.is_cuda else torch.contiguous_format
        self.weight = weight.to(dtype).contiguous(memory_format=self.layout)
        self.bias, self.dense_frames = layer.bias.to(dtype), dense_frames
        self.channels, self.bins = weight.shape[1], layer.bins_out
        if dense_frames:
            # Rows on 16-byte boundaries: libraries multiply others three times as slowly.
            window = self.kernel[1] * weight.shape[1]
            self.more_bins = next(more for more in range(8) if (layer.bins + more) * window % 8 == 0)
            self.matrix = _dense_matrix(weight, layer.bins + self.more_bins, self.bins, self.stride[0]).to(dtype)
            self.all_bias = self.bias.repeat_interleave(self.bins)

    def step(self, x: ConvInput, tail: Tensor, slots: Tensor, needed: int) -> Tensor:
        """Run on the next block of streams: see `ds2_ops.convolution.join`."""
        return self(join(x.first(self.channels), tail, slots, needed))

    def __call__(self, x: Tensor) -> Tensor:
        """Map (B, F, T, C) to the frames (B, F', T', C') for which the whole kernel lies in T."""
        frames = (x.shape[2] - self.kernel[1]) // self.stride[1] + 1
        if x.shape[0] * frames <= self.dense_frames:
            if self.more_bins:
                x = nn.functional.pad(x, (0, 0, 0, 0, 0, self.more_bins))
            windows = x.unfold(2, self.kernel[1], self.stride[1]).permute(0, 2, 3, 1, 4)  # (B, T', C, F, k)
            z = torch.addmm(self.all_bias, windows.reshape(x.shape[0] * frames, -1), self.matrix)
            z = z.view(x.shape[0], frames, -1, self.bins).permute(0, 3, 1, 2)
        else:
            if self.channels == 1 and not x.is_cuda:  # with strides of channels last, torch leaves outputs unwritten
                images = x[..., 0].unsqueeze(1)
            else:
                images = x.permute(0, 3, 1, 2).contiguous(memory_format=self.layout)
            z = nn.functional.conv2d(images, self.weight, self.bias, self.stride, (self.kernel[0] // 2, 0))
            z = z.permute(0, 2, 3, 1)
        return nn.functional.hardtanh_(z, 0.0, self.clip)


class KernelConv:
    """A convolution by a kernel whose bits depend neither on the batch nor on the block.

    Its input has 32 `channels`, of which the layer's own come first, or the one of features.
    """

    def __init__(self, layer: ConvWeights, channels: int, dtype: torch.dtype) -> None:
        self.channels, zeros = channels, CHANNELS - len(layer.weight)  # channels of the output that are 0
        self.conv = StreamConvolution(_padded_channels(layer.weight, channels).to(dtype), layer.stride)
        self.pending: Pending = nn.functional.pad(layer.bias, (0, zeros)).to(dtype), layer.clip

    @staticmethod
    def why_not(layer: ConvWeights, channels: int, dtype: torch.dtype) -> str | None:
        """Say why the kernel does not take this layer; None if it does."""
        if max(layer.weight.shape[:2]) > CHANNELS:
            return f"it has more than {CHANNELS} channels"
        return why_not_on_streams(_padded_channels(layer.weight, channels).to(dtype), layer.stride)

    def step(self, x: ConvInput, tail: Tensor, slots: Tensor, needed: int) -> Tensor:
        """As `LibraryConv.step`, of 32 channels; bias and clip are left to the reader."""
        return self.conv(x, tail, slots, needed)


def _padded_channels(weight: Tensor, channels: int) -> Tensor:
    """(C', C, F, T) with zeros up to 32 output and `channels` input channels."""
    zeros = CHANNELS - weight.shape[0], channels - weight.shape[1]
    return nn.functional.pad(weight, (0, 0, 0, 0, 0, zeros[1], 0, zeros[0]))


def _dense_matrix(weight: Tensor, bins: int, bins_out: int, stride: int) -> Tensor:
    """(C F k, C' F') what a convolution (C', C, kF, k) does to a window of k frames; zeros lie beyond the bins."""
    channels_out, channels, height, width = weight.shape
    reach = height // 2
    padded = weight.new_zeros(channels_out, bins_out, channels, bins + 2 * reach, width)
    for out in range(bins_out):
        padded[:, out, :, out * stride : out * stride + height] = weight
    return padded[:, :, :, reach : reach + bins].reshape(channels_out * bins_out, -1).t().contiguous()


class BlockRecurrence:
    """The weights of a recurrent layer in the dtype of blocks, and the function that runs it."""

    def __init__(self, layer: RecurrentWeights, dtype: torch.dtype, backend: str) -> None:
        [direction] = layer.directions
        self.cell, self.has_c, self.rms_eps = layer.cell, CELLS[layer.cell].carries_c, layer.rms_eps
        self._options: dict[str, Any] = {"cell": layer.cell, "clip": layer.clip, "backend": backend}
        self.weight, self.bias = direction.weight_ih.to(dtype), direction.bias.to(dtype)
        self.weight_hh = direction.weight_hh.to(dtype)
        self.bias_hn = None if direction.bias_hn is None else direction.bias_hn.to(dtype)

    def __call__(
        self, x: Tensor, carry: Carry, edges: Edges | None, projection_stream: torch.cuda.Stream | None
    ) -> tuple[Tensor, Carry]:
        """Run frames (T, B, D) of streams; return (T, B, H), and the state after them.

        Args:
            carry: state before them, zeros before a stream's first frame.
            edges: of the streams: a state is 0 until the first frame and stays what it is after the last. None: all
                frames count.
            projection_stream: of a layer with others at its side, a stream for its projection, on which x is ready.
        """
        begin, lengths = edges or (None, None)
        if lengths is not None and x.device.type == "cpu" and (longest := int(lengths.max())) < len(x):
            # Frames past the last stream's end are not worth a CPU's time: a file's last block is seldom full.
            y, carry = self(x[:longest], carry, edges, projection_stream)
            return nn.functional.pad(y, (0, 0, 0, 0, 0, len(x) - longest)), carry
        max_sms = None if projection_stream is None else LAYER_SMS
        if self.rms_eps is not None:
            with torch.cuda.stream(projection_stream):  # None: the current one
                x = rms_norm(x, self.rms_eps)
        last: Sequence[Tensor]
        h, c = (*carry, None)[:2]
        if self.cell in _LAYER_CELLS:
            options = self._options | {"max_sms": max_sms, "projection_stream": projection_stream}
            y, *last = recurrent_layer(x, self.weight, self.bias, self.weight_hh, h, c, lengths, begin, **options)
            return y, tuple(last)
        z = project(x.contiguous(), self.weight, self.bias, None)
        if begin is not None and lengths is not None:  # frames before a stream's first one go behind its last
            z, lengths = _rotated(z, begin), (lengths - begin).clamp_min(0)
        y, *last = recurrence(z, self.weight_hh, h, lengths, bias_hn=self.bias_hn, c0=c, **self._options)
        return y if begin is None else _rotated(y, -begin), tuple(last)


def _rotated(x: Tensor, first: Tensor) -> Tensor:
    """The frames of x (T, B, H) from each stream's `first` (B,) on, then those before it."""
    frames = (torch.arange(len(x), device=x.device)[:, None] + first) % len(x)
    return x.gather(0, frames[..., None].expand_as(x))


class BlockModule:
    """The weights of a recurrent module in the dtype of blocks: recurrent layers, row convolutions, and the skip."""

    def __init__(self, module: ModuleWeights, dtype: torch.dtype, backend: str) -> None:
        self.layers = [BlockRecurrence(layer, dtype, backend) for layer in module.layers]
        taps = [weight.to(dtype) for weight in module.row_convs]
        self.taps = torch.stack(taps) if taps else None  # (N, tau + 1, H)
        self.projection: tuple[Tensor, Tensor] | None = None
        if module.projection is not None:
            weight = module.projection.to(dtype)
            self.projection = weight, weight.new_zeros(len(weight))
        self.residual, self.cached = module.residual, module.cached


class ModuleRun:
    """A module on its way through a block, piece by piece.

    Args:
        carries: states of its layers; after the last piece, those after the block.
        rows: (R, N, H) of `StreamState.rows`, those of this module; updated.
        slots: (B,) int64 of the batch.
        edges: of the streams; None: all frames count.
    """

    def __init__(
        self, module: BlockModule, carries: Sequence[Carry], rows: Tensor, slots: Tensor, edges: Edges | None
    ) -> None:
        self.module, self.rows, self.slots, self.edges = module, rows, slots, edges
        self.carries = list(carries)
        self._inputs: dict[int, Tensor] = {}  # of pieces that are within the module

    def layer(self, number: int, piece: int, x: Tensor, projection_stream: torch.cuda.Stream | None) -> Tensor:
        """Run a layer on a piece (T, B, D), after the last one the row convolutions and the skip; return (T, B, H)."""
        module, layer = self.module, self.module.layers[number]
        edges = None if self.edges is None else (self.edges[0][piece], self.edges[1][piece])
        if number == 0:
            self._inputs[piece] = x
        y, self.carries[number] = layer(x, self.carries[number], edges, projection_stream)
        if number + 1 < len(module.layers):
            return y
        x = self._inputs.pop(piece)
        skip = None
        if module.residual:
            skip = x if module.projection is None else project(x, *module.projection, None)
        if module.taps is None:
            return y if skip is None else y + skip
        return lookahead_chain(y, module.taps, self.rows, skip, self.slots)
