"""Launches without a GPU: what their errors say."""

from dataclasses import replace

import pytest
import torch
from ds2_ops.ctc import beam
from ds2_ops.jit import launch as jit_launch
from ds2_ops.jit import runtime


def test_a_failed_launch_names_search_and_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("out of something")

    monkeypatch.setattr(torch.cuda, "device", lambda index: torch.inference_mode())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "the GPU")
    monkeypatch.setattr(runtime, "load", refuse)
    launch = replace(beam.TRACE, source="")
    with pytest.raises(RuntimeError, match="trace of 2 hypotheses failed on the GPU: out of something"):
        jit_launch.launch_kernel("trace of 2 hypotheses", launch, [], 1, torch.device("cuda", 0))
