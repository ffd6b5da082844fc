"""A GPU that is lost is told apart from a call that fails; where ranks come and go, signalled ones leave in turn."""

from __future__ import annotations

import logging
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds2.system.signals import Stopped
from ds2.training.stopping import DeviceError, Interrupts, report_lost_device

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
    with caplog.at_level(logging.ERROR), pytest.raises(DeviceError, match=told), report_lost_device(COMM):
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
