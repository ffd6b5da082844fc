"""Common parts of the benchmarks: timing, the machine and commit of a result, tables."""

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

RATE_HZ = 16000


Timing = tuple[float, float, float]  # seconds a call: the median, and the 10th and 90th percentile


def measure(call: Callable[[], object], device: torch.device, repeats: int = 20, budget_s: float = 1.0) -> Timing:
    """Time ``call`` up to ``repeats`` times, at least 3 times, within about ``budget_s``.

    GPU calls are queued without waiting, each between two device events, so that the host runs ahead as in training.
    """
    call()
    wait(device)
    started = time.perf_counter()
    call()
    wait(device)
    repeats = max(3, min(repeats, int(budget_s / (time.perf_counter() - started))))
    if device.type != "cuda":
        return measure_host(call, device, repeats)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, stop in events:
        start.record()
        call()
        stop.record()
    torch.cuda.synchronize(device)
    return _timing([start.elapsed_time(stop) * 1e-3 for start, stop in events])


def measure_host(call: Callable[[], object], device: torch.device, repeats: int = 50) -> Timing:
    """Time how long the host needs to queue ``call``, which must not wait for the GPU; nothing else is queued then."""
    times = []
    for _ in range(repeats):
        wait(device)
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    wait(device)
    return _timing(times)


def _timing(times_s: list[float]) -> Timing:
    deciles = statistics.quantiles(times_s, n=10, method="inclusive")
    return statistics.median(times_s), deciles[0], deciles[-1]


def facts(options: argparse.Namespace, device: torch.device, title: str) -> dict[str, str]:
    """Print what is measured, where and at which commit; return it as the head of the result."""
    cpu = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
    head = {"title": title, "machine": f"{machine}, torch {torch.__version__}", "git_commit": options.commit}
    print(", ".join(head.values()), flush=True)
    return head


class Table:
    """Prints a Markdown table row by row: a format string such as "{step_ms:.1f}" by heading; no value is "-"."""

    def __init__(self, columns: Mapping[str, str]) -> None:
        self.columns = columns
        print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)

    def print_row(self, row: Mapping[str, Any]) -> None:
        print(f"| {' | '.join(_cell(column, row) for column in self.columns.values())} |", flush=True)


def _cell(column: str, row: Mapping[str, Any]) -> str:
    try:
        return column.format(**row)
    except (KeyError, TypeError):
        return "-"


def wait(device: torch.device) -> None:
    """Wait for all that was queued on a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
