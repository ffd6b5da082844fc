"""Benchmarks beside the tables of other papers: what they compare and compute, and that a wrong row ends with 1."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dispatch import read_result
from ds2_ops.jit.build import build
from support.paths import ROOT
from torch import Tensor

TINY = ("--device", "cpu", "--dtype", "float32", "--budget", "0.001", "--commit", "abc1234")
SMALL = (*TINY, "--hidden", "8", "--batch", "3", "--frames", "7", "--layers", "3", "--group", "3")


def written(module: str, path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    status = importlib.import_module(f"benchmarks.{module}").main([*arguments, "--out", str(path)])
    return status, json.loads(path.read_text())


def test_every_stage_has_the_output_and_the_gradients_of_float64(tmp_path: Path) -> None:
    status, result = written("stages", tmp_path / "stages.json", *SMALL)
    assert not status and result["git_commit"] == "abc1234"
    rows = {row["stage"]: row for row in result["rows"]}
    assert len(rows) == 9 and not any(row["wrong"] for row in rows.values())
    for stage, row in rows.items():
        assert max(row["both_errors"]) < 1e-5 and len(row["both_errors"]) == 1 + 1 + 3 * 3
        assert row["both_host_gain"] == pytest.approx(rows["naive"]["both_host_us"] / row["both_host_us"])
        assert ("forward_host_us" in row) == (stage != "#6, weights at the end")
    assert rows["#6 overlapped layers"]["paper"] == 11.1


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_wrong_stage_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    from benchmarks import stages

    right = stages.STAGES["#3 fused pointwise"]

    def wrong(x: Tensor, layers: Sequence[Any], group: int) -> Tensor:
        y = right(x, layers, group)
        return y * 1.001 if part == "forward" else torch.cat([y[:1].detach(), y[1:]])

    monkeypatch.setitem(stages.STAGES, "#3 fused pointwise", wrong)
    status, result = written("stages", tmp_path / "stages.json", *SMALL)
    assert status == 1
    named = {row["stage"]: row["wrong"].partition(":")[0] for row in result["rows"] if row["wrong"]}
    assert named == {"#3 fused pointwise": "forward" if part == "forward" else "both"}


def test_the_truth_of_stages_is_torch_s_lstm() -> None:
    from benchmarks.stages import Network, Size

    network = Network(Size(hidden=8, batch=3, frames=7, layers=2), torch.device("cpu"), torch.float32)
    network.measure_truth()
    torch.testing.assert_close(network.truth[0].float(), network.peer(network.x)[0].detach(), rtol=0, atol=1e-5)


def test_operations_of_stages() -> None:
    from benchmarks.stages import Size, add_gains

    size = Size(hidden=10, batch=3, frames=7, layers=2)
    assert size.cells == 14
    # a cell: 3 utterances, products of (40 x 10) with the input and with the state, 2 operations each: 4,800 in 2 us
    assert size.tflops(2.0) == pytest.approx(4800 / 2e-6 / 1e12)
    assert size.tflops(2.0, gates=1, passes=3) == pytest.approx(3600 / 2e-6 / 1e12)
    row = {"forward_host_us": 2.0, "forward_graph_us": 1.0}
    add_gains(row, {"forward_host_us": 8.0, "forward_graph_us": 3.0})
    assert (row["forward_host_gain"], row["forward_graph_gain"]) == (4.0, 3.0)


@pytest.mark.parametrize("figure", ["figure1", "figure2"])
def test_sweeps_have_every_size(tmp_path: Path, figure: str) -> None:
    sizes = ("--sizes", "8x2", "16x3", "--frames", "3", "--layers", "2")
    status, result = written("stages", tmp_path / "sweep.json", *TINY, *sizes, "--sweep", figure)
    rows = result["rows"]
    assert not status and [(row["hidden"], row["batch"]) for row in rows[:2]] == [(8, 2), (16, 3)]
    if figure == "figure1":
        assert len(rows) == 2 and all(len(row["tflops"]) == 5 and min(row["tflops"].values()) > 0 for row in rows)
    else:
        assert [row["kind"] for row in rows[::2]] == ["RNN", "GRU", "LSTM"]
        keys = [f"{whose}_{of}" for whose in ("ours", "torch") for of in ("forward", "both")]
        assert all(row[key] > 0 for row in rows for key in keys)


def test_tables_and_figures_of_grnn(tmp_path: Path) -> None:
    from benchmarks.grnn import tflops
    from benchmarks.rnn import LayerProblem

    common = ("--device", "cpu", "--budget", "0.001", "--commit", "abc1234")
    sizes = ("--hidden", "8", "16", "--batch", "2")
    status, table = written("grnn", tmp_path / "1.json", "table1", *common, *sizes)
    assert not status and len(table["rows"]) == 3 * 2
    assert all(row["cpu_torch"] > 0 and row["cpu_ours"] > 0 for row in table["rows"])
    _, figure = written("grnn", tmp_path / "2.json", "figure15", *common, "--batch", "1", "3")
    assert [(r["model"], r["batch"]) for r in figure["rows"]] == [
        (model, batch) for model in ("classifier", "language model") for batch in (1, 3)
    ]
    assert all(row["error"] < 1e-5 and row["ours"] > 0 for row in figure["rows"])
    _, table = written("grnn", tmp_path / "3.json", "table3", *common, *sizes)
    assert [row["by"] for row in table["rows"]] == ["cpu", "cpu"]
    assert all(row["ratio"] == pytest.approx(row["gru_before"] / row["gru_after"]) for row in table["rows"])
    problem = LayerProblem((10, 3, 100), torch.float32, torch.device("cpu"), "lstm")
    assert tflops(problem, 2.0) == pytest.approx(100 * 4800 / 2e-3 / 1e12) and tflops(problem, "no") is None


def test_the_layers_of_cudnn_s_paper() -> None:
    from benchmarks import convolution

    shapes = [convolution.layer(number, 128).shapes["y"] for number in range(1, 6)]
    assert shapes == [(128, k, p, p) for k, p in ((96, 118), (128, 56), (128, 24), (128, 10), (384, 11))]
    op = convolution.layer(5, 2)
    assert op.operations == 2 * 2 * 384 * 11 * 11 * 128 * 9
    generator = torch.Generator().manual_seed(0)
    arrays = {name: torch.randn(shape, generator=generator) for name, shape in op.shapes.items()}
    for kind, name in convolution.PASSES.items():
        right = convolution.by_torch(kind, arrays)
        assert right.shape == op.shapes[name]
        assert convolution.error(op, kind, arrays, right) < 1e-5
        assert convolution.error(op, kind, arrays, 1.01 * right) == pytest.approx(0.01, rel=1e-2)


def test_kernels_of_the_barrier_build() -> None:
    pytest.importorskip("cuda.core")
    from benchmarks import barrier

    assert build(barrier.BARRIER.text).code != build(barrier.EMPTY.text).code


def test_a_step_of_the_barrier_benchmark_is_a_barrier_or_a_launch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cuda.core")
    from benchmarks import barrier
    from benchmarks.common import Timing

    passed_s = [0.0]

    def run(launch: Any, arguments: list[int], *_: Any) -> None:
        assert launch.grid == 132
        passed_s[0] += 2e-6 * arguments[0] if launch.cooperative else 7e-6

    def measure(call: Any, device: torch.device) -> Timing:
        before = passed_s[0]
        call()
        return Timing(*[passed_s[0] - before] * 3)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(barrier, "facts", lambda options, *_: {"git_commit": options.commit})
    for name, value in (("run", run), ("measure", measure), ("graphed", lambda call: call)):
        monkeypatch.setattr(barrier, name, value)
    assert not barrier.main(["--steps", "50", "--commit", "abc1234"])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["us"] for row in rows] == pytest.approx([2.0, 7.0, 7.0])
    assert [row["ratio"] for row in rows] == pytest.approx([1.0, 3.5, 3.5])


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
