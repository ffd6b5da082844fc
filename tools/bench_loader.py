"""Measure the loader alone: utterances and audio seconds a second by worker count, and how long a GPU would wait.

    python tools/bench_loader.py                                   a corpus made of noise, FLAC, 2 to 16 s
    python tools/bench_loader.py --manifest train.jsonl --workers 0 2 8 --consume 20000

The rate is what the workers give to a consumer that does nothing. With --consume R a consumer that needs each batch for
(audio seconds / R) seconds, as a GPU training at R times real time does, is timed as well; `waits` is the share of the
epoch that it spends waiting, the first batch included.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import soundfile
import torch

from ds2.config.schema import AugmentConfig, BatchingConfig, Config, DataConfig
from ds2.data.batching import plan_epoch
from ds2.data.loader import Batch, SpeechLoader
from ds2.data.manifest import Utterance, read_manifests
from ds2.system.machine import usable_cores
from ds2.text.alphabet import Alphabet

SAMPLE_RATE_HZ = 16000
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
    parser.add_argument("--cache", nargs="+", choices=["disk", "none"], default=["disk"])
    parser.add_argument("--consume", type=float, default=0.0, help="audio seconds a second that a GPU takes; 0: skip")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with tempfile.TemporaryDirectory() as folder:
        utterances = read_manifests(arguments.manifest) or made_corpus(Path(folder), arguments.made_utterances)
        audio_s = sum(u.duration_s for u in utterances)
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
        print(f"{len(utterances)} utterances, {audio_s:.0f} s, batches of {arguments.batch}")
        print(f"{usable_cores()} cores, GPU {device}")
        print("cache augment           workers  first batch ms  utterances/s  audio s/s  waits")
        for cache in arguments.cache:
            data = DataConfig(work_dir=folder, cache=cache, sample_rate_hz=SAMPLE_RATE_HZ)
            for name in arguments.augment:
                for workers in arguments.workers:
                    config = Config(
                        data=dataclasses.replace(data, workers=workers), augment=AUGMENTATIONS[name], run_dir=folder
                    )
                    measured = measure(utterances, config, arguments.batch, arguments.epochs, arguments.consume)
                    print(f"{cache:5s} {name:17s} {workers:7d}  {measured}", flush=True)


def measure(utterances: Sequence[Utterance], config: Config, batch: int, epochs: int, consume: float) -> str:
    """Return one row: time to the first batch, rates, and the share of time that a consumer waits."""
    durations_s = np.array([u.duration_s for u in utterances])
    started = time.perf_counter()
    alphabet, cpu = Alphabet.from_config(config.alphabet), torch.device("cpu")
    loader = SpeechLoader(utterances, config.data, cpu, alphabet, config.augment, config.train.seed)

    def epoch(number: int) -> Iterator[Batch]:
        return loader.epoch(plan_epoch(durations_s, BatchingConfig(utterances=batch), number, seed=1), number)

    first = epoch(2)
    next(first)
    first_ms = 1000 * (time.perf_counter() - started)
    for _ in first:
        pass
    count, audio_s, started = 0, 0.0, time.perf_counter()
    for number in range(3, 3 + epochs):
        for loaded in epoch(number):
            count += len(loaded.indices)
            audio_s += float(loaded.sample_lengths.sum()) / SAMPLE_RATE_HZ
    elapsed_s = time.perf_counter() - started
    waits = f"{share_waited(epoch(3 + epochs), consume):6.1%}" if consume else "-"
    return f"{first_ms:14.0f}  {count / elapsed_s:12.0f}  {audio_s / elapsed_s:9.0f}  {waits}"


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
