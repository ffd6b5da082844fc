"""The tile of a problem on a GPU of this machine: the model's choice, or the fastest of those that were measured.

Top-K calibration (GRNN, Holmes et al. 2019, section 7.2) takes the fastest of the K tiles that the model ranks first.
It is off by default, because another tile rounds differently. $DS2_OPS_CALIBRATE = K calibrates each problem on first
use; :func:`calibrate` calibrates ahead of use, and :func:`adopt` takes its result from another rank or an earlier run.
Measurements lie in the folder of the compiled kernels, by GPU, driver and sources. Needs no framework.
Shape letters: T frames, B batch, H hidden.
"""

import functools
import hashlib
import json
import os
import statistics
import subprocess
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds2_ops.jit import runtime
from ds2_ops.jit.build import cache_dir, publish, sources_digest
from ds2_ops.jit.launch import launch_on
from ds2_ops.recurrent.plan.choose import rank, usable_sms
from ds2_ops.recurrent.plan.problem import THREADS, Choice, Design, DeviceFacts, Problem, array_bytes, pass_arguments

FRAMES, ROUNDS = 96, 5


@functools.cache
def device_facts(index: int) -> DeviceFacts:
    """Ask the driver what CUDA device ``index`` can hold."""
    facts = DeviceFacts(
        name=runtime.device_name(index),
        capability=runtime.capability(index),
        sms=runtime.attribute(index, "MULTIPROCESSOR_COUNT"),
        smem_bytes_per_block=runtime.smem_bytes_per_block(index),
        active_clusters={},
        clock_mhz=runtime.attribute(index, "CLOCK_RATE") // 1000,
        registers=runtime.attribute(index, "MAX_REGISTERS_PER_MULTIPROCESSOR"),
        l2_bytes=runtime.attribute(index, "L2_CACHE_SIZE"),
    )
    if facts.capability < runtime.MIN_CAPABILITY:
        return facts
    with runtime.current(index):  # a driver that is too old for what NVRTC makes refuses this one
        probe = runtime.load(f'extern "C" __global__ void __launch_bounds__({THREADS}, 1) ds2_kernel() {{}}', index)
        if facts.capability != (9, 0):
            return facts
        active = {
            cluster: runtime.max_active_clusters(
                probe, block=THREADS, cluster=cluster, smem_bytes=facts.smem_bytes_per_block, stream=0
            )
            for cluster in (2, 3, 4, 5, 6, 8, 9, 16)
        }
    return replace(facts, active_clusters=active)


_adopted: list[Mapping[str, str]] = []  # at most one


def adopt(choices: Mapping[str, str] | None) -> None:
    """Use these tiles from now on, as :func:`ds2_ops.recurrent.calibrate.calibrate` returned them.

    All other problems get the model's choice then, whatever $DS2_OPS_CALIBRATE says: what runs is what a checkpoint
    holds, on every rank. None ends that.
    """
    _adopted[:] = [] if choices is None else [dict(choices)]
    choose_tile.cache_clear()


@functools.lru_cache(maxsize=1024)
def choose_tile(problem: Problem, index: int, max_sms: int | None, early: bool = False) -> Choice:
    """Choose for CUDA device ``index``.

    Args:
        problem: what is to run.
        index: the device.
        max_sms: as of `Options`.
        early: as of `Options`: only the cluster design can, and of its sizes the largest is taken, as each adds up in
            an order of its own. So the bits of an utterance do not depend on its batch.

    Returns:
        The adopted tile of the problem, else the calibrated one if $DS2_OPS_CALIBRATE is set, else the model's choice.

    Raises:
        DoesNotFit: no design can run it; the message says why, and what to use instead.
    """
    ranked = rank(problem, device_facts(index), max_sms)
    if early and (clusters := [choice for choice in ranked if choice.design is Design.CLUSTER]):
        largest = max(choice.launch.cluster for choice in clusters)
        ranked = [choice for choice in clusters if choice.launch.cluster == largest]
    key = key_of(problem, index, max_sms)
    name = _adopted[0].get(key) if _adopted else None
    if not _adopted and (count := tiles_to_measure()):
        name = calibrate([(problem, max_sms)], index, count)[key]
    if name is None:
        return ranked[0]
    for choice in ranked:
        if choice.name == name:
            return choice
    if early:
        return ranked[0]
    warnings.warn(
        f"the tile {name!r} that was recorded for {key} is not one of this version's: the model's choice runs instead",
        RuntimeWarning,
        stacklevel=2,
    )
    return ranked[0]


def tiles_to_measure() -> int:
    """Return the number of tiles of each problem that $DS2_OPS_CALIBRATE sets; 0 for none.

    Raises:
        ValueError: it is not a number.
    """
    text = os.environ.get("DS2_OPS_CALIBRATE", "").strip() or "0"
    if not text.isdecimal():
        raise ValueError(f"DS2_OPS_CALIBRATE is {text!r}, allowed is a number of tiles to measure; 0 measures none")
    return int(text)


def key_of(problem: Problem, index: int, max_sms: int | None) -> str:
    """Name a problem in records."""
    way = "backward" if problem.backward else "forward"
    sms = usable_sms(device_facts(index), max_sms)
    both = " both directions" if problem.directions > 1 else ""
    return f"{problem.nonlinearity} {problem.dtype} H {problem.hidden} B {problem.batch} {way}{both} on {sms} SMs"


def calibrate(problems: Iterable[tuple[Problem, int | None]], index: int, most: int) -> dict[str, str]:
    """Find the fastest of the `most` best tiles of each problem: from the record, or by measuring.

    Args:
        problems: (problem, max_sms).
        index: number of the CUDA device.
        most: K.

    Returns:
        The tile's name by :func:`key_of` the problem.

    Raises:
        DoesNotFit: no persistent kernel runs a problem.
        RuntimeError: the compiler's or driver's error.
    """
    path = record_path(index)
    recorded, names = _read(path), {}
    for problem, max_sms in problems:
        key = key_of(problem, index, max_sms)
        entry = recorded.get(key)
        if entry is None or entry["most"] < most:
            choices = rank(problem, device_facts(index), max_sms)[:most]
            times = measure(choices, problem, index)
            measured = dict(zip((choice.name for choice in choices), times, strict=True))
            entry = {"most": most, "name": min(measured, key=measured.__getitem__), "us": measured}
            recorded = _read(path) | {key: entry}  # another process may have written meanwhile
            _write(path, index, recorded)
        names[key] = entry["name"]
    return names


def measure(choices: Sequence[Choice], problem: Problem, index: int) -> list[float]:
    """Time tiles in turns on memory of their own.

    Returns:
        Median microseconds a time step of each.
    """
    if len(choices) > 1:
        _build_together([choice.launch.source.text for choice in choices], runtime.arch(index))
    with runtime.current(index), ExitStack() as stack:
        stream = runtime.call("cuStreamCreate", 0)
        stack.callback(runtime.call, "cuStreamDestroy", stream)
        start, stop = (runtime.call("cuEventCreate", 0) for _ in range(2))

        def allocate(size: int) -> int:
            address = runtime.call("cuMemAlloc", max(size, 4))
            stack.callback(runtime.call, "cuMemFree", address)
            runtime.call("cuMemsetD8Async", address, 0, max(size, 4), stream)
            return int(address)

        addresses = [allocate(size) if size else 0 for size in array_bytes(problem, FRAMES)]
        exchange = allocate(4 * max(choice.exchange_words for choice in choices))
        spans: list[list[float]] = [[] for _ in choices]
        for turn in range(ROUNDS + 1):
            for choice, span in zip(choices, spans, strict=True):
                arguments = pass_arguments(choice, problem, FRAMES, addresses, 1.0, exchange)
                runtime.call("cuEventRecord", start, stream)
                launch_on(choice.launch, arguments, choice.explain, index, int(stream))
                runtime.call("cuEventRecord", stop, stream)
                runtime.call("cuEventSynchronize", stop)
                if turn:  # the first one loads the kernel
                    span.append(runtime.call("cuEventElapsedTime", start, stop) * 1e3 / FRAMES)
        return [round(statistics.median(span), 4) for span in spans]


def record_path(index: int) -> Path:
    """Where the record of a GPU, driver and version of the sources lies."""
    named = f"{runtime.device_name(index)} {runtime.driver_version()} {sources_digest()}"
    return cache_dir() / f"tiles-{hashlib.sha256(named.encode()).hexdigest()[:16]}.json"


def records() -> list[tuple[Path, dict[str, Any]]]:
    """All records, of any GPU and version: path and content."""
    contents = []
    for path in sorted(cache_dir().glob("tiles-*.json")):
        try:
            contents.append((path, json.loads(path.read_text())))
        except (OSError, ValueError):
            continue  # damaged: it will be measured again
    return contents


def forget() -> int:
    """Remove all records; return how many there were."""
    paths = list(cache_dir().glob("tiles-*.json"))
    for path in paths:
        path.unlink(missing_ok=True)
    return len(paths)


def _read(path: Path) -> dict[str, Any]:
    try:
        choices = json.loads(path.read_text())["choices"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return choices if isinstance(choices, dict) else {}


def _write(path: Path, index: int, choices: Mapping[str, Any]) -> None:
    about = {"gpu": runtime.device_name(index), "driver": runtime.driver_version(), "sources": sources_digest()}
    try:
        publish(path, json.dumps({**about, "choices": choices}, indent=1).encode())
    except OSError as error:
        warnings.warn(f"measurements cannot be written to {path.parent} ({error})", RuntimeWarning, stacklevel=2)


def _build_together(texts: Sequence[str], arch: str) -> None:
    """Compile each in a process of its own into the cache; `launch_on` repeats what fails, and raises its error."""
    code = "import sys; from ds2_ops.jit.build import build; build(sys.stdin.read(), sys.argv[1])"
    running = []
    for text in dict.fromkeys(texts):
        process = subprocess.Popen(
            [sys.executable, "-c", code, arch],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            text=True,
        )
        assert process.stdin is not None
        process.stdin.write(text)
        process.stdin.close()
        running.append(process)
    for process in running:
        process.wait()
