"""Facts that follow from a model's config alone: its modules, its lookahead, and whether it can work at all."""

import math
from dataclasses import dataclass

import torch
from ds2_ops.recurrent.cells import CELLS

from ds2.audio.features import Size
from ds2.config.check import check_allowed
from ds2.config.schema import ConfigError, ConvConfig, ModelConfig
from ds2.system.machine import memory_bytes


@dataclass(frozen=True)
class TimeWindow:
    """The input frames that a layer sees: output frame m needs `length` input frames, from m stride - past on.

    On blocks the layer runs on the last `cached` frames of its input and the new ones. A block gives one output frame
    for each stride of new frames, which come `delay` output frames late. Both follow from two conditions:

        length - stride <= cached < length          as many windows fit as there are strides of new frames
        cached = past + delay stride - delay_in     the first window of a stream is that of output frame -delay
    """

    length: int
    past: int
    stride: int
    delay_in: int  # frames by which the input is late

    @property
    def delay(self) -> int:
        """Frames by which the output is late."""
        return -((self.past + self.stride - self.length - self.delay_in) // self.stride)

    @property
    def cached(self) -> int:
        """Input frames that are cached from block to block."""
        return self.past + self.delay * self.stride - self.delay_in


def operator_cell(config: ModelConfig) -> str:
    """The name that ds2_ops has for the cell of the recurrent layers."""
    return config.nonlinearity if config.cell == "rnn" else "gru_after" if config.cell == "gru" else config.cell


def output_size(size: Size, stride: int) -> Size:
    """Frames, or bins, that a convolution gives for so many at a stride: a number, or a tensor of numbers."""
    return (size + stride - 1) // stride


def frames_ahead(conv: ConvConfig) -> int:
    """Future input frames that a convolution sees."""
    return 0 if conv.causal else conv.kernel[1] // 2


def time_stride(config: ModelConfig) -> int:
    """Feature frames an output frame stands for."""
    return math.prod(conv.stride[1] for conv in config.convs)


def module_plan(config: ModelConfig) -> list[tuple[int, int]]:
    """(recurrent layers, row convolutions) of each module; the rule stands at :class:`AcousticModel`."""
    size = config.skip or 1
    layers = [min(size, config.depth - first) for first in range(0, config.depth, size)]
    edges = [index * config.row_convs // len(layers) for index in range(len(layers) + 1)]
    return [(count, after - before) for count, before, after in zip(layers, edges[:-1], edges[1:], strict=True)]


def lookahead_parts_ms(config: ModelConfig, step_s: float) -> dict[str, float]:
    """Lookahead of the convolutions, of the row convolutions and, infinite, of backward layers."""
    step_ms, convs_ms = step_s * 1000, 0.0
    for conv in config.convs:
        convs_ms += frames_ahead(conv) * step_ms
        step_ms *= conv.stride[1]
    parts = {"convolutions": convs_ms, "row convolutions": config.row_convs * config.row_conv_context * step_ms}
    return parts | ({"bidirectional": float("inf")} if config.bidirectional else {})


def min_weight_count(config: ModelConfig) -> int:
    """Numbers of a model, without those of its first recurrent input, row convolutions, norms and classifier."""
    channels = [1, *(conv.channels for conv in config.convs)]
    convs = sum(
        c.kernel[0] * c.kernel[1] * c.channels * before for c, before in zip(config.convs, channels, strict=False)
    )
    directions = 2 if config.bidirectional else 1
    projections = 1 if config.cell == "rnn" else directions  # simple layers of two directions share theirs
    matrices = config.depth * directions + (config.depth - 1) * projections
    return convs + matrices * CELLS[operator_cell(config)].gates * config.hidden**2


def check_model(config: ModelConfig, step_s: float = 0.01) -> None:
    """Raise ConfigError where a model config cannot work, naming the key, what is allowed and the way out."""
    check_allowed(config, "model")
    for index, conv in enumerate(config.convs):
        key = f"model.convs[{index}]"
        if any(k % 2 == 0 for k in conv.kernel):
            raise ConfigError(f"{key}.kernel is {conv.kernel}, allowed are two odd sizes [frequency, time]")
        if any(s > k for s, k in zip(conv.stride, conv.kernel, strict=True)):
            raise ConfigError(
                f"{key}.stride is {conv.stride}, allowed are two sizes [frequency, time] from 1 to the kernel's, "
                f"here {conv.kernel}: a larger one would skip frames"
            )
    _check_nonlinearity(config)
    inner = len(module_plan(config)) - 1
    if any(number > inner for number in config.intermediate) or len({*config.intermediate}) < len(config.intermediate):
        allowed = f"allowed are different numbers from 1 to {inner}" if inner else "allowed is []"
        modules = f"{inner + 1} modules, and the last" if inner else "one module, which"
        raise ConfigError(
            f"model.intermediate={config.intermediate}, {allowed}: this model has {modules} has the classifier anyway"
        )
    needed, present = 4 * min_weight_count(config), memory_bytes()
    if needed > present:
        raise ConfigError(
            f"the model has more than {needed / 2**30:,.0f} GiB of weights in fp32, this machine has "
            f"{present / 2**30:,.0f} GiB of memory: lower model.hidden={config.hidden}, model.depth={config.depth} or "
            "model.convs"
        )
    parts = lookahead_parts_ms(config, step_s)
    total_ms = sum(parts.values())
    if config.max_lookahead_ms > 0 and total_ms > config.max_lookahead_ms:
        sums = " + ".join(f"{name} {part:g}" for name, part in parts.items())
        way_out = (
            "set model.max_lookahead_ms=0 to allow a bidirectional model"
            if config.bidirectional
            else "lower model.row_convs, model.row_conv_context or the time kernels or time strides of model.convs, "
            "set causal: true in model.convs, or raise model.max_lookahead_ms"
        )
        raise ConfigError(
            f"the model looks {total_ms:g} ms ahead ({sums} ms), allowed by model.max_lookahead_ms are "
            f"{config.max_lookahead_ms:g}: {way_out}"
        )


def _check_nonlinearity(config: ModelConfig) -> None:
    activate_ = CELLS[operator_cell(config)].activate_
    at_zero = 0.0 if activate_ is None else activate_(torch.zeros(1, device="cpu"), config.clip).item()
    if at_zero != 0 and not config.bidirectional:
        raise ConfigError(
            f"model.nonlinearity={config.nonlinearity} has f(0) = {at_zero:g}, allowed is 0: a stream's states are 0 "
            "until its first frame. Take another one, or model.bidirectional=true, which does not stream"
        )


def check_backend(config: ModelConfig, device: torch.device) -> None:
    """Raise ConfigError where the recurrent backend that was asked for by name cannot run on a device."""
    needed = {"persistent": "cuda", "cpu": "cpu"}.get(config.backend, device.type)
    if needed != device.type:
        raise ConfigError(
            f"model.backend={config.backend} runs on {needed} devices, this run is on {device}: "
            "model.backend=auto takes the fastest that can"
        )
