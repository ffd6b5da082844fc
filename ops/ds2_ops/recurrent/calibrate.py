"""The tile of a problem on a GPU of this machine: the model's choice, or the fastest of those that were measured.

On a GPU whose times no record holds, a few tiles are timed when the first one is chosen, and factors of the model's
constants are fitted to them (:func:`factors_of`).
Top-K calibration (GRNN, Holmes et al. 2019, section 7.2) takes the fastest of the K tiles that the model ranks first.
It is off by default, because another tile rounds differently. $DS2_OPS_CALIBRATE = K calibrates each problem on first
use; :func:`calibrate` calibrates ahead of use, and :func:`adopt` takes its result from another rank or an earlier run.
Measurements lie in the folder of the compiled kernels, by GPU, driver and sources. Needs no framework.
Shape letters: T frames, B batch, H hidden.
"""

import functools
import hashlib
import itertools
import json
import logging
import math
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ds2_ops.jit import runtime
from ds2_ops.jit.build import cache_dir, publish, sources_digest
from ds2_ops.jit.launch import launch_on
from ds2_ops.recurrent.plan.choose import rank, usable_sms
from ds2_ops.recurrent.plan.model import LINKS, Timed, fit_factors, fitted, link_us, recorded_gpus
from ds2_ops.recurrent.plan.problem import (
    THREADS,
    Choice,
    Design,
    DeviceFacts,
    DoesNotFit,
    Problem,
    array_bytes,
    pass_arguments,
)

FRAMES, ROUNDS = 96, 5
KERNELS = 8  # compiled for a GPU without recorded times
_NEAR = 1.5  # of these, estimated times over the fastest one's
_BUILD_S, _LIMIT_S = 8.0, 10.0  # for compiling them; after which no problem is begun. What is late is left out
_log = logging.getLogger("ds2_ops")


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


Factors = Mapping[str, Mapping[str, float]]  # of `Processor`
_factors: dict[str, Factors] = {}  # by GPU; those of this process
_adopted_factors: list[Mapping[str, Factors]] = []  # at most one


def adopt_factors(factors: Mapping[str, Factors] | None) -> None:
    """Use these factors of the model's constants, by the name of the GPU, from now on, and measure none.

    A GPU that is not named gets the constants by its clock. None ends that.
    """
    if _adopted_factors == [factors]:
        return
    _adopted_factors[:] = [] if factors is None else [factors]
    _factors.clear()
    choose_tile.cache_clear()


def factors_of(index: int) -> Factors:
    """Return how long the links of a step take on a GPU, relative to the constants; nothing where these are its own.

    For a GPU that no recorded sweep is of, a few tiles are timed, in about 10 s at most. The result is saved next to
    the compiled kernels. $DS2_OPS_CALIBRATE = 0 turns that off, and while a CUDA graph is captured nothing is timed.
    Without times, as where a driver refuses, the constants follow the clock.
    """
    facts = device_facts(index)
    name = facts.name
    if _adopted_factors:
        return _adopted_factors[0].get(name, {})
    off = os.environ.get("DS2_OPS_CALIBRATE", "").strip() == "0" or facts.capability < runtime.MIN_CAPABILITY
    if off or name in recorded_gpus() or _capturing():
        return {}
    if name not in _factors:
        try:
            _factors[name] = saved_factors(index) or _measured_factors(index)
        except (RuntimeError, OSError) as error:
            warnings.warn(
                f"the planner's constants follow the clock of {name}, as its tiles cannot be timed: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
            _factors[name] = {}
    return _factors[name]


def measured_factors(index: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return the factors of a GPU by its name, for :func:`adopt_factors`; nothing where it needs none or has none."""
    try:
        factors = factors_of(index)
    except RuntimeError:  # of the driver; who asks for a kernel learns of it
        return {}
    copy = {design: dict(links) for design, links in factors.items()}
    return {device_facts(index).name: copy} if copy else {}


def _fitted_facts(index: int) -> DeviceFacts:
    return replace(device_facts(index), factors=factors_of(index))


def _capturing() -> bool:
    """Whether the current stream of PyTorch, if that is loaded, records a CUDA graph, which no measurement survives."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def saved_factors(index: int) -> Factors:
    """Return the factors that were measured on a GPU before; nothing, with a warning, where they are damaged."""
    path = record_path(index)
    content = _read(path)
    factors: Factors = content.get("factors", {})
    if not factors:
        return {}
    wrong = "of other constants" if content.get("constants") != _constants_digest() else ""
    for design, values in factors.items():
        numbers = values.values() if isinstance(values, dict) and set(values) == set(LINKS) else [None]
        if not all(isinstance(number, float) and 0 <= number < math.inf for number in numbers):
            wrong = f"for {design!r} {values}, expected a number of 0 or more for each of {', '.join(LINKS)}"
    if wrong:
        warnings.warn(f"{path}: its factors are {wrong}: they are measured anew", RuntimeWarning, stacklevel=2)
        return {}
    return factors


def _constants_digest() -> str:
    return hashlib.sha256(json.dumps(fitted(), sort_keys=True).encode()).hexdigest()[:16]


def _measured_factors(index: int) -> Factors:
    """Time a few tiles, fit factors to them, keep these and say so."""
    started, facts, path = time.perf_counter(), device_facts(index), record_path(index)
    kernels = few_kernels(facts)
    built = _build_together(list(kernels), runtime.arch(index), _BUILD_S)
    problems: dict[Problem, list[Choice]] = defaultdict(list)
    for text in built:
        for problem, choice in kernels[text]:
            problems[problem].append(choice)
    if not problems:
        raise RuntimeError(f"none of {len(kernels)} kernels was compiled in {_BUILD_S:.0f} s")
    timed = list[Timed]()
    for problem, choices in problems.items():
        if timed and time.perf_counter() - started > _LIMIT_S:
            break
        times = time_tiles(choices, problem, index)
        timed += [Timed(choice.work, us, us) for choice, us in zip(choices, times, strict=True)]
    factors = fit_factors(timed, facts.processor.clock)
    _write(path, index, _read(path) | {"factors": factors, "constants": _constants_digest()})
    _log.info(
        "the planner's constants were fitted to %d tiles of %d kernels on %s in %.1f s, saved in %s; times of links, "
        "relative to those of the constants: %s. DS2_OPS_CALIBRATE=0 leaves that out",
        *(len(timed), len(built), facts.name, time.perf_counter() - started, path, listed(factors)),
    )
    return factors


def listed(factors: Factors) -> str:
    """Write factors on one line."""
    return "; ".join(
        f"{design} {', '.join(f'{link} {value:.2f}' for link, value in links.items())}"
        for design, links in factors.items()
    )


def few_kernels(facts: DeviceFacts) -> dict[str, list[tuple[Problem, Choice]]]:
    """Choose the kernels whose times say most about the links of a GPU's steps: by their sources, their tiles.

    One after the other that by which the determinant of the least-squares problem grows most, among the tiles that the
    constants, by the GPU's clock, rank near the fastest.
    """
    tiles: dict[str, list[tuple[Problem, Choice]]] = defaultdict(list)
    sizes = itertools.product(("relu", "lstm", "gru_after"), (256, 512, 1024), (1, 8, 64), (False, True))
    for cell, hidden, batch, backward in sizes:
        problem = Problem(batch, hidden, "bfloat16", cell, backward)
        try:
            ranked = rank(problem, facts)
        except DoesNotFit:
            continue
        for choice in ranked:
            if choice.step_us <= _NEAR * ranked[0].step_us:
                tiles[choice.launch.source.text].append((problem, choice))
    shares = {text: [_shares(choice) for _, choice in of_kernel] for text, of_kernel in tiles.items()}
    names = sorted({name for of_kernel in shares.values() for share in of_kernel for name in share})
    rows = {
        text: np.array([[share.get(name, 0.0) for name in names] for share in of_kernel])
        for text, of_kernel in shares.items()
    }
    information, chosen = 0.01 * np.eye(len(names)), []
    for _ in range(min(KERNELS, len(rows))):
        text = max(rows, key=lambda text: float(np.linalg.slogdet(information + rows[text].T @ rows[text])[1]))
        information += rows[text].T @ rows[text]
        chosen.append(text)
        del rows[text]
    return {text: tiles[text] for text in chosen}


def _shares(choice: Choice) -> dict[tuple[str, str], float]:
    """Return the share of each link of a design in the estimated time of a step."""
    design, links = link_us(choice.work)
    return {(design, link): us / sum(links.values()) for link, us in links.items()}


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
    ranked = rank(problem, _fitted_facts(index), max_sms)
    if early and (clusters := [choice for choice in ranked if choice.design is Design.CLUSTER]):
        largest = max(choice.launch.cluster for choice in clusters)
        ranked = [choice for choice in clusters if choice.launch.cluster == largest]
    key = key_of(problem, index, max_sms)
    name = _adopted[0].get(key) if _adopted else None
    if not _adopted and (count := tiles_to_measure()):
        name = calibrate([(problem, max_sms)], index, count)[key]
    if name is None:
        return ranked[0]
    if (chosen := next((choice for choice in ranked if choice.name == name), None)) is None and not early:
        message = f"the tile {name!r} that was recorded for {key} is not one of this version's"
        warnings.warn(f"{message}: the model's choice runs instead", RuntimeWarning, stacklevel=2)
    return chosen or ranked[0]


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
    recorded, names = _read(path)["choices"], {}
    for problem, max_sms in problems:
        key = key_of(problem, index, max_sms)
        entry = recorded.get(key)
        if entry is None or entry["most"] < most:
            choices = rank(problem, _fitted_facts(index), max_sms)[:most]
            times = measure(choices, problem, index)
            measured = dict(zip((choice.name for choice in choices), times, strict=True))
            entry = {"most": most, "name": min(measured, key=measured.__getitem__), "us": measured}
            content = _read(path)  # another process may have written meanwhile
            recorded = content["choices"] | {key: entry}
            _write(path, index, content | {"choices": recorded})
        names[key] = entry["name"]
    return names


def measure(choices: Sequence[Choice], problem: Problem, index: int) -> list[float]:
    """Compile tiles, then :func:`time_tiles`."""
    if len(choices) > 1:
        _build_together([choice.launch.source.text for choice in choices], runtime.arch(index))
    return time_tiles(choices, problem, index)


def time_tiles(choices: Sequence[Choice], problem: Problem, index: int) -> list[float]:
    """Time tiles in turns on memory of their own.

    Returns:
        Median microseconds a time step of each.
    """
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
    """Where the record of a GPU, the capability that it is used with, driver and version of the sources lies."""
    capability = device_facts(index).capability
    named = f"{runtime.device_name(index)} {capability} {runtime.driver_version()} {sources_digest()}"
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
    """Return what was measured, as it was written: tiles by problem, as "choices", and "factors", if there are any."""
    empty: dict[str, Any] = {"choices": {}}
    content: dict[str, Any] | None
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return empty
    except (OSError, ValueError):
        content = None
    if isinstance(content, dict) and all(isinstance(content.get(key, {}), dict) for key in ("choices", "factors")):
        return empty | content
    warnings.warn(f"{path} is damaged: its measurements are made anew", RuntimeWarning, stacklevel=2)
    return empty


def _write(path: Path, index: int, content: Mapping[str, Any]) -> None:
    about = {"gpu": runtime.device_name(index), "driver": runtime.driver_version(), "sources": sources_digest()}
    try:
        publish(path, json.dumps({**content, **about}, indent=1).encode())
    except OSError as error:
        warnings.warn(f"measurements cannot be written to {path.parent} ({error})", RuntimeWarning, stacklevel=2)


def _build_together(texts: Sequence[str], arch: str, limit_s: float | None = None) -> list[str]:
    """Compile each in a process of its own into the cache; `launch_on` repeats what fails, and raises its error.

    Returns:
        Those that were compiled, within `limit_s` seconds where that is given.
    """
    code = "import sys; from ds2_ops.jit.build import build; build(sys.stdin.read(), sys.argv[1])"
    compiler = functools.partial(
        subprocess.run,
        [sys.executable, "-c", code, arch],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        text=True,
        check=True,
    )
    deadline = None if limit_s is None else time.monotonic() + limit_s

    def built(text: str) -> bool:
        try:
            compiler(input=text, timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        except subprocess.SubprocessError:
            return False
        return True

    unique = list(dict.fromkeys(texts))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [text for text, good in zip(unique, pool.map(built, unique), strict=True) if good]
