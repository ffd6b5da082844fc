"""Time the search of `batching=auto` on a GPU, and compare what it says of memory with what training then takes.

    python tools/bench_batching.py --model rnn_8 rnn_48_skip_4
    python tools/bench_batching.py --model rnn_8 --steps 0 batching.audio_s=1000     # settings of a run follow

Utterances are segments of one file of noise, 2 to 16 s long, with random transcripts, so many that the whole corpus
does not fit. For each model: seconds of the search, the budget, GiB that the largest trial said and that steps over the
batches of most audio and of most utterances took at their peak (the trainer's, beside its weights), of the GPU's.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import soundfile
import torch

from ds2.commands.compose import compose_config
from ds2.data.manifest import Utterance, write_manifest
from ds2.training import trainer
from ds2.training.device_tuning import worst_parts
from ds2.training.trainer import Trainer

RATE_HZ, FILE_S, LETTERS_A_S = 16000, 900.0, 13.0


def write_corpus(folder: Path, utterances: int) -> Path:
    """Write a file of noise and a manifest of its segments."""
    rng = np.random.default_rng(1)
    path = folder / "noise.wav"
    soundfile.write(path, 0.1 * rng.standard_normal(int(FILE_S * RATE_HZ), dtype=np.float32), RATE_HZ)
    listed = []
    for index, duration_s in enumerate(rng.uniform(2.0, 16.0, utterances).round(2).tolist()):
        letters = np.cumsum(rng.integers(1, 26, int(duration_s * LETTERS_A_S))) % 26
        text = "".join(chr(ord("a") + letter) for letter in letters)
        listed.append(Utterance(path, duration_s, text, offset_s=round((FILE_S - 17.0) * index / utterances, 3)))
    write_manifest(folder / "noise.jsonl", listed)
    return folder / "noise.jsonl"


def main() -> None:
    """Parse, search, step, print a row for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["rnn_8"])
    parser.add_argument("--utterances", type=int, default=3000, help="of the corpus")
    parser.add_argument("--steps", type=int, default=2, help="over each of the worst batches")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)6.0f ms  %(message)s")
    faulthandler.dump_traceback_later(45, repeat=True)
    rows = []
    for model in given.model:
        with tempfile.TemporaryDirectory() as folder:
            manifest = write_corpus(Path(folder), given.utterances)
            rows.append(row(model, manifest, given.steps, given.overrides))
    print("model                search s  budget s  batches  told GiB  peak GiB  of GiB  audio s/s")
    print("\n".join(rows), flush=True)


def row(model: str, manifest: Path, steps: int, overrides: list[str]) -> str:
    """Search, then step."""
    config = compose_config(
        [
            f"model={model}", "batching=auto", f"data.train=[{manifest}]", f"data.work_dir={manifest.parent}",
            "optim.learning_rate=1e-6", "train.max_skipped_steps=100000",
            f"run_dir={manifest.parent / 'run'}", *overrides,
        ]
    )  # fmt: skip
    told, spent_s = [0.0], [0.0]

    class Timed(trainer.MemoryProbe):
        def __call__(self, indices: list[int]) -> float | None:
            size = super().__call__(indices)
            told[0] = max(told[0], size or 0.0)
            return size

    settle = trainer.choose_batching

    def timed(*arguments: object) -> object:
        began = time.monotonic()
        settled = settle(*arguments)  # type: ignore[arg-type]
        spent_s[0] = time.monotonic() - began
        return settled

    trainer.MemoryProbe, trainer.choose_batching = Timed, timed  # type: ignore[assignment, misc]
    try:
        run = Trainer(config, Path(config.run_dir))
    finally:
        trainer.MemoryProbe, trainer.choose_batching = Timed.__base__, settle  # type: ignore[assignment, misc]
    fixed = replace(config.batching, utterances=0, audio_s=run.batching.audio_s)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run.model.train()
    worst = worst_parts(run.durations_s, fixed, config.train.seed, 1)
    audio_s, began = 0.0, time.monotonic()
    for step in range(steps):
        for batch in worst:
            run.step(run.ahead(run.loader.epoch([batch], 1)), [batch])
        if not step:  # kernels of new shapes are built, workers started
            audio_s, began = 0.0, time.monotonic()
        else:
            audio_s += sum(run.durations_s[batch].sum() for batch in worst)
    took_s = time.monotonic() - began
    peak, total = torch.cuda.max_memory_allocated(), torch.cuda.get_device_properties(0).total_memory
    return (
        f"{model:20s} {spent_s[0]:8.1f}  {fixed.audio_s:8.0f}  {len(run.plan()):7d}  {told[0] / 2**30:8.1f}  "
        f"{peak / 2**30:8.1f}  {total / 2**30:6.1f}  {audio_s / max(took_s, 1e-9):9.0f}"
    )


if __name__ == "__main__":
    main()
