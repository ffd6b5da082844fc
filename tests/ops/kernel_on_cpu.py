"""Runs kernels of csrc that synchronise within a block only on the CPU, from their own source; see cuda_on_cpu.h."""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ds2_ops import align, beam, block_kernel, jit

H200_SMEM_BYTES = 232448
_CSRC = Path(jit.__file__).parent / "csrc"


def patch(monkeypatch: pytest.MonkeyPatch, backwards: bool = False, smem_bytes: int = H200_SMEM_BYTES) -> None:
    """Make `ds2_ops.beam` run on CPU tensors; threads take turns from the last one on if `backwards`."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")

    def launch(
        what: str, launch: block_kernel.Launch, arguments: Sequence[Any], blocks: int, device: torch.device
    ) -> None:
        run = ctypes.CDLL(str(_library(launch.source))).run
        run.argtypes = None
        run(blocks, launch.threads, int(backwards), *(_value(argument) for argument in arguments))

    for module in (align, beam):
        monkeypatch.setattr(module, "launch_kernel", launch)
        monkeypatch.setattr(module, "why_no_device", lambda device: None)
        monkeypatch.setattr(module, "device_index", lambda device: 0)
    monkeypatch.setattr(jit, "smem_bytes_per_block", lambda index: smem_bytes)


@functools.cache
def _library(source: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="ds2-kernel-"))
    for header in ("align.cuh", "beam.cuh", "ngram.cuh", "select.cuh"):
        shutil.copy(_CSRC / header, folder)
    shutil.copy(Path(__file__).with_name("cuda_on_cpu.h"), folder / "sync.cuh")
    found = re.search(r"ds2_kernel\((.*?)\) \{", source, re.DOTALL)
    assert found
    names = ", ".join(re.findall(r"(\w+)(?:,|$)", found[1]))
    run = f"""
extern "C" void run(int blocks, int threads, int backwards, {found[1]}) {{
    fibers::launch(blocks, threads, backwards, [&] {{ ds2_kernel({names}); }});
}}
"""
    (folder / "kernel.cpp").write_text(source + run)
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-include", "sync.cuh", "-o", "kernel.so", "kernel.cpp"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "kernel.so"


def _value(argument: Any) -> Any:
    if argument is None:
        return ctypes.c_void_p(0)
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_int(argument) if isinstance(argument, int) else ctypes.c_double(argument)
