"""A GPU that is lost is told apart from a call that fails; where ranks come and go, signalled ones leave in turn."""

from __future__ import annotations

import json
import logging
import multiprocessing
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds2.config.schema import Config
from ds2.distributed.communicator import Communicator
from ds2.system import UserError
from ds2.system.signals import Stopped
from ds2.system.tensor_file import read_metadata
from ds2.training.loop import train
from ds2.training.state import state_file
from ds2.training.stopping import Interrupts, report_lost_device

COMM: Any = SimpleNamespace(device=torch.device("cuda:1"), host="here", status="step 7, backward")


def fails(device: torch.device) -> None:
    raise torch.AcceleratorError("CUDA error: unspecified launch failure\nCUDA kernel errors might be ...")


@pytest.mark.parametrize("error", [torch.AcceleratorError("first"), RuntimeError("launch of 8 blocks: CUDA_ERROR")])
def test_an_error_after_which_every_call_fails_is_the_loss_of_the_device(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    at_end: list[Any] = []
    monkeypatch.setattr("ds2.training.stopping.atexit.register", at_end.append)
    told = r"cuda:1 on here was lost at step 7, backward: CUDA error: unspecified launch failure\. What was saved stays"
    with caplog.at_level(logging.ERROR), pytest.raises(UserError, match=told), report_lost_device(COMM):
        raise error
    assert len(at_end) == 1  # before torch's destructors, which would abort
    assert "Traceback" in caplog.text and str(error) in caplog.text  # a kernel's mistake looks the same


@pytest.mark.parametrize("device", ["cuda:1", "cpu"])
def test_an_error_of_one_call_stays_what_it_is(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", fails if device == "cpu" else lambda device: None)
    comm: Any = SimpleNamespace(**{**vars(COMM), "device": torch.device(device)})
    with pytest.raises(torch.OutOfMemoryError), report_lost_device(comm):
        raise torch.OutOfMemoryError("too large")


def test_of_ranks_that_are_signalled_one_after_the_other_the_last_one_stays_to_save() -> None:
    comm: Any = SimpleNamespace(elastic=True, world=2)
    first, second = Interrupts(), Interrupts()
    first.received = signal.SIGTERM
    flags = [sum(pair) for pair in zip(first.send(), second.send(), strict=True)]
    second.received = signal.SIGTERM  # after its numbers of this step are sent
    for interrupts in (first, second):
        interrupts.receive(flags, comm)
    with pytest.raises(Stopped):
        first.leave()
    second.leave()
    assert not second.agreed
    second.receive(second.send(), SimpleNamespace(elastic=True, world=1))  # type: ignore[arg-type]
    assert second.agreed == signal.SIGTERM


@pytest.mark.slow
@pytest.mark.parametrize("settings", [(), ("checkpoint.every_epochs=2",)], ids=str)
def test_no_step_is_lost_wherever_between_two_epochs_a_signal_comes(
    settings: tuple[str, ...],
    tiny_config: Callable[..., Config],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, agree = 0, Interrupts.agree

    def signalled_at_last(interrupts: Interrupts, comm: Communicator) -> int:
        nonlocal calls
        calls += 1
        if calls == last_call:
            interrupts.received = signal.SIGTERM
        return agree(interrupts, comm)

    monkeypatch.setattr(Interrupts, "agree", signalled_at_last)
    for last_call in range(1, 6):
        calls, run_dir = 0, tmp_path / str(last_call)
        config = tiny_config("train.epochs=9", "train.evaluate_every_epochs=9", *settings)
        config.run_dir = str(run_dir)
        assert train(config, run_dir) == 128 + signal.SIGTERM
        steps = [json.loads(line)["step"] for line in (run_dir / "log.jsonl").read_text().splitlines()]
        assert read_metadata(state_file(run_dir))["progress"]["step"] == max(steps)


def test_a_training_that_has_ended_leaves_no_workers(tiny_config: Callable[..., Config], tmp_path: Path) -> None:
    others = set(multiprocessing.active_children())
    assert train(tiny_config("data.workers=1", "train.max_steps=2"), tmp_path / "run") == 0
    assert set(multiprocessing.active_children()) == others
