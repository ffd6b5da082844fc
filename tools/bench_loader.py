"""Measure the loader alone: utterances and audio seconds a second by worker count, and how long a GPU would wait.

    python tools/bench_loader.py                                   a corpus made of noise, FLAC, 2 to 16 s
    python tools/bench_loader.py --manifest train.jsonl --workers 0 2 8 --consume 20000
    python tools/bench_loader.py --source files cache shards --ranks 1 2 --workers 0 --augment none

The rate is what the workers give to a consumer that does nothing. With --consume R a consumer that needs each batch for
(audio seconds / R) seconds, as a GPU training at R times real time does, is timed as well; `waits` is the share of the
epoch that it spends waiting, the first batch included. With --ranks 2 two processes load their parts of each batch at
once, and rates are of both together. `CPU ms each` is processor time of one rank an utterance, without that of workers:
on a busy machine the better figure.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import multiprocessing
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import soundfile
import torch

from ds2.config.schema import AugmentConfig, BatchingConfig, Config, DataConfig
from ds2.data.batching import deal, plan_epoch
from ds2.data.loader import Batch, SpeechLoader
from ds2.data.manifest import Utterance, read_manifests
from ds2.data.shards import write_shards
from ds2.system.machine import usable_cores
from ds2.text.alphabet import Alphabet

SAMPLE_RATE_HZ = 16000
CACHE_OF = {"files": "none", "cache": "disk", "shards": "none"}
"""Where utterances are read from, and the `data.cache` of it."""
AUGMENTATIONS = {
    "none": AugmentConfig(),
    "speed": AugmentConfig(speed=[0.9, 1.0, 1.1]),
    "speed+gain+noise": AugmentConfig(speed=[0.9, 1.0, 1.1], gain_db=[-6.0, 6.0], noise_probability=0.4),
}


def main() -> None:
    """Run the measurement that the command line asks for and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--manifest", nargs="*", default=[], help="JSON-lines manifests; none: a corpus is made")
    parser.add_argument("--made-utterances", type=int, default=1000, help="size of the corpus made")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--batch", type=int, default=64, help="utterances a batch")
    parser.add_argument(
        "--epochs", type=int, default=2, help="measured, after one that starts workers and fills caches"
    )
    parser.add_argument("--augment", nargs="+", choices=list(AUGMENTATIONS), default=list(AUGMENTATIONS))
    parser.add_argument("--source", nargs="+", choices=list(CACHE_OF), default=["cache"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    parser.add_argument("--consume", type=float, default=0.0, help="audio seconds a second that a GPU takes; 0: skip")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with tempfile.TemporaryDirectory() as folder:
        utterances = read_manifests(arguments.manifest) or made_corpus(Path(folder), arguments.made_utterances)
        audio_s = sum(u.duration_s for u in utterances)
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
        print(f"{len(utterances)} utterances, {audio_s:.0f} s, batches of {arguments.batch}")
        print(f"{usable_cores()} cores, GPU {device}")
        print("source augment           ranks  workers  first batch ms  utterances/s  audio s/s  CPU ms each  waits")
        rows = itertools.product(arguments.source, arguments.augment, arguments.ranks, arguments.workers)
        for source, name, ranks, workers in rows:
            listed = utterances
            if source == "shards":
                listed = write_shards(utterances, Path(folder) / "shards", SAMPLE_RATE_HZ, 250_000_000).utterances
            data = DataConfig(work_dir=folder, cache=CACHE_OF[source], sample_rate_hz=SAMPLE_RATE_HZ, workers=workers)
            config = Config(data=data, augment=AUGMENTATIONS[name], run_dir=folder)
            how = partial(measure, listed, config, arguments.batch, arguments.epochs, arguments.consume, ranks)
            with ProcessPoolExecutor(ranks, multiprocessing.get_context("spawn")) as processes:
                measured = list(processes.map(how, range(ranks)))
            first_ms, utterances_s, audio_s, cpu_ms, waits = (list(column) for column in zip(*measured, strict=True))
            shown = f"{max(waits):6.1%}" if arguments.consume else "-"
            print(
                f"{source:6s} {name:17s} {ranks:6d} {workers:8d}  {max(first_ms):14.0f}  {sum(utterances_s):12.0f}  "
                f"{sum(audio_s):9.0f}  {max(cpu_ms):11.2f}  {shown}",
                flush=True,
            )


def measure(
    utterances: Sequence[Utterance], config: Config, batch: int, epochs: int, consume: float, ranks: int, rank: int
) -> tuple[float, float, float, float, float]:
    """Return one rank's milliseconds to the first batch, rates, processor time, and the share that a consumer waits."""
    durations_s = np.array([u.duration_s for u in utterances])
    started = time.perf_counter()
    alphabet, cpu = Alphabet.from_config(config.alphabet), torch.device("cpu")
    loader = SpeechLoader(utterances, config.data, cpu, alphabet, config.augment, config.train.seed)

    def epoch(number: int) -> Iterator[Batch]:
        plan = plan_epoch(durations_s, BatchingConfig(utterances=batch), number, seed=1)
        return loader.epoch([deal(whole, rank, ranks) for whole in plan], number)

    first = epoch(2)
    next(first)
    first_ms = 1000 * (time.perf_counter() - started)
    for _ in first:
        pass
    count, audio_s, started, cpu = 0, 0.0, time.perf_counter(), time.process_time()
    for number in range(3, 3 + epochs):
        for loaded in epoch(number):
            count += len(loaded.indices)
            audio_s += float(loaded.sample_lengths.sum()) / SAMPLE_RATE_HZ
    elapsed_s, cpu_ms = time.perf_counter() - started, 1000 * (time.process_time() - cpu) / count
    waits = share_waited(epoch(3 + epochs), consume) if consume else 0.0
    return first_ms, count / elapsed_s, audio_s / elapsed_s, cpu_ms, waits


def share_waited(batches: Iterator[Batch], consume: float) -> float:
    """Return the share of an epoch that a consumer of `consume` audio seconds a second waits for batches."""
    waited_s, started = 0.0, time.perf_counter()
    while True:
        asked = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            return waited_s / (time.perf_counter() - started)
        waited_s += time.perf_counter() - asked
        time.sleep(float(batch.sample_lengths.sum()) / SAMPLE_RATE_HZ / consume)


def made_corpus(folder: Path, count: int) -> list[Utterance]:
    """Write utterances of noise, 2 to 16 s, as FLAC."""
    rng = np.random.default_rng(0)
    utterances = []
    for number in range(count):
        samples = int(rng.uniform(2.0, 16.0) * SAMPLE_RATE_HZ)
        path = folder / f"noise{number:05d}.flac"
        soundfile.write(path, 0.1 * rng.standard_normal(samples).clip(-5, 5), SAMPLE_RATE_HZ, subtype="PCM_16")
        utterances.append(Utterance(path, samples / SAMPLE_RATE_HZ, "seven words about as long as these"))
    return utterances


if __name__ == "__main__":
    main()
