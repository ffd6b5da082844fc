"""Latency of a block of streaming audio: samples on the host to logits on the host, for batches of streams.

    python tools/bench_streaming.py model=rnn_8 --batch 1 16 64

Beside it the same by the model's own `step`, launch by launch, and the time that the device takes for the graph alone.
Weights are random: no time depends on them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ds2.audio.features import Features
from ds2.commands.compose import compose_config
from ds2.config.schema import DecodeConfig
from ds2.decoding.methods import make_decoder
from ds2.model.acoustic import AcousticModel
from ds2.recognition.graphed import GraphedBlocks
from ds2.recognition.hearing import Chunks, Hearing
from ds2.recognition.parts import Parts
from ds2.text.alphabet import Alphabet


def parts_of(overrides: Sequence[str], device: torch.device, precision: str) -> Parts:
    """An untrained model with all that belongs to it."""
    config = compose_config([*overrides, "run_dir=none", "data.train=[none]", "data.dev=[none]"])
    torch.manual_seed(0)
    features = Features(config.features, config.data.sample_rate_hz).to(device)
    alphabet = Alphabet.from_config(config.alphabet)
    model = AcousticModel(config.model, features.bins, len(alphabet), config.features.step_s).to(device).eval()
    decoder = make_decoder(DecodeConfig(), alphabet, config.features.step_s * model.time_stride, device)
    return Parts(model, features, alphabet, decoder, device, precision)


def median_ms(act: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """Median and 98th percentile of the time that `act` takes, after a few to warm up."""
    for _ in range(8):
        act()
    found = []
    for _ in range(rounds):
        start_s = time.perf_counter()
        act()
        found.append(1000 * (time.perf_counter() - start_s))
    return statistics.median(found), float(np.percentile(found, 98))


def hear(hearing: Hearing, parts: Parts, streams: int, block_frames: int, rounds: int) -> tuple[float, float]:
    """Median and p98 of a block of so many streams, logits on the host, in ms."""
    features, draw = parts.features, np.random.default_rng(0)
    samples = (block_frames - 1) * features.step_samples + features.window_samples
    blocks = [draw.normal(0, 0.1, samples).astype(np.float32) for _ in range(streams)]
    begun = [hearing.start() for _ in range(streams)]

    def block() -> list[Any]:
        return [said.logits.cpu() for said in hearing.step(begun, blocks)]

    return median_ms(block, rounds)


def device_ms(hearing: GraphedBlocks, size: int, rounds: int = 50) -> float:
    """Time of the graph of a batch size on the device alone."""
    run = hearing.batches[size].run[False]
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
    parts = parts_of(given.overrides, device, precision)
    block_frames = parts.model.time_stride * round(given.block_s / parts.frame_s)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{' '.join(given.overrides)}, blocks of {given.block_s:g} s, {precision}, {name}")
    print("| streams | ms | p98 ms | device ms | launch by launch ms |\n|---|---|---|---|---|")
    blocks = GraphedBlocks(parts, block_frames)
    for streams in given.batch:
        found, slowest = hear(blocks, parts, streams, block_frames, given.rounds)
        alone = f"{device_ms(blocks, streams):.3f}" if device.type == "cuda" and streams in blocks.batches else ""
        before, _ = hear(Chunks(parts), parts, streams, block_frames, max(10, given.rounds // 5))
        print(f"| {streams} | {found:.3f} | {slowest:.3f} | {alone} | {before:.3f} |", flush=True)


if __name__ == "__main__":
    main()
