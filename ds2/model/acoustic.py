"""The acoustic model of the paper's Figure 7 and its relatives: convolutions, residual recurrent modules, classifier.

Shape letters: T frames, B batch, C channels, F bins, H hidden, D width of a module's input, V labels.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ds2.audio.features import Size
from ds2.config.schema import ModelConfig
from ds2.model import structure
from ds2.model.convolution import ConvWeights, MaskedConv
from ds2.model.dropout import UtteranceDropout
from ds2.model.norm import RmsNorm, SequenceBatchNorm, fold_norm_before, make_norm, rms_eps
from ds2.model.pass_context import OWN_PARAMETERS, PassContext
from ds2.model.ragged import Count, Ragged
from ds2.model.recurrent import ModuleWeights, RecurrentLayer, RecurrentModule, why_torch
from ds2.model.structure import output_size
from ds2.model.wavefront import Wavefront, run_modules


class Head(nn.Module):
    """Norm and a classifier after a module that is not the last, for training (Lee and Watanabe 2021)."""

    def __init__(self, width: int, labels: int, config: ModelConfig) -> None:
        super().__init__()
        self.norm = make_norm(width, config)
        self.classifier = nn.Linear(width, labels)


def classifier_logits(x: Tensor, count: Count, head: "Head | AcousticModel", context: PassContext) -> Tensor:
    """Map (T, B, H) to logits (T, B, V) by the norm and the classifier of a head or of the model."""
    with torch.autocast(x.device.type, enabled=False):
        classifier = head.classifier
        x = x.to(classifier.weight.dtype)
        if head.norm is not None:
            x = head.norm(x, count, context)
        return functional.linear(x, context.weight(classifier.weight), context.weight(classifier.bias))


@dataclass(frozen=True)
class NetworkWeights:
    """The whole network as inference needs it: norms folded into weights, each layer's place on a stream's time axis.

    Each training module describes itself by a method `folded`, which returns a dataclass that stands beside it. Blocks
    of streams (`ds2.inference.network`) and exported models (`ds2.export.model`) are made of these descriptions alone.
    A new layer that existing fields can describe needs no change there: a factor for each unit is a row convolution of
    one tap.

    A stream comes in blocks. Every layer gives as many frames as come in (divided by its stride) and is late by its
    lookahead; the end of its input is cached for the next block. `ds2.model.structure.TimeWindow` has this arithmetic.

    Folded weights are float64, others as trained.
    """

    convs: list[ConvWeights]
    modules: list[ModuleWeights]
    rms_eps: float | None  # of the classifier's input, as of `RecurrentWeights`
    classifier: Tensor  # (V, H)
    bias: Tensor  # (V,)
    delay: int  # output frames by which logits are late


class AcousticModel(nn.Module):
    """Log spectrogram in, logits over labels out (paper, section 5.2 and Figure 7).

    Convolutions, then modules of ``config.skip`` recurrent layers (the last one shorter where they do not come out
    even) with their row convolutions and residual skip, then batch norm and the classifier. The first module's input
    has another width: by default it has no skip, with skip_first = "projection" a linear one (plain where the widths
    agree). Without residuals (skip 0) each recurrent layer is a module.

    Row convolutions: the paper has 10 whatever the depth. Module m of M gets those n with
    floor(m R / M) <= n < floor((m + 1) R / M) of the R = row_convs: an even spread in which the last module always has
    one, several in one module follow each other, and with R < M some modules have none.

    Args:
        bins: F of the features.
        labels: V, with the blank as label 0.
        step_s: time from one feature frame to the next.

    Raises:
        ConfigError: a config that cannot work, or that looks further ahead than ``config.max_lookahead_ms``.
    """

    def __init__(self, config: ModelConfig, bins: int, labels: int, step_s: float = 0.01) -> None:
        super().__init__()
        structure.check_model(config, step_s)
        self.config, self.bins, self.labels, self.step_s = config, bins, labels, step_s
        channels = 1
        self.convs: nn.ModuleList = nn.ModuleList()
        for conv in config.convs:
            self.convs.append(MaskedConv(channels, conv, config))
            channels, bins = conv.channels, output_size(bins, conv.stride[0])
        width = channels * bins
        self.recurrent_modules = nn.ModuleList()
        for index, (layers, row_convs) in enumerate(structure.module_plan(config)):
            residual = config.skip > 0 and (index > 0 or config.skip_first == "projection")
            self.recurrent_modules.append(RecurrentModule(width, layers, row_convs, config, residual=residual))
            width = config.hidden
        for number, dropout in enumerate(m for m in self.modules() if isinstance(m, UtteranceDropout)):
            dropout.layer = number
        self._scale_branches()
        self.wavefront: Wavefront | None = None  # layers side by side in training; None: one after the other
        self.norm = make_norm(width, config)
        self.classifier = nn.Linear(width, labels)
        of_heads = len(config.intermediate_phones) + 1 if config.intermediate_phones else labels
        self.heads = nn.ModuleDict({str(number): Head(width, of_heads, config) for number in config.intermediate})

    @property
    def time_stride(self) -> int:
        """Feature frames an output frame stands for."""
        return structure.time_stride(self.config)

    @property
    def lookahead_ms(self) -> float:
        """Audio past an output frame's own feature frame that its logits depend on; infinite when bidirectional.

        Output frame t belongs to feature frame t * time_stride. Time is counted from feature frame to feature frame;
        what the window of the last one overlaps beyond its step (window_s - step_s) comes on top.
        """
        return sum(structure.lookahead_parts_ms(self.config, self.step_s).values())

    @property
    def layers_total(self) -> int:
        """Layers as the paper counts them: convolutions, recurrent layers, row convolutions and the classifier."""
        return len(self.config.convs) + self.config.depth + self.config.row_convs + 1

    @property
    def parameter_count(self) -> int:
        """Trained numbers."""
        return sum(parameter.numel() for parameter in self.parameters())

    def low_precision_parameters(self) -> list[nn.Parameter]:
        """Parameters that bf16 autocast rounds in every pass and ds2 may round once a step: kernels and matrices.

        The classifiers' stay as they are, since logits are computed in float32, and so do those of recurrent layers
        that run on torch's kernels, which round them themselves.
        """
        excluded: list[nn.Module] = [self.classifier, self.heads]
        if self.why_torch("bf16") is not None:
            excluded += [module for module in self.modules() if isinstance(module, nn.RNNBase)]
        stay = {parameter for module in excluded for parameter in module.parameters()}
        return [p for p in self.parameters() if p.ndim >= 2 and p not in stay]

    def why_torch(self, precision: str) -> str | None:
        """Why recurrent layers run through torch's kernels, which a CUDA graph cannot hold; None if they do not."""
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        return why_torch(self.config, dtype, self.classifier.weight.device)

    def output_frames(self, frames: Size) -> Size:
        """Output frames for a number, or a tensor of numbers, of feature frames."""
        return output_size(frames, self.time_stride)

    def forward(self, features: Tensor, lengths: Tensor, keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Run whole utterances.

        Args:
            features: (B, F, T) float32; what lies past an utterance's length is ignored, NaN included.
            lengths: (B,) integers, valid frames; on the CPU, or on the features' device: then never read back, so that
                their values are the caller's promise.
            keys: (B,) int64 on the device, from which each utterance's dropout follows; None: torch's generator.

        Returns:
            Logits (T', B, V) float32, 0 past each length, and output lengths (B,) int64 where the lengths are.

        Raises:
            ValueError: shapes or lengths that do not fit.
        """
        *_, logits = self.all_logits(features, lengths, keys)
        return logits, self.output_frames(lengths.long())

    def all_logits(
        self, features: Tensor, lengths: Tensor, keys: Tensor | None = None, context: PassContext = OWN_PARAMETERS
    ) -> list[Tensor]:
        """The logits of the model, the last of the list; in training those of the intermediate heads before them.

        Heads have the labels of the model or, with ``config.intermediate_phones``, a blank and these.

        Arguments, shapes and errors as of :meth:`forward`; context: the weights to compute with, the parameters
        themselves by default.
        """
        lengths = self._checked_lengths(features, lengths)
        if features.shape[2] == 0:  # all of it shorter than one window
            return [features.new_zeros(0, len(lengths), self.labels)]
        if features.device.type == "cpu":  # as many frames come out; convolutions on a CPU take them in pairs
            features = functional.pad(features, (0, -features.shape[2] % self.time_stride))
        ragged = Ragged.of(lengths, features.shape[2], features.device, keys)
        x = torch.where(ragged.valid[:, None, None, :], features[:, None], 0.0)
        for conv in self.convs:
            x, ragged = conv(x, ragged, context)
        x = x.permute(3, 0, 1, 2).flatten(2).contiguous()  # (T, B, C F): the one place where the layout changes
        all_logits: list[Tensor] = []
        wavefront = self.wavefront if self.training else None
        pieces = 1 if wavefront is None else wavefront.pieces(len(x), x.shape[1])
        if wavefront is not None and pieces > 1:
            modules = cast(Sequence[RecurrentModule], self.recurrent_modules)
            x = run_modules(modules, x, ragged, context, wavefront, pieces)
        else:
            for number, module in enumerate(self.recurrent_modules, 1):
                x = module(x, ragged, context)
                if self.training and str(number) in self.heads:
                    all_logits.append(classifier_logits(x, ragged.count, cast(Head, self.heads[str(number)]), context))
        all_logits.append(classifier_logits(x, ragged.count, self, context))
        return [torch.where(ragged.valid.t()[:, :, None], logits, 0.0) for logits in all_logits]

    @torch.no_grad()
    def folded(self, delay_in: int = 0) -> NetworkWeights:
        """Describe the network in evaluation, of features `delay_in` frames late; what it learns later is not seen."""
        delay, bins = delay_in, self.bins
        convs: list[ConvWeights] = []
        for conv in cast(Iterable[MaskedConv], self.convs):
            convs.append(conv.folded(bins, delay))
            delay, bins = convs[-1].window.delay, convs[-1].bins_out
        modules: list[ModuleWeights] = []
        for module in cast(Iterable[RecurrentModule], self.recurrent_modules):
            modules.append(module.folded(delay))
            delay += modules[-1].lookahead
        weight, bias = fold_norm_before(self.classifier.weight, self.classifier.bias, self.norm)
        return NetworkWeights(convs, modules, rms_eps(self.norm), weight, bias, delay)

    @torch.no_grad()
    def _scale_branches(self) -> None:
        """Start the M residual branches at 1 / sqrt(M) of a layer's output.

        The last layer of a branch is scaled: its batch norm, or with RMS norm its input weights; nothing is without a
        norm or in cells with gates. So the sum of all branches keeps its size, and so does the gradient (measured:
        docs/design/network.md).
        """
        if self.config.cell != "rnn" or self.config.start == "plain":
            return
        modules = cast(Iterable[RecurrentModule], self.recurrent_modules)
        layers = [cast(RecurrentLayer, module.recurrent[-1]) for module in modules if module.residual]
        for layer in layers:
            if isinstance(layer.norm, SequenceBatchNorm):
                nn.init.constant_(layer.norm.weight, len(layers) ** -0.5)
            elif isinstance(layer.norm, RmsNorm):
                layer.weight_ih.mul_(len(layers) ** -0.5)

    def _checked_lengths(self, features: Tensor, lengths: Tensor) -> Tensor:
        if features.dim() != 3 or features.shape[1] != self.bins:
            raise ValueError(
                f"features have shape {tuple(features.shape)}, expected (B, F, T) with F = {self.bins} bins"
            )
        batch, _, frames = features.shape
        on_cpu = lengths.device.type == "cpu"
        placed = on_cpu or lengths.device == features.device
        if not placed or lengths.dtype.is_floating_point or lengths.shape != (batch,):
            raise ValueError(
                f"lengths are {lengths.dtype} of shape {tuple(lengths.shape)} on {lengths.device}, expected integers "
                f"of shape (B,) = ({batch},) on the CPU or on {features.device}"
            )
        if on_cpu and batch and not 0 <= int(lengths.min()) <= int(lengths.max()) <= frames:
            raise ValueError(f"lengths are {lengths.tolist()}, allowed are 0 to T = {frames} frames")
        return lengths.long()
