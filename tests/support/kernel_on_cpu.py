"""Runs kernels of csrc that synchronise within a block only on the CPU, from their own source; see cuda_on_cpu.h."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ds2_ops import checks
from ds2_ops.ctc import align, beam, denominator, loss
from ds2_ops.jit import build, runtime
from ds2_ops.jit.launch import Launch, Source, names

H200_SMEM_BYTES = 232448
SUPPORT = Path(__file__).parent
_TYPES = {"int": ctypes.c_int, "long long": ctypes.c_longlong, "float": ctypes.c_float, "double": ctypes.c_double}
CSRC = Path(runtime.__file__).parents[1] / "csrc"
_INCLUDE = re.compile(r'^ *# *include +"([^"]+)"', re.MULTILINE)
# A checked longjmp would refuse to leave a fiber's stack: no fortification.
_OPTIONS = ("-std=c++17", "-U_FORTIFY_SOURCE", "-fPIC", "-I.")


def patch(monkeypatch: pytest.MonkeyPatch, backwards: bool = False, smem_bytes: int = H200_SMEM_BYTES) -> None:
    """Make `ds2_ops.ctc` run on CPU tensors; threads take turns from the last one on if `backwards`."""
    for module in (align, beam, denominator, loss):
        patch_run(monkeypatch, module, backwards)
        monkeypatch.setattr(module, "device_index", lambda device: 0)
    monkeypatch.setattr(checks, "why_no_gpu", lambda device: None)
    monkeypatch.setattr(checks, "device_index", lambda device: 0)
    monkeypatch.setattr(runtime, "smem_bytes_per_block", lambda index: smem_bytes)


def patch_run(monkeypatch: pytest.MonkeyPatch, module: Any, backwards: bool = False) -> None:
    """Make the launches of a module run on CPU tensors, with as many multiprocessors as an H200 has."""

    def run(launch: Launch, arguments: Sequence[Any], what: Callable[[], str], device: torch.device) -> None:
        kernel = ctypes.CDLL(str(_library(launch.source))).run
        kernel.argtypes = None
        kernel(launch.grid, launch.threads, int(backwards), *host_arguments(launch.source, arguments))

    monkeypatch.setattr(module, "run", run)
    if hasattr(module, "multiprocessors"):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 132)


def patch_launch_on(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    """Make the launches of a module of primitives run on arrays of the CPU."""

    def launch_on(launch: Launch, numbers: Sequence[Any], what: Callable[[], str], index: int, stream: int) -> None:
        kernel = ctypes.CDLL(str(_library(launch.source))).run
        kernel.argtypes = None
        kernel(launch.grid, launch.threads, 0, *host_arguments(launch.source, numbers))

    monkeypatch.setattr(module, "launch_on", launch_on)


@functools.cache
def _library(source: Source) -> Path:
    headers = {
        "ptx/number.cuh": (SUPPORT / "number_on_cpu.h").read_text(),
        "ptx/system.cuh": (SUPPORT / "system_on_cpu.h").read_text(),
    }
    launch = "fibers::launch(blocks, threads, backwards, KERNEL)"
    return compile_kernel(source, "cuda_on_cpu", headers, "void", "int blocks, int threads, int backwards", launch)


def compile_kernel(
    source: Source, emulator: str, headers: Mapping[str, str], returns: str, parameters: str, launch: str
) -> Path:
    """Build a kernel for the CPU, with a C function `run` that takes `parameters` and the kernel's, and does `launch`.

    The library stays in the cache folder of compiled kernels, under a hash of the compiler and all that it reads. The
    next process, or one that runs at the same time, then loads it.

    Args:
        source: the kernel.
        emulator: stands for CUDA: the name of a header and of a source beside this file.
        headers: replace those of csrc, by their path there.
        returns: C type of the result of `run`.
        parameters: of `run`, before the kernel's.
        launch: C++ expression; in it, KERNEL is the call of the kernel as a function of nothing.
    """
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    files = {path.relative_to(CSRC).as_posix(): path.read_text() for path in CSRC.rglob("*.cuh")}
    sync = (SUPPORT / f"{emulator}.h").read_text()
    files |= {"ptx/sync.cuh": sync, "cuda.h": '#include "ptx/sync.cuh"\n'} | headers
    call = launch.replace("KERNEL", f"[&] {{ ds2_kernel({names(source.parameters)}); }}")
    signature = ", ".join([parameters, *(f"{kind} {name}" for kind, name in source.parameters)])
    unit = f'#include "cuda.h"\n{source.text}\nextern "C" {returns} run({signature}) {{ return {call}; }}\n'
    # -Og takes two thirds as long as -O1 for a large kernel, which then runs as fast. Its libraries are the emulator's:
    # to link a small kernel with all of C++ takes longer than to compile it.
    options = ("-Og", "-shared", "-nodefaultlibs", "kernel.cpp", str(_emulator(emulator)))
    return _compiled(_included(files, unit) | {"kernel.cpp": unit}, "kernel.so", options)


@functools.cache
def _emulator(name: str) -> Path:
    """Compile what stands for CUDA, but for its header, once for all kernels: it takes as long as a kernel."""
    files = {path.name: path.read_text() for path in SUPPORT.glob("*_on_cpu.*")}
    text = files[f"{name}.cpp"]
    return _compiled(_included(files, text) | {f"{name}.cpp": text}, f"{name}.so", ("-O2", "-shared", f"{name}.cpp"))


def _compiled(files: Mapping[str, str], result: str, options: Sequence[str]) -> Path:
    """Return the file that g++ makes of others, from the cache folder if it has been made of the same before."""
    parts = [_compiler(), *_OPTIONS, *options, *map(str, sorted(files.items()))]
    cached = build.cache_dir() / "cpu" / (hashlib.sha256("\0".join(parts).encode()).hexdigest() + Path(result).suffix)
    if not cached.exists():
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cached.parent) as folder:
            for name, text in files.items():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                (Path(folder) / name).write_text(text)
            subprocess.run(["g++", *_OPTIONS, *options, "-o", result], cwd=folder, check=True)
            os.replace(Path(folder) / result, cached)
    return cached


def _included(files: Mapping[str, str], text: str) -> dict[str, str]:
    """Name and text of each file that a text includes, directly or through another."""
    included: dict[str, str] = {}
    pending = _INCLUDE.findall(text)
    while pending:
        name = pending.pop()
        if name in files and name not in included:
            included[name] = files[name]
            pending += _INCLUDE.findall(files[name])
    return included


@functools.cache
def _compiler() -> str:
    return subprocess.run(["g++", "-v"], capture_output=True, text=True, check=True).stderr


def host_arguments(source: Source, arguments: Sequence[Any]) -> list[Any]:
    """Arguments as a launch packs them, for a C function."""
    memory = source.pack(source.numbers(arguments)).memory
    return [
        _TYPES.get(kind, ctypes.c_void_p).from_buffer(memory, 8 * place)
        for place, (kind, _) in enumerate(source.parameters)
    ]
