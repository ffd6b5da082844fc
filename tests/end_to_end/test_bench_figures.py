"""What the benchmarks compute from their measurements."""

from __future__ import annotations

import asyncio
import json
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dispatch import read_result
from support.paths import ROOT

from ds2.distributed.communicator import Communicator


def test_efficiency_is_relative_to_the_fewest_ranks_of_the_same_batch() -> None:
    from benchmarks.scaling import add_efficiency

    shared: dict[str, Any] = {"backend": "auto", "overlap": True}
    rows = [
        shared | {"fixed": "per_rank", "ranks": 1, "batch": 4, "audio_s_per_s": 100.0},
        shared | {"fixed": "per_rank", "ranks": 1, "batch": 8, "audio_s_per_s": 150.0},
        shared | {"fixed": "per_rank", "ranks": 2, "batch": 8, "audio_s_per_s": 180.0},
        shared | {"fixed": "global", "ranks": 1, "batch": 8, "audio_s_per_s": 200.0},
        shared | {"fixed": "global", "ranks": 4, "batch": 8, "audio_s_per_s": 400.0},
    ]
    add_efficiency(rows)
    assert [row["efficiency"] for row in rows] == pytest.approx([1.0, 1.0, 0.9, 1.0, 0.5])


def test_rows_of_the_scaling_benchmark_count_the_audio_of_their_steps(tmp_path: Path) -> None:
    from benchmarks import scaling

    small = ["device=cpu", "model.hidden=8", "model.depth=2"]
    options = Namespace(duration=0.5, model="rnn_8", warmup=1, steps=2, overrides=small)
    row = scaling.measure(Communicator(torch.device("cpu")), options, tmp_path, 2, True, "local", "gemm")
    assert row["audio_s_per_s"] == pytest.approx(2 * 0.5 / (1e-3 * row["step_ms"]))
    assert (row["ranks"], row["batch"], row["backend"]) == (1, 2, "gemm")


def test_every_stream_has_a_block_in_every_round_of_the_streaming_benchmark() -> None:
    import torch
    from benchmarks.streaming import block_ms, pipeline_of

    pipeline = pipeline_of(["model=rnn_small", "model.hidden=8"], torch.device("cpu"), "fp32")
    block_frames = 2 * pipeline.model.time_stride

    class Counted:
        def __init__(self) -> None:
            self.runner, self.steps = pipeline.block_runner(block_frames), list[tuple[int, int]]()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.runner, name)

        def step(self, slots: list[int], blocks: list[Any]) -> Any:
            self.steps.append((len(set(slots)), len(blocks)))
            return self.runner.step(slots, blocks)

    runner = Counted()
    median, p98, accept = block_ms(runner, 3, block_frames, rounds=4)  # type: ignore[arg-type]
    assert runner.steps == [(3, 3)] * (8 + 4)
    assert 0 < median <= p98 and accept > 0


def test_clients_of_the_serving_benchmark_send_their_files_in_turn_and_time_every_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from benchmarks import serving
    from websockets.asyncio.server import ServerConnection, serve

    audio = [np.arange(first, first + 4000, dtype="<i2").tobytes() for first in (0, 10_000)]
    received = list[bytes]()
    answer_s = 0.05

    async def answer(socket: ServerConnection) -> None:
        assert json.loads(await socket.recv()) == {"config": {"sample_rate": 16_000}}
        chunks = []
        while not isinstance(message := await socket.recv(), str):
            chunks.append(message)
            await asyncio.sleep(answer_s)
            await socket.send(json.dumps({1: {"text": "a"}, 3: {"text": "b"}}.get(len(chunks), {"partial": "x"})))
        received.append(b"".join(chunks))
        await socket.send('{"text": "c"}')

    monkeypatch.setattr(serving, "CHUNK_S", 0.1)

    async def measured() -> list[serving.Replies]:
        async with serve(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await serving._clients(f"ws://127.0.0.1:{port}/", audio, 3, 0.4, 0.0)

    clients = asyncio.run(measured())
    latencies = [seconds for replies in clients for seconds in replies.latencies]
    assert [replies.number for replies in clients] == [0, 1, 0] and all(
        replies.texts == ["a b c"] for replies in clients
    )
    assert len(latencies) == 3 * 4 and min(latencies) >= answer_s
    samples = [np.frombuffer(sent, "<i2") for sent in received]
    assert sorted(int(own.max()) // 10_000 for own in samples) == [0, 0, 1]
    for own in samples:  # 0.1 s are 1,600 samples: a file goes on behind its end with its beginning
        assert len(own) == 6400 and set((np.diff(own.astype(int)) - 1) % 4000) == {0}


def test_the_serving_benchmark_shows_texts_that_differ_from_those_of_the_same_audio() -> None:
    from benchmarks.serving import Replies, other_texts

    same = [Replies(0, 3, [0.1], [text]) for text in ("a b", "a", "a b")]
    others = [Replies(0, 4, [0.1], ["a"]), Replies(1, 3, [0.1], ["c"]), Replies(0, 3, [0.1, 0.1], ["a b c"])]
    assert (other_texts(same + others), other_texts(others)) == (["a b\na"], [])


def test_the_serving_benchmark_finds_the_worst_minute() -> None:
    from benchmarks.serving import Replies, worst_minute

    late = [0.1] * 300 + [0.5] * 7 + [0.1] * 293  # in the second of two minutes of 300 chunks, 2.3 % of it
    assert worst_minute([Replies(0, 0, late, ["a"])]) == pytest.approx(0.5)
    assert worst_minute([Replies(0, 0, late[:300], ["a"]), Replies(0, 0, [0.1], ["a"])]) == pytest.approx(0.1)


@pytest.mark.slow
def test_the_training_benchmark_counts_audio_of_its_steps(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import training

    sizes = ["--batch", "2", "--duration", "0.5", "--steps", "3", "--warmup", "1", "--device", "cpu"]
    sizes += ["model.hidden=8", "model.depth=2", "--layers", "ours", "torch"]
    assert not training.main([*sizes, "--commit", "abc1234"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["git_commit"] == "abc1234"
    assert [(row["layers"], row["graphs"]) for row in result["rows"]] == [("ours", "auto"), ("torch", "off")]
    for row in result["rows"]:
        assert row["skipped"] == 0 and row["p10_ms"] <= row["step_ms"] <= row["p90_ms"]
        assert row["audio_s_per_s"] == pytest.approx(2 * 0.5 / (1e-3 * row["step_ms"]))


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_the_same_stack_of_torch_s_layers_computes_the_same(cell: str) -> None:
    from benchmarks.training import TorchLayer, layers_of

    from ds2.config.schema import ModelConfig
    from ds2.model.ragged import Ragged
    from ds2.model.recurrent import GatedRecurrentLayer, RecurrentModule

    config = ModelConfig(cell=cell, hidden=8, backend="gemm")
    ours = RecurrentModule(8, 2, 0, config, residual=True)
    with layers_of("torch"):
        theirs = RecurrentModule(8, 2, 0, config, residual=True)
    assert {type(layer) for layer in ours.recurrent} == {GatedRecurrentLayer}
    assert {type(layer) for layer in theirs.recurrent} == {TorchLayer}
    theirs.load_state_dict(ours.state_dict())
    x, ragged = torch.randn(6, 3, 8), Ragged.of(torch.tensor([6, 4, 1]), 6, torch.device("cpu"))
    x = torch.where(ragged.valid.t()[:, :, None], x, 0.0)
    torch.testing.assert_close(theirs(x, ragged), ours(x, ragged))


def test_steps_of_relu_layers_are_those_of_torch_s_rnn() -> None:
    from benchmarks.training import TorchLayer

    from ds2.config.schema import ModelConfig
    from ds2.model.ragged import Ragged

    layer = TorchLayer(4, ModelConfig(hidden=8, batch_norm=False))
    x, ragged = torch.randn(5, 2, 4), Ragged.of(torch.tensor([5, 2]), 5, torch.device("cpu"))
    own = [layer.cell.get_parameter(name) for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")]
    h, outputs = torch.zeros(2, 8), []
    for frame in x:
        h = torch.relu(frame @ own[0].t() + h @ own[1].t() + own[2] + own[3])
        outputs.append(h)
    expected = torch.stack(outputs)
    expected[2:, 1] = 0
    torch.testing.assert_close(layer(x, ragged), expected)


def test_every_result_names_its_commit() -> None:
    results = [path for folder in ("recipes", "ops/figures") for path in sorted((ROOT / folder).rglob("*.json"))]
    assert len(results) > 80
    for path in results:
        assert re.match(r"[0-9a-f]{7}", read_result(path)["git_commit"]), path
