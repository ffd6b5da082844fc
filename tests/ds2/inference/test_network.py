"""Blocks of streams give the logits of the whole utterance, whoever shares the batch."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from ds2_ops.convolution import ConvInput, join
from ds2_ops.jit import runtime
from support.layer_cases import GATED_CELLS
from torch import Tensor
from torch.nn import functional

from ds2.config.schema import ConfigError, ConvConfig, ModelConfig
from ds2.inference import network
from ds2.inference.network import UNBOUNDED, BlockNetwork, KernelConv, LibraryConv, StreamState
from ds2.model.acoustic import AcousticModel
from ds2.model.convolution import ConvWeights
from ds2.model.norm import SequenceBatchNorm
from ds2.model.structure import TimeWindow
from ds2.system.cuda_graph import GraphRecorder

BINS, LABELS = 9, 5
CONVS = {
    "none": [],
    "one": [ConvConfig(kernel=[5, 11], stride=[2, 2], channels=3)],
    "two": [
        ConvConfig(kernel=[5, 11], stride=[2, 2], channels=3),
        ConvConfig(kernel=[3, 7], stride=[1, 1], channels=2),
    ],
    "narrow": [
        ConvConfig(kernel=[3, 5], stride=[2, 3], channels=2),
        ConvConfig(kernel=[3, 3], stride=[1, 2], channels=2),
    ],
    "causal": [
        ConvConfig(kernel=[5, 11], stride=[2, 2], channels=3, causal=True),
        ConvConfig(kernel=[3, 5], stride=[1, 3], channels=2, causal=True),
    ],
    "causal first": [
        ConvConfig(kernel=[3, 5], stride=[2, 3], channels=2, causal=True),
        ConvConfig(kernel=[3, 7], stride=[1, 1], channels=2),
    ],
}


def make(convs: str = "two", **options: object) -> AcousticModel:
    torch.manual_seed(7)
    settings = {"hidden": 16, "depth": 5, "skip": 2, "row_convs": 4, "row_conv_context": 3, "max_lookahead_ms": 0}
    config = ModelConfig(convs=CONVS[convs], **(settings | options))  # type: ignore[arg-type]
    model = AcousticModel(config, BINS, LABELS).double().eval()
    for module in model.modules():  # statistics as after training
        if isinstance(module, SequenceBatchNorm):
            for tensor in (module.running_mean, module.bias):
                torch.nn.init.normal_(tensor, std=0.3)
            torch.nn.init.uniform_(module.running_var, 0.5, 2.0)
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
    return model


def whole(model: AcousticModel, features: Tensor) -> Tensor:
    with torch.no_grad():
        return model(features[None], torch.tensor([features.shape[1]]))[0][:, 0]


def run_all(blocks_of: BlockNetwork, state: StreamState, sources: list[Tensor], seed: int) -> list[Tensor]:
    """Run sources that join and leave at random, in batches of any of them, in random slots."""
    draw = random.Random(seed)
    free = list(range(state.capacity))
    draw.shuffle(free)
    waiting, logits = list(range(len(sources))), [torch.empty(0, LABELS, dtype=torch.float64) for _ in sources]
    active: dict[int, tuple[int, int]] = {}  # source: slot, blocks
    while waiting or active:
        if waiting and free and draw.random() < 0.7:
            active[waiting.pop(0)] = (free.pop(), 0)
        batch = [source for source in active if draw.random() < 0.7]
        if not batch:
            continue
        frames, block_frames = [sources[s].shape[1] for s in batch], blocks_of.block_frames
        blocks = [active[s][1] for s in batch]
        ends = [
            n if n <= (k + 1) * block_frames or draw.random() < 0.2 else UNBOUNDED
            for n, k in zip(frames, blocks, strict=True)
        ]
        features = torch.zeros(len(batch), BINS, block_frames, dtype=torch.float64)
        for row, source in enumerate(batch):
            piece = sources[source][:, blocks[row] * block_frames : (blocks[row] + 1) * block_frames]
            features[row, :, : piece.shape[1]] = piece
        spans = [blocks_of.valid_span(k, e) for k, e in zip(blocks, ends, strict=True)]
        slots = torch.tensor([active[s][0] for s in batch])
        edges = any(map(blocks_of.has_edges, blocks, ends)) or draw.random() < 0.5
        output = blocks_of.run(features, state, slots, torch.tensor(blocks), torch.tensor(ends), edges=edges)
        for row, source in enumerate(batch):
            first, last = spans[row]
            logits[source] = torch.cat([logits[source], output[first:last, row]])
            active[source] = (active[source][0], blocks[row] + 1)
            if len(logits[source]) == blocks_of.output_frames(sources[source].shape[1]):
                free.append(active.pop(source)[0])
    return logits


OPTIONS: list[dict[str, object]] = [
    {},
    {"skip": 0, "batch_norm": False},
    {"skip_first": "projection", "row_convs": 1},
    *({"cell": cell} for cell in GATED_CELLS),
    {"norm": "rms"},
    {"norm": "rms", "cell": "lstm"},
    {"cell": "gru", "batch_norm": False, "row_convs": 0, "depth": 2},
]
BLOCKS = [(12, None), (48, 12), (36, 24)]  # frames of a block and of a piece
# Each two of convolutions, options and blocks meet.
CASES = [
    (convs, options, *BLOCKS[(row + column) % len(BLOCKS)])
    for row, convs in enumerate(CONVS)
    for column, options in enumerate(OPTIONS)
]


@pytest.mark.parametrize(("convs", "options", "block_frames", "piece_frames"), CASES)
def test_streams_that_come_and_go_get_the_logits_of_their_whole(
    convs: str, options: dict[str, object], block_frames: int, piece_frames: int | None
) -> None:
    model = make(convs, **options)
    network = BlockNetwork(model, block_frames, torch.float64, piece_frames)
    draw = torch.Generator().manual_seed(1)
    sources = [
        torch.randn(BINS, frames, generator=draw, dtype=torch.float64)
        for frames in (1, 11, 12, 13, 100, 37, 24, 155, 6)
    ]
    state = network.new_state(4)
    for part in state.by_slot():
        part.fill_(torch.nan)  # as of an earlier stream whose states overflowed
    for source, logits in zip(sources, run_all(network, state, sources, seed=3), strict=True):
        expected = whole(model, source)
        assert logits.shape == expected.shape
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-11 * float(expected.abs().max()))


class Plain:
    """`StreamConvolution` of any type."""

    def __init__(self, weight: Tensor, stride: tuple[int, ...]) -> None:
        self.weight, self.stride = weight, stride

    def __call__(self, x: ConvInput, table: Tensor, slots: Tensor, needed: int) -> Tensor:
        images = join(x, table, slots, needed).permute(0, 3, 1, 2)
        return functional.conv2d(images, self.weight, None, self.stride, (self.weight.shape[2] // 2, 0)).permute(
            0, 2, 3, 1
        )


@pytest.mark.parametrize("kernels", [(11, 7, 5, 3), (11, 5), (7,)])
@pytest.mark.parametrize("convs", ["two", "narrow", "causal"])
def test_convolutions_of_few_channels_are_given_more(
    convs: str, kernels: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def why_not(weight: Tensor, stride: tuple[int, ...]) -> str | None:
        good = weight.shape[0] == 32 and weight.shape[1] in (1, 32) and weight.shape[3] in kernels
        return None if good else "refused"

    monkeypatch.setattr(network, "why_not_on_streams", why_not)
    monkeypatch.setattr(network, "StreamConvolution", Plain)
    test_streams_that_come_and_go_get_the_logits_of_their_whole(convs, {}, 12, None)
    levels = BlockNetwork(make(convs), 12, torch.float64).convs
    first = isinstance(levels[0].conv, KernelConv)  # features have one channel; a library takes what is not 32
    expected = [conv.kernel[1] in kernels and (first or not at) for at, conv in enumerate(CONVS[convs])]
    assert [isinstance(level.conv, KernelConv) for level in levels] == expected


@pytest.mark.parametrize("convs", ["one", "two", "narrow", "causal"])
def test_a_convolution_by_one_product_is_the_same(convs: str) -> None:
    x = torch.randn(3, BINS, 40, 1, dtype=torch.float64)
    for layer in make(convs).folded().convs:
        library, product = (LibraryConv(layer, torch.float64, frames)(x) for frames in (0, 3 * 40))
        torch.testing.assert_close(product, library, rtol=0, atol=1e-12)
        x = library


@pytest.mark.parametrize("stride", [(1, 2), (1, 4), (2, 2)])
def test_a_convolution_of_one_channel_writes_all_outputs_of_a_single_frame(stride: tuple[int, int]) -> None:
    x, weight, window = torch.randn(3, 20, 11, 1), torch.randn(4, 1, 9, 11), TimeWindow(11, 5, stride[1], 0)
    single, double = (
        LibraryConv(ConvWeights(weight.to(dtype), torch.zeros(4, dtype=dtype), stride, 1e9, 20, window), dtype)
        for dtype in (torch.float32, torch.float64)
    )
    torch.testing.assert_close(single(x).double(), double(x.double()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [1, 3, 8, 11])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_a_window_carries_exactly_the_frames_that_its_outputs_need(length: int, stride: int) -> None:
    for past in range(length):
        for delay_in in range(7):
            window = TimeWindow(length, past, stride, delay_in)
            # Block k brings input frames k T - delay_in .. (k + 1) T - delay_in - 1, T = stride: one output frame.
            first_input = -delay_in - window.cached
            assert first_input == -window.delay * stride - past  # where the window of output frame -delay begins
            assert length - stride <= window.cached < length or stride > length


@pytest.mark.parametrize("convs", CONVS)
@pytest.mark.parametrize("row_convs", [0, 3])
def test_logits_are_as_late_as_the_lookahead_says(convs: str, row_convs: int) -> None:
    model = make(convs, row_convs=row_convs)
    needed = round(model.lookahead_ms / 10) + 1  # feature frames before output frame 0 is known
    assert model.folded().delay == -(-needed // model.time_stride) - 1


def test_what_is_made_of_weights_keeps_no_graph_for_gradients() -> None:
    model = make()
    assert all(parameter.requires_grad for parameter in model.parameters())
    network = BlockNetwork(model, 12, torch.float64)
    owners = [level.conv for level in network.convs] + [layer for module in network.modules for layer in module.layers]
    tensors = [value for owner in owners for value in vars(owner).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) > 2 and not any(tensor.requires_grad for tensor in tensors)


def test_a_model_that_cannot_stream_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.bidirectional=true cannot stream"):
        BlockNetwork(make(bidirectional=True, row_convs=0), 12, torch.float64)
    with pytest.raises(ValueError, match="stride, 2"):
        BlockNetwork(make(), 13, torch.float64)


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize(
    ("depth", "batch", "layers"),
    [
        (4, 1, {"hidden": 1152}),
        (9, 3, {"hidden": 1152}),
        (3, 16, {"hidden": 1152}),
        (9, 1, {"hidden": 512, "cell": "lstm"}),
        (4, 16, {"hidden": 512, "cell": "lstm"}),
    ],
)
def test_layers_side_by_side_give_the_bits_of_one_after_the_other(
    depth: int, batch: int, layers: dict[str, object]
) -> None:
    model = make("none", depth=depth, skip=3, row_convs=3, **layers).float().cuda()
    network = BlockNetwork(model, 85, torch.bfloat16, 20)  # the last piece is shorter
    assert network.parallel_layers > 1
    draw = torch.Generator("cuda").manual_seed(2)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, device="cuda", dtype=torch.bfloat16)

    x, start = drawn(85, batch, BINS), network.new_state(batch + 2)
    start = StreamState([], *(0.1 * drawn(*table.shape).to(table.dtype) for table in start.tables()))
    slots = torch.randperm(batch + 2, device="cuda", generator=draw)[:batch]
    blocks = torch.arange(batch, device="cuda") % 3
    ends = 85 * blocks + torch.randint(0, 200, (batch,), device="cuda")
    for edges in (True, False):
        outputs = []
        for layers_at_once in (1, 7, 3):
            network.parallel_layers = layers_at_once
            state = StreamState([], *(table.clone() for table in start.tables()))

            def run(state: StreamState = state, edges: bool = edges) -> Tensor:
                for table, first in zip(state.tables(), start.tables(), strict=True):
                    table.copy_(first)
                return network.run_layers(x, state, slots, blocks, ends, edges=edges)

            for call in [run] * 3 + [record(run)] * 6:
                outputs.append([part.clone() for part in (call(), *state.tables())])
        for again in outputs[1:]:
            assert all(torch.equal(ours, first) for ours, first in zip(again, outputs[0], strict=True))
        assert bool(outputs[0][0].isfinite().all())


def record(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return GraphRecorder().record(call)


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("streams", [1, 3])
def test_kernels_that_start_early_give_the_bits_of_those_that_do_not(
    streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make("one", hidden=1152, depth=8, skip=4, row_convs=10).float().cuda()
    network = BlockNetwork(model, 20, torch.bfloat16)
    draw = torch.Generator("cuda").manual_seed(2)
    inputs = [torch.randn(streams, BINS, 20, generator=draw, device="cuda") for _ in range(12)]
    slots = torch.arange(streams, device="cuda")
    features, blocks, ends = inputs[0].clone(), torch.zeros_like(slots), torch.full_like(slots, UNBOUNDED)
    state = network.new_state(streams)

    def outputs_of(run: Callable[[], Tensor]) -> list[Tensor]:
        state.hidden.zero_()
        state.rows.zero_()
        outputs = []
        for block, values in enumerate(inputs):
            features.copy_(values)
            blocks.fill_(block)
            outputs.append(run().clone())
        return outputs

    def eager() -> Tensor:
        return network.run(features, state, slots, blocks, ends, edges=True)

    config = runtime.config
    with monkeypatch.context() as patched:
        patched.setattr(runtime, "config", lambda *given: config(*given[:5], False, given[6]))
        expected = outputs_of(eager)
    found, replay = outputs_of(eager), record(eager)
    for again in (found, *(outputs_of(replay) for _ in range(5))):
        for ours, plain in zip(again, expected, strict=True):
            assert torch.equal(ours, plain)
    assert bool(torch.stack(expected).isfinite().all())


def stream_logits(model: AcousticModel, features: Tensor, block_frames: int, piece_frames: int | None = None) -> Tensor:
    """Logits of streams (B, F, T) that share all batches, in bfloat16."""
    network = BlockNetwork(model, block_frames, torch.bfloat16, piece_frames)
    state, slots = network.new_state(len(features)), torch.arange(len(features), device=features.device)
    outputs = [
        network.run(block, state, slots, torch.full_like(slots, k), torch.full_like(slots, UNBOUNDED), edges=True)
        for k, block in enumerate(features.split(block_frames, 2))
    ]
    return torch.cat(outputs)[network.delay :]


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize(
    ("hidden", "skip_first", "kernels", "stride", "channels"),
    [
        (512, "projection", (41, 21), 1, (32, 32)),
        (1152, "none", (41, 21), 1, (32, 32)),
        (1152, "none", (21, 11), 2, (32, 32)),
        (320, "none", (21, 11), 2, (8, 16)),
    ],
)
@pytest.mark.parametrize("norm", ["batch", "rms"])
def test_on_a_gpu_bits_depend_neither_on_the_batch_nor_on_the_block(
    hidden: int, skip_first: str, kernels: tuple[int, int], stride: int, channels: tuple[int, int], norm: str
) -> None:
    torch.manual_seed(1)
    convs = [
        ConvConfig(kernel=[kernels[0], 11], stride=[2, 2], channels=channels[0]),
        ConvConfig(kernel=[kernels[1], 11], stride=[2, stride], channels=channels[1]),
    ]
    config = ModelConfig(convs=convs, hidden=hidden, depth=4, skip=2, row_convs=2, skip_first=skip_first, norm=norm)
    model = AcousticModel(config, 161, LABELS).cuda().eval()
    features = torch.randn(130, 161, 700, device="cuda")
    alone = stream_logits(model, features[:1], 20)
    for batch in (3, 16, 64, 130):
        assert torch.equal(stream_logits(model, features[:batch], 20)[:, :1], alone)
    assert torch.equal(stream_logits(model, features[:1], 700, 100), alone)
