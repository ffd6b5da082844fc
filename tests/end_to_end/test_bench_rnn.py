"""Figures of `tools/bench.py rnn`: every size of every width, and the commit; options that contradict."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest


def bench_rnn(*arguments: str) -> Any:
    return importlib.import_module("benchmarks.rnn").main(["--device", "cpu", *arguments])


def test_a_figure_of_two_widths(tmp_path: Path) -> None:
    sizes = ("--figure", "frames", "--hidden", "8", "16", "--contenders", "cpu")
    assert not bench_rnn(*sizes, "--out", str(tmp_path), "--commit", "abc1234")
    result = json.loads((tmp_path / "rnn_frames.json").read_text())
    rows = result["rows"]
    assert result["git_commit"] == "abc1234"
    assert [(row["hidden"], row["frames"]) for row in rows] == [
        (hidden, frames) for hidden in (8, 16) for frames in (1, 3, 10, 30, 100, 300, 1000)
    ]
    assert all(row["forward_us"][0] > 0 and row["both_us"][0] > row["forward_us"][0] for row in rows)


def test_a_figure_has_its_own_batches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        bench_rnn("--figure", "batch", "--hidden", "8", "--batch", "4", "--commit", "abc1234")
    assert refused.value.code == 2 and "--figure has batches of its own" in capsys.readouterr().err


def test_a_result_of_an_unknown_commit_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dispatch = importlib.import_module("dispatch")
    monkeypatch.setattr(dispatch, "git_commit", lambda: "unknown")
    with pytest.raises(SystemExit) as refused:
        dispatch.parse(dispatch.new_parser(None), [])
    assert refused.value.code == 2 and "name it with --commit" in capsys.readouterr().err
    assert dispatch.parse(dispatch.new_parser(None), ["--commit", "abc1234"]).commit == "abc1234"
