"""Time whole training steps: features, model, CTC, backward, clipping and optimizer, on a batch in memory.

    python tools/bench.py training --model rnn_48_skip_4 --batch 4 16 64
    python tools/bench.py training --model rnn_8 --batch 4 --backend gemm     # without persistent kernels
    python tools/bench.py training --model rnn_8 --batch 4 --graphs off auto  # launch by launch, and as CUDA graphs
    python tools/bench.py training --model lstm_4_512 --layers ours torch     # beside torch.nn's layers, cuDNN's

Utterances are noise of equal length with random transcripts. Prints a table and one JSON line. A step is timed on the
host (median, 10th and 90th percentile) from the end of the step before it, as in training; `host` is its time without
the trainer's wait for loss and gradient norm. `GPU` is the time in which any kernel or copy runs, and `launches` their
number, from a trace of three further steps: the slower of host and GPU decides the time of a step. Steps are recorded
as CUDA graphs from about the tenth step on, so the warm-up should not be shorter than the default.
"""

import itertools
import json
import statistics
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import soundfile
import torch
from benchmarks.common import RATE_HZ, Table, facts
from dispatch import new_parser, parse
from torch import Tensor, nn

from ds2.commands.compose import compose_config
from ds2.config.device import resolve_device
from ds2.config.schema import ModelConfig
from ds2.data.loader import Batch, rank_part
from ds2.data.manifest import Utterance, write_manifest
from ds2.distributed.communicator import Communicator
from ds2.model import recurrent
from ds2.model.norm import make_norm
from ds2.model.pass_context import OWN_PARAMETERS, PassContext
from ds2.model.ragged import Ragged
from ds2.training.trainer import Trainer

COLUMNS = {
    "model": "{model}", "layers": "{layers}", "batch": "{batch}", "graphs": "{graphs}", "step ms": "{step_ms:.1f}",
    "10 to 90 %": "{p10_ms:.1f}-{p90_ms:.1f}", "forward": "{forward_ms:.1f}", "backward": "{backward_ms:.1f}",
    "optimizer": "{optimizer_ms:.1f}", "host": "{host_ms:.1f}", "GPU": "{gpu_busy_ms:.1f}", "launches": "{launches:d}",
    "audio s/s": "{audio_s_per_s:.0f}", "GiB": "{peak_gib:.2f}",
}  # fmt: skip
CHARACTERS_PER_S = 14.0  # of transcripts of noise
_TRACED = 3  # steps


class TorchLayer(nn.Module):
    """`torch.nn.RNN`, `LSTM` or `GRU` in place of our layer, with the norm of `model.norm` before it."""

    def __init__(self, width_in: int, config: ModelConfig) -> None:
        super().__init__()
        self.norm = make_norm(width_in, config)
        if config.cell == "rnn":  # torch's relu has no clip
            nonlinearity = "tanh" if config.nonlinearity == "tanh" else "relu"
            self.cell: nn.RNNBase = nn.RNN(width_in, config.hidden, nonlinearity=nonlinearity)
        else:
            self.cell = {"lstm": nn.LSTM, "gru": nn.GRU}[config.cell](width_in, config.hidden)

    def forward(self, x: Tensor, ragged: Ragged, context: PassContext = OWN_PARAMETERS) -> Tensor:
        """Map (T, B, D) to (T, B, H), as our layers do. Its weights are its own parameters whatever the context."""
        y, _ = self.cell(x if self.norm is None else self.norm(x, ragged.count))
        return torch.where(ragged.valid.t()[:, :, None], y, 0.0)


def layers_of(kind: str) -> Any:
    """Let networks that are made in a `with` have "ours" or "torch" layers."""
    make = TorchLayer if kind == "torch" else recurrent.make_recurrent_layer
    return mock.patch.object(recurrent, "make_recurrent_layer", make)


def time_waits(trainer: Trainer) -> list[float]:
    """Return a list that gets the seconds of each wait of the trainer's steps for results of the device."""
    waits_s, status = list[float](), trainer.comm.status
    waiting = status.waiting

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        began = time.perf_counter()
        with waiting(name):
            yield
        waits_s.append(time.perf_counter() - began)

    status.waiting = timed  # type: ignore[method-assign]
    return waits_s


def trace(step: Callable[[], object]) -> tuple[float, int]:
    """Return the ms a step in which any kernel or copy runs, and the launches a step."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(_TRACED):
            step()
        torch.cuda.synchronize()
    on_device = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    busy_us, reached = 0.0, float("-inf")
    for start, end in sorted((e.time_range.start, e.time_range.end) for e in on_device):
        busy_us += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy_us / 1000 / _TRACED, len(on_device) // _TRACED


def write_noise(folder: Path, utterances: int, duration_s: float) -> None:
    """Write noise.jsonl, a manifest of noise with random transcripts, without doubled letters."""
    rng = np.random.default_rng(1)
    folder.mkdir(parents=True, exist_ok=True)
    records = []
    for index in range(utterances):
        path = folder / f"{index}.wav"
        soundfile.write(path, 0.1 * rng.standard_normal(int(duration_s * RATE_HZ)), RATE_HZ)
        steps = rng.integers(1, 26, size=int(duration_s * CHARACTERS_PER_S))
        text = "".join(chr(ord("a") + c) for c in np.cumsum(steps) % 26)
        records.append(Utterance(path, duration_s, text))
    write_manifest(folder / "noise.jsonl", records)


def noise_overrides(folder: Path, batch: int, options: Namespace) -> list[str]:
    """Write a corpus of noise unless it is there; return settings of a run on it whose steps hardly change the weights.

    Those of the command line (`add_noise_options`) come last.
    """
    if not (folder / "noise.jsonl").is_file():
        write_noise(folder, batch, options.duration)
    return [
        "optim=sgd", "optim.learning_rate=1e-6", f"batching.utterances={batch}", "data.workers=0",
        f"data.train=[{folder / 'noise.jsonl'}]", f"data.work_dir={folder}", "train.max_skipped_steps=100000",
        f"run_dir={folder / 'run'}", *options.overrides,
    ]  # fmt: skip


def open_trainer(
    overrides: Sequence[str], batch: int, comm: Communicator | None = None
) -> tuple[Trainer, Callable[[], object]]:
    """Make a trainer, and a function that takes a step, always on the same `batch` utterances of all ranks."""
    config = compose_config(overrides)
    trainer = Trainer(config, Path(config.run_dir), comm)
    trainer.model.train()
    plan = [list(range(batch))]
    own = rank_part(plan[0], trainer.comm.rank, trainer.comm.world)
    prepared: Batch = next(iter(trainer.loader.epoch([own], 1)))
    batches = trainer.prepared(itertools.repeat(prepared.pin_memory() if trainer.device.type == "cuda" else prepared))
    return trainer, lambda: trainer.step(batches, plan)


def bench(model: str, layers: str, batch: int, graphs: str, options: Namespace, folder: Path) -> dict[str, Any]:
    """Time steps of one model at one batch size."""
    overrides = [
        f"model={model}", f"model.backend={options.backend}", f"device={options.device}",
        f"train.precision={options.precision}", f"train.graphs={graphs}", *noise_overrides(folder, batch, options),
    ]  # fmt: skip
    with layers_of(layers):
        trainer, take_step = open_trainer(overrides, batch)
    on_gpu = trainer.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times_ms, host_ms = [], []
    waits_s = time_waits(trainer)
    for step in range(options.warmup + options.steps):
        if step == options.warmup:
            trainer.timer.means(1)  # forgets the steps before
        waits_s.clear()
        began = time.perf_counter()
        take_step()
        if step >= options.warmup:
            times_ms.append(1000 * (time.perf_counter() - began))
            host_ms.append(times_ms[-1] - 1000 * sum(waits_s))
    split = trainer.timer.means(options.steps)
    busy_ms, launches = trace(take_step) if on_gpu else (None, None)
    deciles = statistics.quantiles(times_ms, n=10)
    median_ms = statistics.median(times_ms)
    return {
        "model": model, "layers": layers, "batch": batch, "graphs": graphs,
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "host_ms": statistics.median(host_ms), "gpu_busy_ms": busy_ms, "launches": launches,
        "step_ms": median_ms, "p10_ms": deciles[0], "p90_ms": deciles[-1],
        "forward_ms": 1000 * split["forward"], "backward_ms": 1000 * split["backward"],
        "optimizer_ms": 1000 * split["optimizer"],
        "audio_s_per_s": 1000 * batch * options.duration / median_ms,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        "skipped": trainer.progress.skipped,
    }  # fmt: skip


def add_noise_options(parser: ArgumentParser) -> None:
    """Add the options of the corpus, and the settings that every run takes."""
    parser.add_argument("--duration", type=float, default=7.0, help="seconds of each utterance")
    parser.add_argument("overrides", nargs="*", help="further settings, e.g. model.depth=2")


def main(arguments: list[str] | None = None) -> int:
    """Time every model, batch size and way of launching."""
    parser = new_parser(__doc__)
    parser.add_argument("--model", nargs="+", default=["rnn_8"])
    parser.add_argument("--batch", nargs="+", type=int, default=[4])
    parser.add_argument("--backend", default="auto", help="recurrent backend of ds2_ops")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--graphs", nargs="+", choices=("auto", "on", "off"), default=["auto"])
    parser.add_argument("--warmup", type=int, default=14)
    parser.add_argument("--steps", type=int, default=20)
    add_noise_options(parser)
    parser.add_argument(
        "--layers", nargs="+", choices=("ours", "torch"), default=["ours"],
        help="torch: torch.nn's RNN, LSTM or GRU in place of our layers, always without CUDA graphs",
    )  # fmt: skip
    options = parse(parser, arguments)
    title = f"training steps, {options.duration:g} s utterances, backend {options.backend}"
    head = facts(options, resolve_device(options.device), title)
    table, rows = Table(COLUMNS), []
    ways = [("ours", graphs) for graphs in options.graphs if "ours" in options.layers]
    ways += [("torch", "off")] if "torch" in options.layers else []  # cuDNN uses streams of its own
    for model, batch, (layers, graphs) in itertools.product(options.model, options.batch, ways):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(bench(model, layers, batch, graphs, options, Path(folder)))
        table.print_row(rows[-1])
    print(json.dumps({**head, "duration_s": options.duration, "rows": rows}))
    return 0
