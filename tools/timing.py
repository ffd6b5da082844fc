"""Time a callable on the CPU or on a GPU: warmed up, repeated, median and spread."""

import platform
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch


class Timing(NamedTuple):
    """Seconds a call: the median, and the 10th and 90th percentile."""

    median_s: float
    low_s: float
    high_s: float


def measure(call: Callable[[], object], device: torch.device, repeats: int = 20, budget_s: float = 1.0) -> Timing:
    """Time ``call`` up to ``repeats`` times, at least 3 times, within about ``budget_s``.

    GPU calls are queued without waiting, each between two device events, so that the host runs ahead as in training.
    """
    call()
    _wait(device)
    started = time.perf_counter()
    call()
    _wait(device)
    repeats = max(3, min(repeats, int(budget_s / (time.perf_counter() - started))))
    if device.type == "cuda":
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
        for start, stop in events:
            start.record()
            call()
            stop.record()
        torch.cuda.synchronize(device)
        times = [start.elapsed_time(stop) * 1e-3 for start, stop in events]
    else:
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
    deciles = statistics.quantiles(times, n=10, method="inclusive")
    return Timing(statistics.median(times), deciles[0], deciles[-1])


def measure_host(call: Callable[[], object], device: torch.device, repeats: int = 50) -> Timing:
    """Time how long the host needs to queue ``call``, which must not wait for the GPU; nothing else is queued then."""
    times = []
    for _ in range(repeats):
        _wait(device)
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    _wait(device)
    deciles = statistics.quantiles(times, n=10, method="inclusive")
    return Timing(statistics.median(times), deciles[0], deciles[-1])


def graphed(call: Callable[[], object]) -> Callable[[], object]:
    """Capture ``call`` in a CUDA graph and return its replay, which keeps the graph's memory alive."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()

    def replay() -> object:
        graph.replay()
        return kept

    return replay


def machine(device: torch.device) -> str:
    """Name what the figures were measured on."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads, torch {torch.__version__}"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
