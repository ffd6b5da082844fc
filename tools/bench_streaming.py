"""Latency of a block of streaming audio: samples where they arrived to logits on the host, for batches of streams.

    python tools/bench_streaming.py model=rnn_8 --batch 1 16 64

Samples arrive 0.2 s at a time and are taken as they come; what that takes for all streams is a column of its own.
A further column is the time that the device takes for the graph alone.
Weights are random: no time depends on them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from ds2.audio.features import Features
from ds2.audio.stream import SampleBlocks
from ds2.commands.compose import compose_config
from ds2.config.schema import DecodeConfig
from ds2.decoding.methods import make_decoder
from ds2.inference.runner import BlockRunner
from ds2.model.acoustic import AcousticModel
from ds2.recognition.pipeline import Pipeline
from ds2.text.alphabet import Alphabet


def pipeline_of(overrides: Sequence[str], device: torch.device, precision: str) -> Pipeline:
    """An untrained model with all that belongs to it."""
    config = compose_config([*overrides, "run_dir=none", "data.train=[none]", "data.dev=[none]"])
    torch.manual_seed(0)
    features = Features(config.features, config.data.sample_rate_hz).to(device)
    alphabet = Alphabet.from_config(config.alphabet)
    model = AcousticModel(config.model, features.bins, len(alphabet), config.features.step_s).to(device).eval()
    decoder = make_decoder(DecodeConfig(), alphabet, config.features.step_s * model.time_stride, device)
    return Pipeline(model, features, alphabet, decoder, device, precision)


def block_ms(runner: BlockRunner, streams: int, block_frames: int, rounds: int) -> tuple[float, float, float]:
    """Median and p98 of a block of so many streams, and the median of taking their samples, in ms."""
    features, draw = runner.features, np.random.default_rng(0)
    slots = [runner.start_stream() for _ in range(streams)]
    cuts = [SampleBlocks(features, block_frames, partial(runner.input_buffer, slot)) for slot in slots]
    samples = draw.normal(0, 0.1, (streams, block_frames * features.step_samples)).astype(np.float32)
    for cut, own in zip(cuts, samples, strict=True):  # windows are longer than steps: the first block has more
        assert not list(cut.accept(own[: features.window_samples - features.step_samples]))
    on_gpu = runner.device.type == "cuda"

    def act() -> tuple[float, float]:
        start_s = time.perf_counter()
        blocks = [block for cut, own in zip(cuts, samples, strict=True) for block in cut.accept(own)]
        taken_s = time.perf_counter()
        for output in runner.step(slots, blocks):
            torch.empty(output.logits.shape, pin_memory=on_gpu).copy_(output.logits, non_blocking=True)
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return 1000 * (time.perf_counter() - taken_s), 1000 * (taken_s - start_s)

    times_ms, taken_ms = zip(*(act() for _ in range(8 + rounds)), strict=True)
    return statistics.median(times_ms[8:]), float(np.percentile(times_ms[8:], 98)), statistics.median(taken_ms[8:])


def device_ms(runner: BlockRunner, size: int, rounds: int = 50) -> float:
    """Time of the graph of a batch size on the device alone."""
    run = runner.batches[size].run[False]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(rounds):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / rounds


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description="latency of a block of streaming audio")
    parser.add_argument("overrides", nargs="*", default=["model=rnn_8"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--block-s", type=float, default=0.2)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="")
    given = parser.parse_args()
    device = torch.device(given.device)
    precision = given.precision or ("bf16" if device.type == "cuda" else "fp32")
    pipeline = pipeline_of(given.overrides, device, precision)
    block_frames = pipeline.model.time_stride * round(given.block_s / pipeline.frame_s)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{' '.join(given.overrides)}, blocks of {given.block_s:g} s, {precision}, {name}")
    print("| streams | ms | p98 ms | device ms | taking samples ms |\n|---|---|---|---|---|")
    runner = pipeline.block_runner(block_frames)
    for streams in given.batch:
        median, slowest, taken = block_ms(runner, streams, block_frames, given.rounds)
        alone = f"{device_ms(runner, streams):.3f}" if device.type == "cuda" and streams in runner.batches else ""
        print(f"| {streams} | {median:.3f} | {slowest:.3f} | {alone} | {taken:.3f} |", flush=True)


if __name__ == "__main__":
    main()
