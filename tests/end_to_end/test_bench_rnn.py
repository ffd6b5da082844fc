"""Rows of `tools/bench.py rnn`: every size, and the commit; options that belong together."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest


def bench_rnn(*arguments: str) -> Any:
    return importlib.import_module("benchmarks.rnn").main(["--device", "cpu", *arguments])


def test_every_width_has_every_number_of_frames(tmp_path: Path) -> None:
    sizes = ("--hidden", "8", "16", "--batch", "4", "--frames", "1", "30", "--contenders", "cpu")
    assert not bench_rnn(*sizes, "--out", str(tmp_path / "rows.json"), "--commit", "abc1234")
    result = json.loads((tmp_path / "rows.json").read_text())
    rows = result["rows"]
    assert result["git_commit"] == "abc1234"
    assert [(row["hidden"], row["frames"]) for row in rows] == [(8, 1), (8, 30), (16, 1), (16, 30)]
    assert all(row["forward_us"][0] > 0 and row["both_us"][0] > row["forward_us"][0] for row in rows)


def test_widths_need_batches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        bench_rnn("--hidden", "8", "--commit", "abc1234")
    assert refused.value.code == 2 and "--hidden and --batch go together" in capsys.readouterr().err


def test_a_result_of_an_unknown_commit_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dispatch = importlib.import_module("dispatch")
    monkeypatch.setattr(dispatch, "git_commit", lambda: "unknown")
    with pytest.raises(SystemExit) as refused:
        dispatch.parse(dispatch.new_parser(None), [])
    assert refused.value.code == 2 and "name it with --commit" in capsys.readouterr().err
    assert dispatch.parse(dispatch.new_parser(None), ["--commit", "abc1234"]).commit == "abc1234"
