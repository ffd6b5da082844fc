"""Latency of a block of streaming audio: samples where they arrived to logits on the host, for batches of streams.

    python tools/bench_streaming.py model=rnn_8 --batch 1 16 64

Samples arrive 0.2 s at a time and are taken as they come; what that takes for all streams is a column of its own.
Beside it the same by the model's own `step`, launch by launch, and the time that the device takes for the graph alone.
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
from ds2.model.acoustic import AcousticModel
from ds2.recognition.graphed import GraphedBlocks
from ds2.recognition.hearing import Chunks, Hearing
from ds2.recognition.pipeline import Pipeline
from ds2.text.alphabet import Alphabet


def parts_of(overrides: Sequence[str], device: torch.device, precision: str) -> Pipeline:
    """An untrained model with all that belongs to it."""
    config = compose_config([*overrides, "run_dir=none", "data.train=[none]", "data.dev=[none]"])
    torch.manual_seed(0)
    features = Features(config.features, config.data.sample_rate_hz).to(device)
    alphabet = Alphabet.from_config(config.alphabet)
    model = AcousticModel(config.model, features.bins, len(alphabet), config.features.step_s).to(device).eval()
    decoder = make_decoder(DecodeConfig(), alphabet, config.features.step_s * model.time_stride, device)
    return Pipeline(model, features, alphabet, decoder, device, precision)


def hear(hearing: Hearing, parts: Pipeline, streams: int, block_frames: int, rounds: int) -> tuple[float, float, float]:
    """Median and p98 of a block of so many streams, and the median of taking their samples, in ms."""
    features, draw = parts.features, np.random.default_rng(0)
    begun = [hearing.start() for _ in range(streams)]
    cuts = [SampleBlocks(features, block_frames, partial(hearing.room, stream)) for stream in begun]
    samples = draw.normal(0, 0.1, (streams, block_frames * features.step_samples)).astype(np.float32)
    for cut, own in zip(cuts, samples, strict=True):  # windows are longer than steps: the first block has more
        assert not list(cut.accept(own[: features.window_samples - features.step_samples]))
    on_gpu = parts.device.type == "cuda"

    def act() -> tuple[float, float]:
        start_s = time.perf_counter()
        blocks = [block for cut, own in zip(cuts, samples, strict=True) for block in cut.accept(own)]
        taken_s = time.perf_counter()
        for said in hearing.step(begun, blocks):
            torch.empty(said.logits.shape, pin_memory=on_gpu).copy_(said.logits, non_blocking=True)
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return 1000 * (time.perf_counter() - taken_s), 1000 * (taken_s - start_s)

    found, taken = zip(*(act() for _ in range(8 + rounds)), strict=True)
    return statistics.median(found[8:]), float(np.percentile(found[8:], 98)), statistics.median(taken[8:])


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
    print("| streams | ms | p98 ms | device ms | taking samples ms | launch by launch ms |\n|---|---|---|---|---|---|")
    blocks = GraphedBlocks(parts, block_frames)
    for streams in given.batch:
        found, slowest, taken = hear(blocks, parts, streams, block_frames, given.rounds)
        alone = f"{device_ms(blocks, streams):.3f}" if device.type == "cuda" and streams in blocks.batches else ""
        before, _, _ = hear(Chunks(parts, block_frames), parts, streams, block_frames, max(10, given.rounds // 5))
        print(f"| {streams} | {found:.3f} | {slowest:.3f} | {alone} | {taken:.3f} | {before:.3f} |", flush=True)


if __name__ == "__main__":
    main()
