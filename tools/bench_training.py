"""Time whole training steps of the trainer: features, model, CTC, backward, clipping, optimizer; batches from memory.

    python tools/bench_training.py --model rnn_48_skip_4 --batch 4 16 64
    python tools/bench_training.py --model rnn_8 --batch 4 --backend gemm     # the same step without persistent kernels
    python tools/bench_training.py --model rnn_8 --batch 4 --graphs off auto  # launch by launch, beside CUDA graphs

Utterances are noise of equal length with random transcripts. Prints a table and one JSON line: milliseconds a step
(median, 10th and 90th percentile of host-timed steps that follow each other as in training: each ends when its update
is launched, after the trainer's own wait for loss and gradient norm), what of it the host takes (all but that wait)
and, on a GPU, how long some kernel or copy runs and how many of these there are (from a trace of three further steps):
the larger of host and GPU sets the pace. Seconds of audio a second, peak memory. Steps are recorded as CUDA graphs once
running averages weigh a batch by their momentum, with that of the config from the tenth on: the default warm-up lasts
longer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch

from ds2.commands.compose import compose_config
from ds2.data.loader import Batch
from ds2.data.manifest import Utterance, write_manifest
from ds2.system.machine import git_commit
from ds2.training.trainer import Trainer

RATE_HZ = 16000


def write_corpus(folder: Path, utterances: int, duration_s: float, characters_per_s: float) -> Path:
    """Write a manifest of noise with random transcripts, without doubled letters."""
    rng = np.random.default_rng(1)
    records = []
    for index in range(utterances):
        path = folder / f"{index}.wav"
        soundfile.write(path, 0.1 * rng.standard_normal(int(duration_s * RATE_HZ)), RATE_HZ)
        steps = rng.integers(1, 26, size=int(duration_s * characters_per_s))
        text = "".join(chr(ord("a") + c) for c in np.cumsum(steps) % 26)
        records.append(Utterance(path, duration_s, text))
    write_manifest(folder / "noise.jsonl", records)
    return folder / "noise.jsonl"


class Waits:
    """Counts the seconds that a trainer's steps wait for the device's results."""

    def __init__(self, trainer: Trainer) -> None:
        self.seconds = 0.0
        status = trainer.comm.status
        waiting = status.waiting

        @contextmanager
        def timed(name: str) -> Iterator[None]:
            began = time.perf_counter()
            with waiting(name):
                yield
            self.seconds += time.perf_counter() - began

        status.waiting = timed  # type: ignore[method-assign]


def traced(step: Callable[[], object], steps: int = 3) -> tuple[float, int, dict[str, tuple[int, float]]]:
    """Return the milliseconds a step in which any kernel or copy runs, the launches a step, and both by kernel."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    on_device = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((e.time_range.start, e.time_range.end) for e in on_device)
    busy_us, reached = 0.0, float("-inf")
    for start, end in spans:
        busy_us += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    kernels: dict[str, tuple[int, float]] = {}
    for event in on_device:
        count, total_us = kernels.get(event.name, (0, 0.0))
        kernels[event.name] = count + 1, total_us + event.time_range.elapsed_us()
    longest = sorted(kernels.items(), key=lambda item: -item[1][1])
    of_a_step = {name: (count // steps, total_us / 1000 / steps) for name, (count, total_us) in longest}
    return busy_us / 1000 / steps, len(spans) // steps, of_a_step


def opened(
    model: str, batch: int, graphs: str, args: argparse.Namespace, folder: Path
) -> tuple[Trainer, Callable[[], object]]:
    """A trainer of one model, and what takes a step of one batch size, always on the same batch."""
    overrides = [
        f"model={model}", f"model.backend={args.backend}", "optim=sgd", "optim.learning_rate=1e-6",
        f"batching.utterances={batch}",
        f"data.train=[{folder / 'noise.jsonl'}]", f"data.work_dir={folder}", "data.workers=0", f"device={args.device}",
        f"train.precision={args.precision}", f"train.graphs={graphs}",
        "train.max_skipped_steps=100000",
        f"run_dir={folder / 'run'}", *args.overrides,
    ]  # fmt: skip
    config = compose_config(overrides)
    trainer = Trainer(config, Path(config.run_dir))
    trainer.model.train()
    prepared: Batch = next(iter(trainer.loader.epoch([list(range(batch))], 1)))
    batches = trainer.prepared(itertools.repeat(prepared.pin_memory() if trainer.device.type == "cuda" else prepared))
    return trainer, lambda: trainer.step(batches, [range(batch)])


def bench(model: str, batch: int, graphs: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Median step of one model at one batch size."""
    trainer, take_step = opened(model, batch, graphs, args, folder)
    on_gpu = trainer.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times_ms, host_ms = [], []
    waits = Waits(trainer)
    for step in range(args.warmup + args.steps):
        if step == args.warmup:
            trainer.timer.means(1)  # forgets the steps before
        waits.seconds = 0.0
        began = time.perf_counter()
        take_step()
        if step >= args.warmup:
            times_ms.append(1000 * (time.perf_counter() - began))
            host_ms.append(times_ms[-1] - 1000 * waits.seconds)
    split = trainer.timer.means(args.steps)
    busy_ms, launches, kernels = None, None, {}
    if on_gpu:
        busy_ms, launches, kernels = traced(take_step)
    deciles = statistics.quantiles(times_ms, n=10)
    median_ms = statistics.median(times_ms)
    return {
        "model": model, "batch": batch, "graphs": graphs,
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "host_ms": statistics.median(host_ms), "gpu_busy_ms": busy_ms, "launches": launches,
        "step_ms": median_ms, "p10_ms": deciles[0], "p90_ms": deciles[-1],
        "forward_ms": 1000 * split["forward"], "backward_ms": 1000 * split["backward"],
        "optimizer_ms": 1000 * split["optimizer"],
        "audio_s_per_s": 1000 * batch * args.duration / median_ms,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        "skipped": trainer.progress.skipped, "kernels": dict(itertools.islice(kernels.items(), args.kernels)),
    }  # fmt: skip


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """What is to be timed, as arguments."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["rnn_8"])
    parser.add_argument("--batch", nargs="+", type=int, default=[4])
    parser.add_argument("--duration", type=float, default=7.0, help="seconds of each utterance")
    parser.add_argument("--characters", type=float, default=14.0, help="characters of transcript a second")
    parser.add_argument("--backend", default="auto", help="recurrent backend of ds2_ops")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--graphs", nargs="+", choices=("auto", "on", "off"), default=["auto"])
    parser.add_argument("--warmup", type=int, default=14)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("overrides", nargs="*", help="further settings, e.g. model.depth=2")
    return parser


def main() -> None:
    """Parse, run, print."""
    parser = parser_of(__doc__)
    parser.add_argument("--kernels", type=int, default=0, help="list so many kernels that took longest")
    args = parser.parse_args()
    device = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()}, {os.cpu_count()} cores"
    )
    print(f"torch {torch.__version__} on {device}, commit {git_commit()}")
    print(f"{args.duration:g} s utterances, backend {args.backend}")
    print(
        f"{'model':<18}{'batch':>6}{'graphs':>8}{'step ms':>10}{'p10-p90':>16}{'fwd':>8}{'bwd':>8}{'opt':>7}"
        f"{'host':>8}{'GPU':>8}{'launches':>10}{'audio s/s':>11}{'GiB':>7}"
    )
    rows = []
    for model in args.model:
        for batch, graphs in itertools.product(args.batch, args.graphs):
            with tempfile.TemporaryDirectory() as folder:
                write_corpus(Path(folder), batch, args.duration, args.characters)
                row = bench(model, batch, graphs, args, Path(folder))
            rows.append(row)
            spread = f"{row['p10_ms']:.1f}-{row['p90_ms']:.1f}"
            memory = f"{row['peak_gib']:.2f}" if row["peak_gib"] is not None else "-"
            busy = f"{row['gpu_busy_ms']:.1f}" if row["gpu_busy_ms"] is not None else "-"
            print(
                f"{model:<18}{batch:>6}{graphs:>8}{row['step_ms']:>10.1f}{spread:>16}{row['forward_ms']:>8.1f}{row['backward_ms']:>8.1f}"
                f"{row['optimizer_ms']:>7.1f}{row['host_ms']:>8.1f}{busy:>8}{row['launches'] or '-':>10}"
                f"{row['audio_s_per_s']:>11.0f}{memory:>7}",
                flush=True,
            )
            for name, (count, total_ms) in row["kernels"].items():
                print(f"{total_ms:>12.3f} ms {count:>5} x {name[:150]}", flush=True)
    print(json.dumps({"device": device, "torch": torch.__version__, "duration_s": args.duration, "rows": rows}))


if __name__ == "__main__":
    main()
