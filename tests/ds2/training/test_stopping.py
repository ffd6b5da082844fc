"""A GPU that is lost is told apart from a call that fails."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds2.training.stopping import DeviceError, report_lost_device

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
