"""Streams and files on blocks have the words of the whole utterance, whoever shares a batch, on a CPU and a GPU."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.streams import recognise_in_chunks

from ds2.audio.read import read_audio
from ds2.config.schema import DecodeConfig
from ds2.decoding.hypothesis import Hypothesis
from ds2.inference.network import BlockNetwork
from ds2.inference.runner import BlockRunner, file_block_frames
from ds2.model.checkpoint import load_model
from ds2.recognition.recogniser import Recogniser, decode_batch
from ds2.recognition.session import Session, decode_sessions

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BLOCK_FRAMES = 20  # of features, in the default block


CELLS = [(), ("model.cell=lstm",), ("model.cell=gru",), ("model.cell=gru_before",)]


def load(model: Path, device: str, method: str = "greedy", precision: str = "fp32", **options: object) -> Recogniser:
    chosen = torch.device(device)
    recogniser = Recogniser.of(load_model(model, chosen), DecodeConfig(method=method, beam=16), chosen, precision)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    runner = BlockRunner(recogniser.model, recogniser.features, BLOCK_FRAMES, dtype, **options)  # type: ignore[arg-type]
    recogniser.runners[BLOCK_FRAMES] = runner
    return recogniser


def whole(recogniser: Recogniser, samples: torch.Tensor) -> Hypothesis:
    """The utterance through the training network in evaluation."""
    with torch.no_grad():
        features, lengths = recogniser.features(samples[None].to(recogniser.device), torch.tensor([len(samples)]))
        logits, lengths = recogniser.model(features, lengths)
    return decode_batch(recogniser.decoder, logits, lengths)[0]


def spoken(hypothesis: Hypothesis) -> list[tuple[str, float, float]]:
    return [(word.text, word.start_s, word.end_s) for word in hypothesis.words]


@pytest.mark.parametrize(
    ("device", "method", "overrides"),
    [
        *(("cpu", "greedy", cell) for cell in CELLS),
        ("cpu", "beam", ()),
        pytest.param("cuda", "greedy", (), marks=pytest.mark.gpu),
        pytest.param("cuda", "beam", (), marks=pytest.mark.gpu),
    ],
)
def test_words_are_those_of_the_whole(
    make_model: Callable[..., Path],
    recording: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    method: str,
    overrides: tuple[str, ...],
) -> None:
    # cuDNN's TF32 rounds by the shape of a convolution, and a block has another shape than the whole
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    recogniser, samples = load(make_model(*overrides), device, method), read_audio(recording)
    for length in (len(samples), 30_000, 4000, 3360, 3359, 321, 10):
        expected = whole(recogniser, torch.from_numpy(samples[:length]))
        streamed = [
            recognise_in_chunks(recogniser.session(), samples[:length], random.Random(seed)) for seed in range(2)
        ]
        assert streamed[0] == streamed[1]  # to the bit
        assert spoken(streamed[0]) == spoken(expected)
        assert streamed[0].score == pytest.approx(expected.score, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_samples_lie_where_they_are_read_until_their_step(
    make_model: Callable[..., Path], recording: Path, device: str
) -> None:
    recogniser, samples = load(make_model(), device), read_audio(recording)
    session, step_samples = recogniser.session(), BLOCK_FRAMES * recogniser.features.step_samples
    inputs = recogniser.runners[BLOCK_FRAMES].slots

    def rows() -> list[int]:
        ids = [id(row) for row in inputs.rows]
        return [ids.index(id(block)) - 2 * session.slot.index if id(block) in ids else -1 for block in session.blocks]

    session.accept_waveform(samples[: 3 * step_samples + recogniser.features.window_samples])
    assert rows() == [0, 1, -1]  # no third row: it is copied at its step
    taken = [block.copy() for block in session.blocks]
    session.decode()
    session.accept_waveform(samples[len(taken[0]) + 2 * step_samples :][:step_samples])
    assert rows()[0] == 1 and (session.blocks[0] == taken[1]).all() and (session.blocks[1] == taken[2]).all()


@pytest.mark.parametrize("device", DEVICES)
def test_more_streams_than_slots_come_and_go(make_model: Callable[..., Path], recording: Path, device: str) -> None:
    recogniser = load(make_model(), device, capacity=2, batch_sizes=(1, 2, 8))
    draw, samples = random.Random(3), read_audio(recording)
    sources = [samples[draw.randrange(20_000) :][: draw.randrange(2000, 28_000)] for _ in range(24)]
    alone = [spoken(recognise_in_chunks(recogniser.session(), source, draw)) for source in sources]
    active, at, waiting = dict[int, Session](), [0] * len(sources), list(range(len(sources)))
    hypotheses = dict[int, Hypothesis]()
    while waiting or active:
        for _ in range(draw.randint(0, 3)):
            if waiting:
                active[waiting.pop()] = recogniser.session()
        for index in active:
            end = at[index] + draw.randrange(8000)
            active[index].accept_waveform(sources[index][at[index] : end])
            at[index] = end
        decode_sessions(list(active.values()))
        for index in [index for index in active if at[index] >= len(sources[index])]:
            hypotheses[index] = active.pop(index).finish()
    assert [spoken(hypotheses[index]) for index in range(len(sources))] == alone
    gc.collect()
    runner = recogniser.runners[BLOCK_FRAMES]
    assert len(set(runner.slots.free)) == len(runner.slots.free) == runner.slots.used - 1 <= 24
    assert max(runner.batches) <= 8


def test_streams_leave_nothing_to_the_garbage_collector(make_model: Callable[..., Path], recording: Path) -> None:
    """A collection of the objects of thousands of streams stops all of them for a tenth of a second."""
    recogniser, draw, samples = load(make_model(), "cpu"), random.Random(3), read_audio(recording)
    recognise_in_chunks(recogniser.session(), samples, draw)
    gc.collect()
    gc.disable()
    try:
        recognise_in_chunks(recogniser.session(), samples, draw)
        assert gc.collect() == 0
    finally:
        gc.enable()


@pytest.mark.gpu
def test_prepared_graphs_are_not_recorded_again(make_model: Callable[..., Path], recording: Path) -> None:
    recogniser = load(make_model(), "cuda")
    runner = recogniser.runners[BLOCK_FRAMES]
    expected = recognise_in_chunks(recogniser.session(), read_audio(recording), random.Random(0))
    runner.prepare(100)
    graphs = [batch.run for batch in runner.batches.values()]
    assert sorted(runner.batches) == [1, 2, 4, 8, 16, 32, 64, 128] and runner.slots.state.capacity >= 101
    assert spoken(recognise_in_chunks(recogniser.session(), read_audio(recording), random.Random(1))) == spoken(
        expected
    )
    assert [batch.run for batch in runner.batches.values()] == graphs


@pytest.mark.gpu
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("model.cell=lstm", "model.hidden=64"),
        ("model.cell=lstm", "model.hidden=512"),
        ("model.cell=gru", "model.hidden=64"),
        ("model.cell=gru", "model.hidden=512"),
    ],
)
def test_bf16_blocks_are_as_near_as_the_training_network(
    make_model: Callable[..., Path], recording: Path, overrides: tuple[str, ...]
) -> None:
    model, samples = make_model(*overrides), read_audio(recording)
    recogniser = load(model, "cuda", precision="bf16")
    features = recogniser.block_features([samples])
    with torch.no_grad():
        exact = load_model(model, torch.device("cuda")).model.double()(
            features.double(), torch.tensor([features.shape[2]])
        )
        with recogniser.autocast():
            stock = recogniser.model(features, torch.tensor([features.shape[2]]))[0]
    network = BlockNetwork(recogniser.model, features.shape[2] // 2 * 2, torch.bfloat16)
    numbers = torch.zeros(1, dtype=torch.int64, device="cuda")
    first = network.run(
        features[:, :, : network.block_frames],
        network.new_state(1),
        numbers,
        numbers,
        numbers + network.block_frames,
        edges=True,
    )
    expected = exact[0][: network.frames - network.delay]
    ours = first[network.delay :]
    errors = [float((y.double() - expected).norm() / expected.norm()) for y in (stock[: len(expected)], ours)]
    assert errors[1] <= 2 * errors[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("overrides", CELLS)
def test_files_have_the_words_of_streams(
    make_model: Callable[..., Path], recording: Path, device: str, overrides: tuple[str, ...], precision: str
) -> None:
    recogniser = load(make_model(*overrides, "model.hidden=64"), device, precision=precision)
    file = recogniser.transcribe(recording).hypothesis
    assert sorted(recogniser.runners) == [BLOCK_FRAMES, file_block_frames(recogniser.model, 0.01)]
    assert spoken(recognise_in_chunks(recogniser.session(), read_audio(recording), random.Random(1))) == spoken(file)


@pytest.mark.gpu
@pytest.mark.hopper
def test_files_whose_layers_run_side_by_side_have_the_same_words(
    make_model: Callable[..., Path], recording: Path
) -> None:
    model, hypotheses = make_model(), []
    for layers in (1, 7):
        recogniser = load(model, "cuda", precision="bf16")
        runner = recogniser.block_runner(file_block_frames(recogniser.model, 0.01))
        runner.network.parallel_layers = layers
        hypotheses.append(recogniser.transcribe(recording).hypothesis)
        assert runner.batches  # these ran
    assert hypotheses[0] == hypotheses[1]


class FailsWithTwo:
    """A network that has run, and changed its state, when it runs out of memory with two streams."""

    def __init__(self, network: BlockNetwork) -> None:
        self.network, self.failures = network, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.network, name)

    def run(self, features: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        logits = self.network.run(features, *arguments, **options)
        if len(features) == 2:
            self.failures += 1
            raise MemoryError
        return logits


def test_tables_that_cannot_grow_stay_as_they_are(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = load(make_model(), "cpu", capacity=2).runners[BLOCK_FRAMES].slots

    def fail(*_: object) -> None:
        raise MemoryError

    before = slots.state, slots.rows, slots.device_rows
    monkeypatch.setattr("ds2.inference.runner._on_device", fail)
    with pytest.raises(MemoryError):
        slots.grow(3)
    assert all(now is then for now, then in zip((slots.state, slots.rows, slots.device_rows), before, strict=True))


@pytest.mark.parametrize("cell", CELLS)
def test_a_batch_that_fails_within_the_network_leaves_its_streams_where_they_were(
    cell: tuple[str, ...], make_model: Callable[..., Path], recording: Path
) -> None:
    recogniser = load(make_model(*cell), "cpu")
    runner = recogniser.runners[BLOCK_FRAMES]
    samples = read_audio(recording)
    alone = recognise_in_chunks(recogniser.session(), samples, random.Random(3))
    failing = FailsWithTwo(runner.network)
    runner.network = failing  # type: ignore[assignment]
    sessions = [recogniser.session() for _ in range(2)]
    for session in sessions:
        session.accept_waveform(samples)
        session.input_finished()
    while any(session.is_ready() for session in sessions):
        decode_sessions(sessions)
    assert failing.failures > 1
    assert [spoken(session.result()) for session in sessions] == [spoken(alone)] * 2
