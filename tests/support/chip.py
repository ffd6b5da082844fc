"""Runs the persistent kernels on the CPU, from their own source, at its worst; see chip_on_cpu.h."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from ds2_ops.jit.launch import Launch, Source
from ds2_ops.recurrent import layer
from ds2_ops.recurrent.backends import persistent
from ds2_ops.recurrent.plan.devices import DEVICES
from ds2_ops.recurrent.plan.problem import Choice, DeviceFacts

from support.kernel_on_cpu import CSRC, compile_kernel, host_arguments, patch_run

_KERNELS = tuple(f"recurrent/{name}.cuh" for name in ("projection", "cluster", "grid_narrow", "grid_wide", "units"))
Fault = tuple[str, str, str]  # header, what it says, what it is to say
Faults = tuple[Fault, ...]
Chip = Callable[..., None]  # see `patch`
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@functools.cache
def _library(source: Source, faults: Faults) -> ctypes.CDLL:
    # All that is hardware, at once; the kernels' own headers see its shared memory.
    headers = {
        "ptx/grid_barrier.cuh": "#pragma once\n",
        "ptx/poll.cuh": "#pragma once\n",
        "ptx/number.cuh": "#pragma once\n",
        "ptx/wgmma.cuh": "#pragma once\n",
    }
    for name in _KERNELS:
        text = (CSRC / name).read_text()
        headers[name] = re.sub(r"extern __shared__ .*? (\w+)\[\];", r"char* const \1 = chip::shared_memory();", text)
    for name, right, wrong in faults:
        text = headers.get(name) or (CSRC / name).read_text()
        assert text.count(right) == 1, f"{name} has {text.count(right)} places that read {right!r}"
        headers[name] = text.replace(right, wrong)
    shape = "Shape::ALL_THREADS, Shape::CLUSTER, Shape::SMEM_BYTES"
    launch = f"chip::launch(blocks, {shape}, seed, KERNEL)"
    parameters = "int blocks, int seed"
    library = ctypes.CDLL(str(compile_kernel(source, "chip_on_cpu", headers, "const char*", parameters, launch)))
    library.run.restype = ctypes.c_char_p
    return library


def patch(monkeypatch: pytest.MonkeyPatch) -> Chip:
    """Make `persistent` run on CPU tensors: a choice of the planner's, with rests drawn from a seed.

    What is returned takes both, and faults to plant.
    """

    def use(choice: Choice, seed: int, faults: Faults = ()) -> None:
        def run(launch: Launch, arguments: Sequence[Any], *_: object) -> None:
            library = _library(launch.source, faults)
            if launch.early:
                _hold(library, dict(zip((n for _, n in launch.source.parameters), arguments, strict=True)))
            error = library.run(launch.grid, seed, *host_arguments(launch.source, arguments))
            assert not error, error.decode()

        monkeypatch.setattr(persistent, "choose_tile", lambda *_: choice)
        monkeypatch.setattr(persistent, "device_index", lambda device: 0)
        monkeypatch.setattr(persistent, "run_on", run)
        monkeypatch.setattr(layer, "run", run)
        monkeypatch.setattr(layer, "multiprocessors", lambda device: 132)

    patch_run(monkeypatch, persistent)
    return use


def assert_seen(check: Callable[[], Sequence[object]]) -> None:
    """Assert that a check of kernels with a planted fault names wrong results, or that the emulation itself fails."""
    try:
        wrong = check()
    except AssertionError:
        return
    assert wrong


def _hold(library: ctypes.CDLL, arguments: Mapping[str, Any]) -> None:
    """Keep all arrays of 16-bit numbers and all lengths, but for weights, until every thread has waited."""
    batch, hidden = arguments["batch"], arguments["hidden"]
    rows = arguments.get("rows") or arguments["frames"] * batch
    sizes = dict.fromkeys(("input", "result", "z"), 2 * rows * hidden) | dict.fromkeys(("lengths", "begin"), 4 * batch)
    sizes |= dict.fromkeys(("state", "last_state"), 2 * batch * hidden) | {"x": 2 * rows * arguments.get("width", 0)}
    arrays = {name: arguments[name] for name in sizes if arguments.get(name) is not None}
    addresses = [a if isinstance(a, int) else a.data_ptr() for a in arrays.values()]
    pairs = [(address, sizes[name]) for name, address in zip(arrays, addresses, strict=True) if address]
    library.hold(
        len(pairs),
        (ctypes.c_void_p * len(pairs))(*(a for a, _ in pairs)),
        (ctypes.c_long * len(pairs))(*(n for _, n in pairs)),
    )


def small_chip(active: Mapping[int, int]) -> DeviceFacts:
    """Facts of a chip with so many clusters of a size, all that it has."""
    return replace(DEVICES["H200"], sms=max(c * n for c, n in active.items()), active_clusters=dict(active))
