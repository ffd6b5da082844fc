"""Launches without a GPU: what their errors say."""

import pytest
import torch
from ds2_ops.jit import runtime
from ds2_ops.jit.launch import Launch, run
from ds2_ops.jit.source import Source


def test_a_failed_launch_names_search_and_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("out of something")

    monkeypatch.setattr(torch.cuda, "device", lambda index: torch.inference_mode())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "the GPU")
    monkeypatch.setattr(runtime, "load", refuse)
    runtime.arch.cache_clear()
    with pytest.raises(RuntimeError, match="trace of 2 hypotheses failed on the GPU: out of something"):
        run(Launch(Source("", ()), threads=64), [], lambda: "trace of 2 hypotheses", torch.device("cuda", 0))
