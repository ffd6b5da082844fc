"""How runs stop and start again: signals, a kill in an evaluation, Slurm's requeue, a folder that is in use."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forked import used_elsewhere
from support.paths import ROOT
from support.run_log import losses

from ds2.config.schema import Config
from ds2.distributed.communicator import Communicator
from ds2.system.signals import handle_signals
from ds2.system.tensor_file import CheckpointError, load
from ds2.training.loop import train
from ds2.training.stopping import Interrupts
from ds2.training.trainer import Trainer

MakeConfig = Callable[..., Config]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_launchers_may_repeat_themselves(number: signal.Signals, caplog: pytest.LogCaptureFixture) -> None:
    former = signal.getsignal(number)
    with caplog.at_level(logging.WARNING), Interrupts() as interrupts:
        assert interrupts.received == 0
        for _ in range(3):
            os.kill(os.getpid(), number)
        assert interrupts.received == number
    assert caplog.text.count("saving after this step") == 1 and number.name in caplog.text
    assert signal.getsignal(number) == former


@pytest.mark.parametrize(("handler", "received"), [(signal.SIG_DFL, signal.SIGHUP), (signal.SIG_IGN, 0)])
def test_a_closed_terminal_stops_a_run_unless_it_runs_under_nohup(handler: signal.Handlers, received: int) -> None:
    with handle_signals([signal.SIGHUP], handler):
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            assert interrupts.received == received
        assert signal.getsignal(signal.SIGHUP) == handler


def test_ctrl_c_twice_stops_at_once_even_after_another_signal() -> None:
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_run_killed_in_its_evaluation_has_lost_no_step(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    config = tiny_config("train.epochs=2")
    train(config, whole)
    healthy = Trainer.evaluate

    def killed(self: Trainer, *arguments: Any) -> dict[str, float]:
        raise MemoryError("killed")

    monkeypatch.setattr(Trainer, "evaluate", killed)
    with pytest.raises(MemoryError):
        train(config, broken)
    progress = load(broken / "trainer.safetensors")[1]["progress"]
    assert (progress["epoch"], progress["batch"], progress["step"]) == (1, 3, 3)
    monkeypatch.setattr(Trainer, "evaluate", healthy)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert train(config, broken) == 0
    assert losses(broken) == losses(whole)
    assert "loss nan" not in caplog.text and "epoch 1: dev WER" in caplog.text


@pytest.mark.parametrize(("status", "asks"), [(143, "requeue 77\n"), (0, ""), (1, ""), (137, "")])
def test_the_slurm_script_requeues_a_job_that_saved_and_no_other(status: int, asks: str, tmp_path: Path) -> None:
    for name, body in (("srun", f'echo "$@" > srun.txt; exit {status}'), ("scontrol", 'echo "$@" > scontrol.txt')):
        stand_in = tmp_path / name
        stand_in.write_text(f"#!/bin/bash\n{body}\n")
        stand_in.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "77"}
    environment["SLURM_CPUS_PER_TASK"] = "3"
    command = ["bash", str(ROOT / "recipes" / "slurm.sbatch"), "train", "a='b c'"]
    assert subprocess.run(command, env=environment, cwd=tmp_path, check=False).returncode == status
    started = (tmp_path / "srun.txt").read_text()
    assert "--mpi=pmix" in started and "--cpus-per-task=3 ds2 train a='b c'\n" in started
    asked = tmp_path / "scontrol.txt"
    assert (asked.read_text() if asked.is_file() else "") == asks


def test_a_second_run_in_the_same_folder_is_refused_until_the_first_is_gone(
    tiny_config: MakeConfig, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with (
        used_elsewhere(run_dir, Communicator(torch.device("cpu"))) as other,
        pytest.raises(CheckpointError, match=rf"being written by process {other.pid} on .*run_dir="),
    ):
        train(tiny_config("train.epochs=1"), run_dir)
    assert train(tiny_config("train.epochs=1"), run_dir) == 0
