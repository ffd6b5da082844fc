"""Latency of a block of live audio, from its samples to logits on the host, for batches of streams.

    python tools/bench.py streaming model=rnn_8 --batch 1 16 64

Each stream accepts 0.2 s of samples at a time; the last column is the time of that for all streams. "device" is the
time of the CUDA graph alone. Weights are random: no time depends on them.
"""

import statistics
import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from benchmarks.common import Table, facts, measure
from dispatch import new_parser, parse

from ds2.audio.features import Features
from ds2.audio.stream import SampleBlocks
from ds2.commands.compose import compose_config
from ds2.inference.runner import BlockRunner
from ds2.model.acoustic import AcousticModel
from ds2.text.alphabet import Alphabet

BLOCK_S = 0.2


def runner_of(overrides: Sequence[str], device: torch.device, precision: str) -> tuple[BlockRunner, int]:
    """The runner of an untrained model, and the feature frames of its blocks."""
    config = compose_config([*overrides, "run_dir=none", "data.train=[none]", "data.dev=[none]"])
    torch.manual_seed(0)
    features = Features(config.features, config.data.sample_rate_hz).to(device)
    labels, step_s = len(Alphabet.from_config(config.alphabet)), config.features.step_s
    model = AcousticModel(config.model, features.bins, labels, step_s).to(device).eval()
    block_frames = model.time_stride * round(BLOCK_S / (step_s * model.time_stride))
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    return BlockRunner(model, features, block_frames, dtype), block_frames


def block_ms(runner: BlockRunner, streams: int, block_frames: int, rounds: int) -> tuple[float, float, float]:
    """Median and p98 of a block of `streams` streams, and the median of accepting their samples, in ms."""
    features, draw = runner.features, np.random.default_rng(0)
    slots = [runner.start_stream() for _ in range(streams)]
    cuts = [SampleBlocks(features, block_frames, partial(runner.input_buffer, slot)) for slot in slots]
    samples = draw.normal(0, 0.1, (streams, block_frames * features.step_samples)).astype(np.float32)
    for cut, own in zip(cuts, samples, strict=True):  # windows are longer than steps: the first block has more
        assert not list(cut.accept(own[: features.window_samples - features.step_samples]))
    on_gpu = runner.device.type == "cuda"

    def run_block() -> tuple[float, float]:
        start_s = time.perf_counter()
        blocks = [block for cut, own in zip(cuts, samples, strict=True) for block in cut.accept(own)]
        accepted_s = time.perf_counter()
        for first in range(0, streams, runner.max_batch):
            last = first + runner.max_batch
            logits = runner.step(slots[first:last], blocks[first:last]).logits
            torch.empty(logits.shape, pin_memory=on_gpu).copy_(logits, non_blocking=True)
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return 1000 * (time.perf_counter() - accepted_s), 1000 * (accepted_s - start_s)

    times_ms, accept_ms = zip(*(run_block() for _ in range(8 + rounds)), strict=True)
    return statistics.median(times_ms[8:]), float(np.percentile(times_ms[8:], 98)), statistics.median(accept_ms[8:])


def main(arguments: list[str] | None = None) -> int:
    """Measure each number of streams."""
    parser = new_parser(__doc__)
    parser.add_argument("overrides", nargs="*", default=["model=rnn_8"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16"))
    options = parse(parser, arguments)
    device = torch.device(options.device)
    precision = options.precision or ("bf16" if device.type == "cuda" else "fp32")
    runner, block_frames = runner_of(options.overrides, device, precision)
    facts(options, device, f"{' '.join(options.overrides)}, blocks of {BLOCK_S:g} s, {precision}")
    columns = {"streams": "{streams}", "ms": "{median:.3f}", "p98 ms": "{p98:.3f}", "device ms": "{device:.3f}"}
    table = Table(columns | {"accepting samples ms": "{accept:.3f}"})
    for streams in options.batch:
        median, p98, accept = block_ms(runner, streams, block_frames, options.rounds)
        graph = None
        if device.type == "cuda" and streams in runner.batches:
            graph = 1000 * measure(runner.batches[streams].run[False], device, options.rounds)[0]
        table.print_row({"streams": streams, "median": median, "p98": p98, "device": graph, "accept": accept})
    return 0
