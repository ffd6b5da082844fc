"""Blocks of one shape for any sessions: the words of the model as it is, whoever shares a batch, on a CPU and a GPU."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.streams import hear

from ds2.audio.read import read_audio
from ds2.config.schema import DecodeConfig
from ds2.decoding.hypothesis import Hypothesis
from ds2.model.blocks import BlockModel
from ds2.model.checkpoint import load_model
from ds2.recognition.graphed import GraphedBlocks
from ds2.recognition.hearing import Chunks
from ds2.recognition.recogniser import Recogniser
from ds2.recognition.session import Session, decode_sessions

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BLOCK_FRAMES = 20  # of features, in the default block


def load(model: Path, device: str, way: type, method: str = "greedy", precision: str = "fp32") -> Recogniser:
    chosen = torch.device(device)
    found = Recogniser.of(load_model(model, chosen), DecodeConfig(method=method, beam=16), chosen, precision)
    found.hearings[BLOCK_FRAMES] = way(found, BLOCK_FRAMES)
    return found


def spoken(hypothesis: Hypothesis) -> list[tuple[str, float, float]]:
    return [(word.text, word.start_s, word.end_s) for word in hypothesis.words]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", ["greedy", "beam"])
def test_words_are_those_of_the_model_as_it_is(
    make_model: Callable[..., Path], recording: Path, device: str, method: str
) -> None:
    model, samples = make_model(), read_audio(recording)
    plain, blocks = (load(model, device, way, method) for way in (Chunks, GraphedBlocks))
    for length in (len(samples), 30_000, 4000, 3360, 3359, 321, 10):
        wanted = hear(plain.session(), samples[:length], random.Random(1))
        found = [hear(blocks.session(), samples[:length], random.Random(seed)) for seed in range(2)]
        assert found[0] == found[1]  # to the bit
        assert spoken(found[0]) == spoken(wanted)
        assert found[0].score == pytest.approx(wanted.score, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_samples_lie_where_they_are_read_until_they_are_heard(
    make_model: Callable[..., Path], recording: Path, device: str
) -> None:
    recogniser, samples = load(make_model(), device, GraphedBlocks), read_audio(recording)
    session, step_samples = recogniser.session(), BLOCK_FRAMES * recogniser.features.step_samples
    hearing = recogniser.hearings[BLOCK_FRAMES]

    def rows() -> list[int]:
        kept = [id(row) for row in hearing.rooms.rows]
        return [
            kept.index(id(block)) - 2 * session.stream.place if id(block) in kept else -1 for block in session.blocks
        ]

    session.accept_waveform(samples[: 3 * step_samples + recogniser.features.window_samples])
    assert rows() == [0, 1, -1]  # no third row: it is copied once it is heard
    taken = [block.copy() for block in session.blocks]
    session.decode()
    session.accept_waveform(samples[len(taken[0]) + 2 * step_samples :][:step_samples])
    assert rows()[0] == 1 and (session.blocks[0] == taken[1]).all() and (session.blocks[1] == taken[2]).all()


@pytest.mark.parametrize("device", DEVICES)
def test_more_streams_than_places_come_and_go(
    make_model: Callable[..., Path], recording: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ds2.recognition.graphed._PLACES", 2)
    monkeypatch.setattr("ds2.recognition.graphed.SIZES", (1, 2, 8))
    recogniser, draw, samples = load(make_model(), device, GraphedBlocks), random.Random(3), read_audio(recording)
    sources = [samples[draw.randrange(20_000) :][: draw.randrange(2000, 28_000)] for _ in range(24)]
    alone = [spoken(hear(recogniser.session(), source, draw)) for source in sources]
    here, at, waiting, found = (
        dict[int, Session](),
        [0] * len(sources),
        list(range(len(sources))),
        dict[int, Hypothesis](),
    )
    while waiting or here:
        for _ in range(draw.randint(0, 3)):
            if waiting:
                here[waiting.pop()] = recogniser.session()
        for index in here:
            end = at[index] + draw.randrange(8000)
            here[index].accept_waveform(sources[index][at[index] : end])
            at[index] = end
        decode_sessions(list(here.values()))
        for index in [index for index in here if at[index] >= len(sources[index])]:
            found[index] = here.pop(index).finish()
    assert [spoken(found[index]) for index in range(len(sources))] == alone
    gc.collect()
    hearing = recogniser.hearings[BLOCK_FRAMES]
    assert len(set(hearing.free)) == len(hearing.free) == hearing.places - 1 <= 24
    assert device != "cpu" or not hearing.batches  # of as many sizes as there were


@pytest.mark.gpu
def test_what_was_prepared_is_not_recorded_again(make_model: Callable[..., Path], recording: Path) -> None:
    recogniser = load(make_model(), "cuda", GraphedBlocks)
    hearing = recogniser.hearings[BLOCK_FRAMES]
    wanted = hear(recogniser.session(), read_audio(recording), random.Random(0))
    hearing.prepare(100)
    graphs = [batch.run for batch in hearing.batches.values()]
    assert sorted(hearing.batches) == [1, 2, 4, 8, 16, 32, 64, 128] and hearing.carried.states.shape[1] >= 101
    assert spoken(hear(recogniser.session(), read_audio(recording), random.Random(1))) == spoken(wanted)
    assert [batch.run for batch in hearing.batches.values()] == graphs


@pytest.mark.gpu
@pytest.mark.parametrize(
    "overrides", [(), ("model.cell=lstm", "model.hidden=64"), ("model.cell=lstm", "model.hidden=512")]
)
def test_bf16_blocks_are_as_near_as_the_model_as_it_is(
    make_model: Callable[..., Path], recording: Path, overrides: tuple[str, ...]
) -> None:
    model, samples = make_model(*overrides), read_audio(recording)
    parts = load(model, "cuda", GraphedBlocks, precision="bf16")
    features = parts.block_features([samples])
    with torch.no_grad():
        exact = load_model(model, torch.device("cuda")).model.double()(
            features.double(), torch.tensor([features.shape[2]])
        )
        with parts.autocast():
            stock = parts.model(features, torch.tensor([features.shape[2]]))[0]
    block = BlockModel(parts.model, features.shape[2] // 2 * 2, torch.bfloat16)
    numbers = torch.zeros(1, dtype=torch.int64, device="cuda")
    carried = block.start(1)
    first = block.run(
        features[:, :, : block.block_frames], carried, numbers, numbers, numbers + block.block_frames, edges=True
    )
    wanted = exact[0][: block.frames - block.delay]
    errors = [float((y.double() - wanted).norm() / wanted.norm()) for y in (stock[: len(wanted)], first[block.delay :])]
    assert errors[1] <= 2 * errors[0]


@pytest.mark.parametrize(
    ("device", "overrides"),
    [
        ("cpu", ()),  # torch's LSTM is heard as it comes there
        pytest.param("cuda", (), marks=pytest.mark.gpu),
        pytest.param("cuda", ("model.cell=lstm", "model.hidden=64"), marks=pytest.mark.gpu),
    ],
)
def test_files_are_heard_as_streams_are(
    make_model: Callable[..., Path], recording: Path, device: str, overrides: tuple[str, ...]
) -> None:
    recogniser = load(make_model(*overrides), device, GraphedBlocks, precision="bf16")
    whole = recogniser.transcribe(recording).hypothesis
    found = hear(recogniser.session(), read_audio(recording), random.Random(1))
    assert isinstance(recogniser.hearings[GraphedBlocks.file_frames(recogniser) or 0], GraphedBlocks)
    assert spoken(found) == spoken(whole)


@pytest.mark.gpu
def test_files_whose_layers_run_beside_each_other_have_the_same_words(
    make_model: Callable[..., Path], recording: Path
) -> None:
    model, found = make_model(), []
    for lanes in (1, 7):
        recogniser = load(model, "cuda", GraphedBlocks, precision="bf16")
        frames = GraphedBlocks.file_frames(recogniser)
        recogniser.hearings[frames] = blocks = GraphedBlocks(recogniser, frames)
        blocks.model.lanes = lanes
        found.append(recogniser.transcribe(recording).hypothesis)
        assert blocks.batches  # it was heard so
    assert found[0] == found[1]
