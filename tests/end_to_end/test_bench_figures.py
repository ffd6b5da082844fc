"""What the benchmarks compute from their measurements: efficiencies, the fit of a link, and predicted steps."""

from __future__ import annotations

import asyncio
import json
import re
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dispatch import read_result
from support.paths import ROOT
from torch.utils.flop_counter import FlopCounterMode

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


def test_operations_of_a_step_are_those_that_torch_counts(tmp_path: Path) -> None:
    from benchmarks import scaling

    size = {"duration": 0.5, "model": "rnn_8", "warmup": 1, "steps": 2}
    small = ["device=cpu", "model.hidden=24", "model.depth=3", "model.row_convs=0"]
    options = Namespace(**size, overrides=small)
    with FlopCounterMode(display=False) as counter:
        row = scaling.measure(Communicator(torch.device("cpu")), options, tmp_path, 2, True, "local", "gemm")
    first = 2 * 41 * 11 * 32 * 81 * 50  # the first convolution: 81 rows of 50 frames; its input needs no gradient
    counted = counter.get_total_flops() / (size["warmup"] + size["steps"]) + first
    assert row["tflop_per_s"] * 1e12 * row["step_ms"] / 1e3 == pytest.approx(counted, rel=0.02)
    assert row["audio_s_per_s"] == pytest.approx(2 * 0.5 / (1e-3 * row["step_ms"]))
    assert (row["ranks"], row["batch"], row["backend"]) == (1, 2, "gemm")


def test_the_fit_of_a_link_recovers_latency_and_bandwidth() -> None:
    pytest.importorskip("mpi4py")
    from benchmarks.collectives import fit

    latency_s, bandwidth, ranks = 20e-6, 5e9, 4
    rows = []
    for kib in (4, 64, 1024):
        load = 2 * (ranks - 1) / ranks * kib * 1024
        seconds = latency_s + load / bandwidth
        rows.append({"us": 1e6 * seconds, "bus_gb_per_s": load / seconds / 1e9})
    assert fit(rows) == pytest.approx((latency_s, bandwidth), rel=1e-6)


def test_a_predicted_step_is_computed_and_summed_in_turn_or_overlapped(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import predict
    from benchmarks.predict import LinkSpeed, MeasuredHost, step_s

    monkeypatch.setattr(predict, "NORMS", 3)
    monkeypatch.setattr(predict, "BUCKET_BYTES", 1e6)
    link = LinkSpeed(latency_s=1e-3, bandwidth=1e9)
    machine = MeasuredHost([1.0, 2.0], [0.1, 0.2], [0.2, 0.4], [0.01, 0.01], 4e6, link, link, ranks_per_host=2)
    alone = step_s(machine, 1, 2, overlap=True, shared=False)
    assert alone == pytest.approx((0.2 + 0.4 + 0.01, 0.0))
    one_sum = 1e-3 + 1e6 / 1e9  # of a bucket over two ranks
    in_turn = step_s(machine, 2, 2, overlap=False, shared=False)
    assert in_turn == pytest.approx((alone[0] + 4 * one_sum, 4 * one_sum))
    overlapped = step_s(machine, 2, 2, overlap=True, shared=False)
    assert overlapped == pytest.approx((alone[0] + one_sum, one_sum))  # only the last bucket is waited for
    shared = step_s(machine, 2, 2, overlap=True, shared=True)
    assert shared[0] == pytest.approx(overlapped[0] + 2 * 3 * 1e-3)  # a sum a norm, forward and backward


def test_the_fitted_contention_and_meeting_are_those_of_the_rows() -> None:
    from benchmarks.predict import LinkSpeed, MeasuredHost, errors, fitted, step_s

    link = LinkSpeed(latency_s=1e-4, bandwidth=1e10)
    machine = MeasuredHost([4.0, 8.0], [0.01, 0.02], [0.02, 0.04], [0.001, 0.001], 1e8, link, link, ranks_per_host=8)
    truth = replace(machine, contention=0.5, meeting_s=1e-3)
    rows = [
        {
            "ranks": ranks, "batch": ranks * batch, "overlap": overlap, "batch_norm": norm,
            "step_ms": 1e3 * step_s(truth, ranks, batch, overlap=overlap, shared=norm == "shared")[0],
        }
        for ranks, batch, overlap, norm in [(2, 4, True, "local"), (2, 8, False, "shared"), (4, 8, True, "shared")]
    ]  # fmt: skip
    assert max(map(abs, errors(truth, rows))) < 1e-9
    assert max(map(abs, errors(machine, rows))) > 0.01
    fit = fitted(machine, rows)
    assert (fit.contention, fit.meeting_s) == (pytest.approx(0.5), pytest.approx(1e-3))


def test_every_stream_has_a_block_in_every_round_of_the_streaming_benchmark() -> None:
    import torch
    from benchmarks.streaming import block_ms, runner_of

    untrained, block_frames = runner_of(["model=rnn_small", "model.hidden=8"], torch.device("cpu"), "fp32")

    class Counted:
        def __init__(self) -> None:
            self.runner, self.steps = untrained, list[tuple[int, int]]()

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


@pytest.mark.parametrize("commit", [{}, {"git_commit": "unknown"}])
@pytest.mark.parametrize("file", ["scaling", "link"])
def test_results_of_an_unknown_commit_predict_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, commit: dict[str, str]
) -> None:
    from benchmarks import predict

    files = {name: ROOT / "recipes" / "figures" / f"{name}_h200.json" for name in ("scaling", "link")}
    content = json.loads(files[file].read_text())
    del content["git_commit"]
    files[file] = tmp_path / "copy.json"
    files[file].write_text(json.dumps(content | commit))
    with pytest.raises(SystemExit) as refused:
        predict.main([*map(str, files.values()), "--way", "NCCL, by hand"])
    assert refused.value.code == 2 and "copy.json does not name the commit" in capsys.readouterr().err


def test_results_that_are_not_there_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import predict

    with pytest.raises(SystemExit):
        predict.main([str(tmp_path / "scaling.json"), str(tmp_path / "link.json")])
    shown = capsys.readouterr().err
    assert "scaling.json'; `bench.py scaling`" in shown and "No such file" in shown
