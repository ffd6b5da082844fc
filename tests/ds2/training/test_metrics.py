"""The log of a run, whole after any end of the job before; the gradient noise scale against a known covariance."""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.run_log import events
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ds2.commands.common import report_errors
from ds2.config.schema import Config
from ds2.system.tensor_file import read_metadata
from ds2.training import loop
from ds2.training.loop import train
from ds2.training.metrics import NoiseScale, RunLog
from ds2.training.state import Progress


def test_a_torn_last_line_does_not_swallow_the_next_event(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"event": "start"}\n{"event": "tra')
    board = RunLog(tmp_path, resume_step=3)
    board.event("resume", 3, {})
    board.close()
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert lines[1] == '{"event": "tra' and json.loads(lines[2])["event"] == "resume"
    RunLog(tmp_path).close()
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 3


def test_a_writer_that_is_stopped_before_it_writes_a_line_does_not_write_it_after_another_has_taken_over(
    tmp_path: Path,
) -> None:
    others: list[RunLog] = []

    def stopped_here() -> bool:
        """Find no other writer; then the process is stopped, and another one takes over and writes."""
        if former.writes and not others:
            others.append(RunLog(tmp_path, resume_step=5, takes_over=True))
            others[0].event("train", 6, {"loss": 2.0})
        return False

    former = RunLog(tmp_path)
    former.event("start", 0, {})
    former = RunLog(tmp_path, superseded=stopped_here)
    former.event("train", 5, {"loss": 1.0})
    others[0].event("train", 7, {"loss": 3.0})
    steps = [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert steps == [0, 6, 7] and [path.name for path in tmp_path.glob(".*")] == []


def test_a_process_that_is_stopped_while_it_takes_over_replaces_no_lines_of_who_took_over_after_it(
    tmp_path: Path,
) -> None:
    others: list[RunLog] = []

    def stopped_here() -> bool:
        """Once the copy is there: others write lines, and the process goes on."""
        if not others:
            others.append(RunLog(tmp_path, resume_step=5, takes_over=True))
            others[0].event("train", 6, {"loss": 2.0})
        return True

    RunLog(tmp_path).event("start", 0, {})
    late = RunLog(tmp_path, superseded=stopped_here, takes_over=True)
    late.event("train", 5, {"loss": 1.0})
    late.close()
    others[0].event("train", 7, {"loss": 3.0})
    steps = [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert steps == [0, 6, 7] and not late.writes


@pytest.mark.parametrize("name", ["log.jsonl", "tensorboard"])
def test_a_full_disk_is_named_with_what_was_written_what_is_free_and_the_way_out(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    board: Any = RunLog(tmp_path)
    board.close()
    board._jsonl, board._board = Mock(), Mock()
    if name == "log.jsonl":
        board._jsonl.write = fill
    else:
        board._board.add_scalar = fill
    assert report_errors(lambda: len(board.scalars("train", 1, {"loss": 1.0}))) == 2
    printed = capsys.readouterr().err
    assert re.search(rf"No space left on device: '{tmp_path}/{name}'; \d+\.\d MiB are free there: free some", printed)


def test_it_is_the_trace_of_the_covariance_over_the_squared_gradient() -> None:
    generator = torch.Generator().manual_seed(1)
    mean, deviation, batch = torch.full((400,), 0.5), 2.0, 8
    gradients = [torch.zeros(300), torch.zeros(100)]
    noise, progress = NoiseScale(gradients), Progress()
    assert math.isnan(noise.end_window(progress))
    for _ in range(40):
        for _ in range(10):
            drawn = mean + deviation / batch**0.5 * torch.randn(400, generator=generator)
            gradients[0].copy_(drawn[:300])
            gradients[1].copy_(drawn[300:])
            noise.add(float(drawn.norm()), batch)
        estimate = noise.end_window(progress)
    # tr(S) / |G|^2 = 400 deviation^2 / (400 mean^2) = 16. A window's |G|^2 has about the variance of |mean g|^2, that
    # is 4 |G|^2 v / k + 2 n v^2 / k^2 with v = deviation^2 / batch; the windows' average has 1 / 19 of it, tr(S) less.
    v, k, square = deviation**2 / batch, 10, 100.0
    spread = math.sqrt((4 * square * v / k + 2 * 400 * v**2 / k**2) / 19) / square
    assert estimate == pytest.approx(16, rel=4 * spread)
    assert NoiseScale(gradients).end_window(progress) == estimate  # a run that goes on keeps the averages


def test_a_run_logs_it_and_shows_it_in_tensorboard(tiny_config: Callable[..., Config]) -> None:
    config = tiny_config("train.noise_scale=true", "train.log_every_steps=3", "train.epochs=3")
    assert train(config, Path(config.run_dir)) == 0
    found = [event["noise_scale"] for event in events(Path(config.run_dir), "train")]
    assert len(found) == 3 and any(value is not None and value > 0 for value in found)
    progress = read_metadata(Path(config.run_dir) / "trainer.safetensors")["progress"]
    assert (progress["noise"] / progress["signal"] if progress["signal"] > 0 else None) == found[-1] != 0
    board = EventAccumulator(f"{config.run_dir}/tensorboard").Reload()
    shown = [s.value for s in board.Scalars("train/noise_scale") if math.isfinite(s.value)]
    assert shown == pytest.approx([value for value in found if value is not None], rel=1e-6)  # float32 there


def test_without_a_terminal_progress_is_logged_in_lines(
    tiny_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_config("train.epochs=1", "data.dev=[]")
    monkeypatch.setattr(loop, "PROGRESS_EVERY_S", 0.0)
    with caplog.at_level("INFO"):
        assert loop.train(config, Path(config.run_dir)) == 0
    assert "epoch 1/1, batch 2 of 3, step 2: loss" in caplog.text and "min left" in caplog.text
