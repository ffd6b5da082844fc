"""Blocks of one shape: what they say of streams is what the model says of the whole, whoever shares their batch."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from ds2_ops.convolution import streams
from ds2_ops.convolution.carried import Given, joined
from ds2_ops.jit import runtime
from torch import Tensor
from torch.nn import functional

from ds2.config.schema import ConfigError, ConvConfig, ModelConfig
from ds2.model import folded
from ds2.model.acoustic import AcousticModel
from ds2.model.blocks import FOR_EVER, BlockModel, Carried
from ds2.model.folded import FoldedConv, StreamedConv
from ds2.model.norm import SequenceBatchNorm

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


def hear_all(heard: BlockModel, carried: Carried, sources: list[Tensor], seed: int) -> list[Tensor]:
    """Hear sources that join and leave at random, in batches of any of them, at random places."""
    draw = random.Random(seed)
    free = list(range(carried.states.shape[1]))
    draw.shuffle(free)
    waiting, found = list(range(len(sources))), [torch.empty(0, LABELS, dtype=torch.float64) for _ in sources]
    here: dict[int, tuple[int, int]] = {}  # source: place, blocks
    while waiting or here:
        if waiting and free and draw.random() < 0.7:
            here[waiting.pop(0)] = (free.pop(), 0)
        batch = [source for source in here if draw.random() < 0.7]
        if not batch:
            continue
        frames, block_frames = [sources[s].shape[1] for s in batch], heard.block_frames
        blocks = [here[s][1] for s in batch]
        ends = [
            n if n <= (k + 1) * block_frames or draw.random() < 0.2 else FOR_EVER
            for n, k in zip(frames, blocks, strict=True)
        ]
        features = torch.zeros(len(batch), BINS, block_frames, dtype=torch.float64)
        for row, source in enumerate(batch):
            piece = sources[source][:, blocks[row] * block_frames : (blocks[row] + 1) * block_frames]
            features[row, :, : piece.shape[1]] = piece
        spans = [heard.given(k, e) for k, e in zip(blocks, ends, strict=True)]
        amid = all(k * heard.frames >= heard.delay for k in blocks) and set(ends) == {FOR_EVER}
        places = torch.tensor([here[s][0] for s in batch])
        logits = heard.run(
            features, carried, places, torch.tensor(blocks), torch.tensor(ends), edges=not amid or draw.random() < 0.5
        )
        for row, source in enumerate(batch):
            first, last = spans[row]
            found[source] = torch.cat([found[source], logits[first:last, row]])
            here[source] = (here[source][0], blocks[row] + 1)
            if len(found[source]) == heard.output_frames(sources[source].shape[1]):
                free.append(here.pop(source)[0])
    return found


@pytest.mark.parametrize("convs", CONVS)
@pytest.mark.parametrize(
    "options", [{}, {"skip": 0, "batch_norm": False}, {"skip_first": "projection", "row_convs": 1}, {"cell": "lstm"}]
)
@pytest.mark.parametrize(("block_frames", "piece_frames"), [(12, None), (48, 12), (36, 24)])
def test_streams_that_come_and_go_get_the_logits_of_their_whole(
    convs: str, options: dict[str, object], block_frames: int, piece_frames: int | None
) -> None:
    model = make(convs, **options)
    heard = BlockModel(model, block_frames, torch.float64, piece_frames)
    draw = torch.Generator().manual_seed(1)
    sources = [
        torch.randn(BINS, frames, generator=draw, dtype=torch.float64)
        for frames in (1, 11, 12, 13, 100, 37, 24, 155, 6)
    ]
    found = hear_all(heard, heard.start(4), sources, seed=3)
    for source, logits in zip(sources, found, strict=True):
        wanted = whole(model, source)
        assert logits.shape == wanted.shape
        torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-11 * float(wanted.abs().max()))


class Plain:
    """`StreamConvolution` of any type."""

    def __init__(self, weight: Tensor, stride: tuple[int, ...]) -> None:
        self.weight, self.stride = weight, stride

    def __call__(self, given: Given, table: Tensor, places: Tensor, needed: int) -> Tensor:
        images = joined(given, table, places, needed).permute(0, 3, 1, 2)
        return functional.conv2d(images, self.weight, None, self.stride, (self.weight.shape[2] // 2, 0)).permute(
            0, 2, 3, 1
        )


@pytest.mark.parametrize("kernels", [(11, 7, 5, 3), (11, 5), (7,)])
@pytest.mark.parametrize("convs", ["two", "narrow"])
def test_convolutions_of_few_channels_are_given_more(
    convs: str, kernels: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def why_not(weight: Tensor, stride: tuple[int, ...]) -> str | None:
        good = weight.shape[0] == 32 and weight.shape[1] in (1, 32) and weight.shape[3] in kernels
        return None if good else "refused"

    monkeypatch.setattr(streams, "why_not", why_not)
    monkeypatch.setattr(folded, "StreamConvolution", Plain)
    test_streams_that_come_and_go_get_the_logits_of_their_whole(convs, {}, 12, None)
    found = BlockModel(make(convs), 12, torch.float64).convs
    first = isinstance(found[0].conv, StreamedConv)  # features have one channel, what else is no 32 a library takes
    wanted = [conv.kernel[1] in kernels and (first or not at) for at, conv in enumerate(CONVS[convs])]
    assert [isinstance(level.conv, StreamedConv) for level in found] == wanted


@pytest.mark.parametrize("convs", ["one", "two", "narrow"])
def test_a_convolution_by_one_product_is_the_same(convs: str) -> None:
    model, features = make(convs), torch.randn(3, BINS, 40, dtype=torch.float64)
    bins = BINS
    x = features[..., None]
    for conv in model.convs:
        wanted, found = (FoldedConv(conv, bins, torch.float64, frames)(x) for frames in (0, 3 * 40))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
        x, bins = wanted, conv.output_bins(bins)


def test_what_is_made_of_weights_keeps_no_graph_for_gradients() -> None:
    model = make()
    assert all(parameter.requires_grad for parameter in model.parameters())
    heard = BlockModel(model, 12, torch.float64)
    kept = [*heard._classifier, *(value for level in heard.convs for value in vars(level.conv).values())]
    tensors = [value for value in kept if isinstance(value, torch.Tensor)]
    assert len(tensors) > 2 and not any(tensor.requires_grad for tensor in tensors)


def test_what_cannot_be_heard_in_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="bidirectional"):
        BlockModel(make(bidirectional=True, row_convs=0), 12, torch.float64)
    with pytest.raises(ConfigError, match="cell=gru"):
        BlockModel(make(cell="gru"), 12, torch.float64)
    with pytest.raises(ValueError, match="stride, 2"):
        BlockModel(make(), 13, torch.float64)


@pytest.mark.gpu
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
def test_layers_beside_each_other_give_the_bits_of_one_after_the_other(
    depth: int, batch: int, layers: dict[str, object]
) -> None:
    model = make("none", depth=depth, skip=3, row_convs=3, **layers).float().cuda()
    heard = BlockModel(model, 85, torch.bfloat16, 20)  # the last piece is shorter
    assert heard.waves
    draw = torch.Generator("cuda").manual_seed(2)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, device="cuda", dtype=torch.bfloat16)

    x, start = drawn(85, batch, BINS), heard.start(batch + 2)
    tables = (start.states, start.cells, start.rows)
    start.states, start.cells, start.rows = (0.1 * drawn(*table.shape).to(table.dtype) for table in tables)
    places = torch.randperm(batch + 2, device="cuda", generator=draw)[:batch]
    blocks = torch.arange(batch, device="cuda") % 3
    ends = 85 * blocks + torch.randint(0, 200, (batch,), device="cuda")
    for edges in (True, False):
        found = []
        for lanes in (1, 7, 3):
            heard.lanes = lanes
            carried = Carried([], start.states.clone(), start.cells.clone(), start.rows.clone())

            def hear(carried: Carried = carried, edges: bool = edges) -> Tensor:
                for name in ("states", "cells", "rows"):
                    getattr(carried, name).copy_(getattr(start, name))
                return heard.layers(x, carried, places, blocks, ends, edges=edges)

            for call in [hear] * 3 + [record(hear)] * 6:
                found.append([part.clone() for part in (call(), carried.states, carried.cells, carried.rows)])
        for again in found[1:]:
            assert all(torch.equal(ours, first) for ours, first in zip(again, found[0], strict=True))
        assert bool(found[0][0].isfinite().all())


def record(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A graph's replay, which returns what it writes."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = call()

    def replay() -> Tensor:
        graph.replay()
        return made

    return replay


@pytest.mark.gpu
@pytest.mark.parametrize("streams", [1, 3])
def test_kernels_that_start_early_give_the_bits_of_those_that_do_not(
    streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make("one", hidden=1152, depth=8, skip=4, row_convs=10).float().cuda()
    heard = BlockModel(model, 20, torch.bfloat16)
    draw = torch.Generator("cuda").manual_seed(2)
    inputs = [torch.randn(streams, BINS, 20, generator=draw, device="cuda") for _ in range(12)]
    places = torch.arange(streams, device="cuda")
    features, blocks, ends = inputs[0].clone(), torch.zeros_like(places), torch.full_like(places, FOR_EVER)

    def said(run: Callable[[], Tensor]) -> list[Tensor]:
        carried.states.zero_()
        carried.rows.zero_()
        found = []
        for block, given in enumerate(inputs):
            features.copy_(given)
            blocks.fill_(block)
            found.append(run().clone())
        return found

    carried = heard.start(streams)

    def eager() -> Tensor:
        return heard.run(features, carried, places, blocks, ends, edges=True)

    config = runtime.config
    with monkeypatch.context() as patched:
        patched.setattr(runtime, "config", lambda *given: config(*given[:5], False, given[6]))
        wanted = said(eager)
    found, replay = said(eager), record(eager)
    for again in (found, *(said(replay) for _ in range(5))):
        for ours, plain in zip(again, wanted, strict=True):
            assert torch.equal(ours, plain)
    assert bool(torch.stack(wanted).isfinite().all())


def heard_whole(model: AcousticModel, features: Tensor, block_frames: int, piece_frames: int | None = None) -> Tensor:
    """Logits of streams (B, F, T) that share all batches, in bfloat16."""
    heard = BlockModel(model, block_frames, torch.bfloat16, piece_frames)
    carried, places = heard.start(len(features)), torch.arange(len(features), device=features.device)
    found = [
        heard.run(block, carried, places, torch.full_like(places, k), torch.full_like(places, FOR_EVER), edges=True)
        for k, block in enumerate(features.split(block_frames, 2))
    ]
    return torch.cat(found)[heard.delay :]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("hidden", "skip_first", "kernels", "stride", "channels"),
    [
        (512, "projection", (41, 21), 1, (32, 32)),
        (1152, "none", (41, 21), 1, (32, 32)),
        (1152, "none", (21, 11), 2, (32, 32)),
        (320, "none", (21, 11), 2, (8, 16)),
    ],
)
def test_on_a_gpu_bits_depend_neither_on_the_batch_nor_on_the_block(
    hidden: int, skip_first: str, kernels: tuple[int, int], stride: int, channels: tuple[int, int]
) -> None:
    torch.manual_seed(1)
    convs = [
        ConvConfig(kernel=[kernels[0], 11], stride=[2, 2], channels=channels[0]),
        ConvConfig(kernel=[kernels[1], 11], stride=[2, stride], channels=channels[1]),
    ]
    config = ModelConfig(convs=convs, hidden=hidden, depth=4, skip=2, row_convs=2, skip_first=skip_first)
    model = AcousticModel(config, 161, LABELS).cuda().eval()
    features = torch.randn(130, 161, 700, device="cuda")
    alone = heard_whole(model, features[:1], 20)
    for batch in (3, 16, 64, 130):
        assert torch.equal(heard_whole(model, features[:batch], 20)[:, :1], alone)
    assert torch.equal(heard_whole(model, features[:1], 700, 100), alone)
