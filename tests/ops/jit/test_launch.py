"""Launches without a GPU: what their errors say."""

from types import SimpleNamespace

import pytest
import torch
from ds2_ops.jit import runtime
from ds2_ops.jit.launch import Launch, run
from ds2_ops.jit.source import Source


def test_a_failed_launch_names_search_and_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("out of something")

    monkeypatch.setattr(torch.cuda, "device", lambda index: torch.inference_mode())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(runtime, "arch", lambda index: "sm_90a")
    monkeypatch.setattr(runtime, "device_name", lambda index: "the GPU")
    monkeypatch.setattr(runtime, "load", refuse)
    with pytest.raises(RuntimeError, match="trace of 2 hypotheses failed on the GPU: out of something"):
        run(Launch(Source("", ()), threads=64), [], lambda: "trace of 2 hypotheses", torch.device("cuda", 0))
