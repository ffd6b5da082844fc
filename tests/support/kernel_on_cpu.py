"""Runs kernels of csrc that synchronise within a block only on the CPU, from their own source; see cuda_on_cpu.h."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ds2_ops.ctc import align, beam, loss
from ds2_ops.jit import runtime
from ds2_ops.jit.launch import Launch, Source, names

H200_SMEM_BYTES = 232448
HERE = Path(__file__).parent
_TYPES = {"int": ctypes.c_int, "long long": ctypes.c_longlong, "float": ctypes.c_float, "double": ctypes.c_double}
CSRC = Path(runtime.__file__).parents[1] / "csrc"


def patch(monkeypatch: pytest.MonkeyPatch, backwards: bool = False, smem_bytes: int = H200_SMEM_BYTES) -> None:
    """Make `ds2_ops.ctc` run on CPU tensors; threads take turns from the last one on if `backwards`."""
    for module in (align, beam, loss):
        patch_run(monkeypatch, module, backwards)
        monkeypatch.setattr(module, "why_no_gpu", lambda device: None)
        monkeypatch.setattr(module, "device_index", lambda device: 0)
    monkeypatch.setattr(runtime, "smem_bytes_per_block", lambda index: smem_bytes)


def patch_run(monkeypatch: pytest.MonkeyPatch, module: Any, backwards: bool = False) -> None:
    """Make the launches of a module run on CPU tensors."""

    def run(launch: Launch, arguments: Sequence[Any], what: Callable[[], str], device: torch.device) -> None:
        kernel = ctypes.CDLL(str(_library(launch.source))).run
        kernel.argtypes = None
        kernel(launch.grid, launch.threads, int(backwards), *host_arguments(launch.source, arguments))

    monkeypatch.setattr(module, "run", run)


@functools.cache
def _library(source: Source) -> Path:
    headers = {
        "ptx/sync.cuh": (HERE / "cuda_on_cpu.h").read_text(),
        "ptx/number.cuh": (HERE / "number_on_cpu.h").read_text(),
        "ptx/system.cuh": (HERE / "system_on_cpu.h").read_text(),
    }
    launch = "fibers::launch(blocks, threads, backwards, KERNEL)"
    return compile_kernel(source, headers, "void", "int blocks, int threads, int backwards", launch)


@functools.cache
def _session_folder() -> tempfile.TemporaryDirectory[str]:
    """Where this process keeps what it builds; removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="ds2-kernels-")


def compile_kernel(source: Source, headers: Mapping[str, str], returns: str, parameters: str, launch: str) -> Path:
    """Build a kernel for the CPU, with a C function `run` that takes `parameters` and the kernel's, and does `launch`.

    `headers` take the place of those of csrc, by their path there; ptx/sync.cuh among them stands for CUDA. In
    `launch`, KERNEL is the call of the kernel as a function of nothing.
    """
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    folder = Path(tempfile.mkdtemp(dir=_session_folder().name))
    shutil.copytree(CSRC, folder, dirs_exist_ok=True)
    fibers = HERE / "fiber_on_cpu.h"
    for name, text in {**headers, fibers.name: fibers.read_text()}.items():
        (folder / name).write_text(text)
    call = launch.replace("KERNEL", f"[&] {{ ds2_kernel({names(source.parameters)}); }}")
    signature = ", ".join([parameters, *(f"{kind} {name}" for kind, name in source.parameters)])
    run = f'\nextern "C" {returns} run({signature}) {{ return {call}; }}\n'
    (folder / "kernel.cpp").write_text(source.text + run)
    (folder / "cuda.h.gch").symlink_to(_precompiled((folder / "ptx/sync.cuh").read_text(), fibers.read_text()))
    _compile(folder, "-shared", "-include", "cuda.h", "-o", "kernel.so", "kernel.cpp")
    return folder / "kernel.so"


@functools.cache
def _precompiled(cuda: str, fibers: str) -> Path:
    """What stands for CUDA, read by the compiler once a process: it takes as long as a kernel."""
    folder = Path(tempfile.mkdtemp(dir=_session_folder().name))
    for name, text in {"ptx/sync.cuh": cuda, "fiber_on_cpu.h": fibers, "cuda.h": '#include "ptx/sync.cuh"\n'}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    _compile(folder, "-x", "c++-header", "-o", "cuda.h.gch", "cuda.h")
    return folder / "cuda.h.gch"


def _compile(folder: Path, *options: str) -> None:
    # A checked longjmp would refuse to leave a fiber's stack: no fortification.
    always = ["-std=c++17", "-O1", "-U_FORTIFY_SOURCE", "-fPIC", "-I."]
    subprocess.run(["g++", *always, *options], cwd=folder, check=True)


def host_arguments(source: Source, arguments: Sequence[Any]) -> list[Any]:
    """Arguments as a launch packs them, for a C function."""
    memory = source.pack(source.numbers(arguments)).memory
    return [
        _TYPES.get(kind, ctypes.c_void_p).from_buffer(memory, 8 * place)
        for place, (kind, _) in enumerate(source.parameters)
    ]
